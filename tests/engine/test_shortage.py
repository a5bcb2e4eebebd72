"""Memory that ran out: told from other errors, and what the error holds let go."""

from __future__ import annotations

import errno
import weakref

import pytest
import torch

from backend.engine import shortage

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "error, is_one",
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
def test_running_out_of_memory_is_told_from_other_errors(error, is_one):
    assert shortage.is_one(error) is is_one


def test_a_real_failure_to_allocate_is_one():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert shortage.is_one(caught.value)
    trouble = shortage.trouble("cpu", caught.value, doing="drawing")
    assert trouble.kind == "out_of_memory" and "GiB" in trouble.message


def test_it_is_told_whether_ram_or_the_card_ran_out():
    card, cpu = torch.device("cuda", 0), torch.device("cpu")
    short_of_ram = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    assert [
        shortage.is_of_ram(error, card) for error in (torch.OutOfMemoryError("x"), MemoryError(), short_of_ram)
    ] == [False, True, True]
    assert not shortage.is_of_ram(short_of_ram, cpu)  # there it is what computes


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
        shortage.forget(kept)
        assert [ref() for ref in seen] == [None, None]
