"""Out-of-memory (OOM) errors: detect them, release tensors held by the traceback, format a message."""

from __future__ import annotations

import contextlib
import errno
import traceback
from collections.abc import Iterator

import torch

from backend.engine.devices import device_memory
from backend.schema.messages import Trouble

OOM_TYPES = (RuntimeError, MemoryError, OSError)  # that an OOM can be raised as
SURELY_FULL = 0.1  # of a card: with less of it free, an error that may have other reasons is taken for an OOM
_MESSAGES = (
    # torch's own allocators: CUDA, HIP, XPU, NPU, MPS, the CPU
    "out of memory",
    "outofmemory",  # also Metal's kIOGPUCommandBufferCallbackErrorOutOfMemory and hipErrorOutOfMemory
    "invalid buffer size:",  # MPS, of a tensor larger than any buffer
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",  # the same of Microsoft's library
    "paging file is too small",
    "can't start new thread",  # there is no room for its stack
    # drivers and libraries, for memory and workspaces of their own
    "errormemoryallocation",  # cudaErrorMemoryAllocation
    "status_alloc_failed",  # cuBLAS, cuDNN, cuSPARSE, cuSOLVER, hipBLAS
    "statusallocfailed",  # MIOpen
    "cufft_alloc_failed",
    "rocblas_status_memory_error",
    "status_insufficient_resources",  # cuSPARSE
    "_allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and its like
    "_allocation_failure",  # SYCL: MEM_OBJECT_ALLOCATION_FAILURE
    "out_of_device_memory",  # Level Zero by SYCL: UR_RESULT_ERROR_..., ZE_RESULT_ERROR_...
    "out_of_host_memory",
    "error_out_of_resources",  # the same, UR_ and PI_; HSA's begins with STATUS_
    "status_error_out_of_resources",
    "failed to cuda calloc",  # NCCL
    "failed to cuda host alloc",
    "failed to allocate memory",  # CANN
    "unable to find a valid cudnn algorithm",  # none whose workspace fits
    "could not create a primitive",  # oneDNN, whose convolutions found no room
)
_MAYBE = (  # what else such a library says when its workspace or its handle found no room
    "unable to find an engine",  # cuDNN 8 and 9: every engine was tried, and each one's own error was dropped
    "_status_not_initialized",  # of cublasCreate, cudnnCreate and their like
    "_status_internal_error",
    "cufft_internal_error",
    "miopenstatusinternalerror",
    "miopenstatusunknownerror",
    "unhandled cuda error",  # NCCL
)
_OF_RAM = (
    "defaultcpuallocator",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
    "paging file is too small",
    "can't start new thread",
    "out_of_host_memory",
    "host_allocation_failed",
    "failed to cuda host alloc",
)
_WINDOWS = (8, 14, 1455)  # no memory for a command, for an operation; the paging file is too small


def is_oom(error: BaseException, device: torch.device | str | None = None) -> bool:
    """Whether `error` is an out-of-memory error, of a card or of RAM. Messages that have other causes too count only
    where hardly any memory of the card is free: of `device`, or of the default accelerator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):  # of a mapping
        return error.errno == errno.ENOMEM or getattr(error, "winerror", None) in _WINDOWS
    if not isinstance(error, RuntimeError):
        return False
    said = str(error).lower()
    return any(words in said for words in _MESSAGES) or (any(words in said for words in _MAYBE) and _is_full(device))


def _is_full(device: torch.device | str | None) -> bool:
    device = torch.device(device or device_memory.default_device())
    if device.type == "cpu":
        return False
    try:
        total, free = device_memory.card_memory(device)
    except RuntimeError:  # the card does not answer any more: another fault
        return False
    return free < SURELY_FULL * total


def is_ram_oom(error: BaseException, device: torch.device) -> bool:
    """Whether RAM ran out while an accelerator computes; False on a CPU, whose memory is RAM."""
    if device.type == "cpu" or isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, MemoryError | OSError) or any(words in str(error).lower() for words in _OF_RAM)


def release_tensors(error: BaseException) -> None:
    """Releases the tensors in the frames of the traceback of `error`, and of the errors that it was raised from."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


@contextlib.contextmanager
def suppress_oom(device: torch.device | str | None = None) -> Iterator[list[BaseException]]:
    """Suppresses an out-of-memory error within; the list then has the error, which holds no tensors any more."""
    found: list[BaseException] = []
    try:
        yield found
    except OOM_TYPES as error:
        if not is_oom(error, device):
            raise
        release_tensors(error)
        found.append(error)


def trouble(device: str | torch.device, error: BaseException, *, doing: str) -> Trouble:
    """The out-of-memory message for users, with what they can do. `doing`: "drawing", "loading"."""
    total, free = (
        device_memory.ram() if torch.device(device).type == "cpu" else device_memory.card_memory(torch.device(device))
    )
    return Trouble(
        "out_of_memory",
        f"Out of memory while {doing}: {device} has {total / device_memory.GIB:.1f} GiB, "
        f"{free / device_memory.GIB:.1f} GiB of it free now.",
        hint="Make the picture smaller, close other programs that use the device, or let weights be offloaded.",
        detail=str(error),
    )
