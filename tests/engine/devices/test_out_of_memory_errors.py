"""Memory that ran out: told from other errors, and what the error holds let go."""

from __future__ import annotations

import errno
import weakref

import pytest
import torch

from backend.engine.devices import device_memory, out_of_memory

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "error, is_oom",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("can't start new thread"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error, is_oom):
    assert out_of_memory.is_oom(error) is is_oom


SAID = {
    "HIP": "HIP out of memory. Tried to allocate 1.58 GiB. GPU 0 has a total capacity of 11.98 GiB",
    "HIP, of a call": "HIP error: out of memory\nCompile with `TORCH_USE_HIP_DSA` to enable device-side assertions.",
    "XPU": "XPU out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 15.56 GiB.",
    "NPU": "NPU out of memory. Tried to allocate 96.00 MiB (NPU 0; 29.50 GiB total capacity)",
    "MPS": "MPS backend out of memory (MPS allocated: 17.37 GB, other allocations: 2.11 GB, max allowed: 20.40 GB).",
    "MPS, of one tensor": "Invalid buffer size: 24.03 GiB",
    "Metal": "Internal error (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory): Insufficient Memory",
    "CUDA": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver": "CUDA driver error: out of memory",
    "inductor": "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB",
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "hipBLAS": "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "rocBLAS": "rocblas_status_memory_error when calling rocblas_gemm_ex",
    "cuDNN": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN 9, card": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN 9, RAM": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cuDNN 7": "Unable to find a valid cuDNN algorithm to run convolution",
    "MIOpen": "miopenStatusAllocFailed",
    "cuFFT": "cuFFT error: CUFFT_ALLOC_FAILED",
    "NCCL": "NCCL error in: ProcessGroupNCCL.cpp:1275, internal error - please report this issue to the NCCL developers\n"
    "Last error:\nFailed to CUDA calloc 4194304 bytes",
    "NCCL, of a call": "NCCL error: unhandled cuda error, NCCL version 2.21.5\nLast error:\nCuda failure 2 'out of memory'",
    "SYCL": "Native API failed. Native API returns: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "SYCL, card": "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "SYCL, RAM": "Native API failed. Native API returns: -6 (PI_ERROR_OUT_OF_HOST_MEMORY) -6 (PI_ERROR_OUT_OF_HOST_MEMORY)",
    "SYCL, buffer": "Native API failed. Native API returns: -4 (PI_ERROR_MEM_OBJECT_ALLOCATION_FAILURE)",
    "Windows": "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "Windows, C++": "bad allocation",
    "Windows, pages": "The paging file is too small for this operation to complete. (os error 1455)",
    "oneDNN": "could not create a primitive descriptor for a convolution forward propagation primitive",
}
MAYBE = {
    "cuDNN, no engine": "GET was unable to find an engine to execute this computation",
    "cuDNN 9, no engine": "FIND was unable to find an engine to execute this computation",
    "cuDNN, handle": "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN, inside": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuBLAS, handle": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "hipBLAS, handle": "CUDA error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`",
    "cuSOLVER, handle": "cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate(handle)`",
    "MIOpen, unknown": "miopenStatusUnknownError",
}
OTHERS = {
    "shapes": "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "kernel": "CUDA error: too many resources requested for launch",
    "shared memory": "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes may help.",
    "address": "CUDA error: an illegal memory access was encountered",
    "argument": "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`",
    "unsupported": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "launch": "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
}


@pytest.mark.parametrize("full", [True, False], ids=["a full card", "an empty card"])
def test_what_libraries_say_when_memory_ran_out(monkeypatch, full):
    """What has other reasons too counts only where hardly any of the card is free."""
    monkeypatch.setattr(device_memory, "default_device", lambda: "cuda:0")
    monkeypatch.setattr(device_memory, "card_memory", lambda device: (24 << 30, (24 << 30) // (11 if full else 9)))
    found = {name: out_of_memory.is_oom(RuntimeError(words)) for name, words in {**SAID, **MAYBE, **OTHERS}.items()}
    assert {name for name, is_oom in found.items() if is_oom} == {*SAID, *(MAYBE if full else ())}


def test_on_a_cpu_no_card_is_full():
    assert not out_of_memory.is_oom(RuntimeError(MAYBE["cuDNN, no engine"]), "cpu")


def test_a_real_failure_to_allocate_is_oom():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert out_of_memory.is_oom(caught.value)
    trouble = out_of_memory.trouble("cpu", caught.value, doing="drawing")
    assert trouble.kind == "out_of_memory" and "GiB" in trouble.message


def test_it_is_told_whether_ram_or_the_card_ran_out():
    card, cpu = torch.device("cuda", 0), torch.device("cpu")
    short_of_ram = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    assert [
        out_of_memory.is_ram_oom(error, card) for error in (torch.OutOfMemoryError("x"), MemoryError(), short_of_ram)
    ] == [False, True, True]
    assert not out_of_memory.is_ram_oom(short_of_ram, cpu)  # there it is what computes


def test_nothing_that_an_error_passed_through_is_kept_alive():
    seen = []

    def inner():
        big = torch.zeros(8)
        seen.append(weakref.ref(big))
        raise MemoryError

    def outer():
        big = torch.zeros(8)
        seen.append(weakref.ref(big))
        try:
            inner()
        except MemoryError as error:
            raise RuntimeError("out of memory") from error

    try:
        outer()
    except RuntimeError as error:
        kept = error
        assert all(ref() is not None for ref in seen)
        out_of_memory.release_tensors(kept)
        assert [ref() for ref in seen] == [None, None]
