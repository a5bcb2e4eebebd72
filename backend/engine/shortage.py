"""Memory that ran out: told from other errors, let go of what the error holds, put into words."""

from __future__ import annotations

import contextlib
import errno
import traceback
from collections.abc import Iterator

import torch

from backend.engine import memory
from backend.schema.messages import Trouble

KINDS = (RuntimeError, MemoryError, OSError)  # what it can come as
_MESSAGES = (
    "out of memory",
    "outofmemory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "status_alloc_failed",  # cuBLAS and cuDNN, for workspaces of their own
    "unable to find a valid cudnn algorithm",  # none whose workspace fits
    "can't start new thread",  # there is no room for its stack
    "could not create a primitive",  # oneDNN, whose convolutions found no room
)
_OF_RAM = (
    "defaultcpuallocator",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "can't start new thread",
)
_WINDOWS = (8, 14, 1455)  # no memory for a command, for an operation; the paging file is too small


def is_one(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a card or in RAM."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):  # of a mapping
        return error.errno == errno.ENOMEM or getattr(error, "winerror", None) in _WINDOWS
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MESSAGES)


def is_of_ram(error: BaseException, device: torch.device) -> bool:
    """Whether it was RAM that ran out, beside a card that computes; on a CPU that is what computes."""
    if device.type == "cpu" or isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, MemoryError | OSError) or any(words in str(error).lower() for words in _OF_RAM)


def forget(error: BaseException) -> None:
    """Lets go of the tensors in the frames that `error`, and what it was raised from, has passed through."""
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
def passed_over() -> Iterator[list[BaseException]]:
    """Where memory runs out within, goes on after it; the list then has the error, which holds no tensors any more."""
    found: list[BaseException] = []
    try:
        yield found
    except KINDS as error:
        if not is_one(error):
            raise
        forget(error)
        found.append(error)


def trouble(device: str | torch.device, error: BaseException, *, doing: str) -> Trouble:
    """What to tell a person whose `doing` ("drawing", "loading") ran out of memory."""
    total, free = memory.ram() if torch.device(device).type == "cpu" else memory.card_memory(torch.device(device))
    return Trouble(
        "out_of_memory",
        f"Memory ran out while {doing}: {device} has {total / memory.GIB:.1f} GiB, {free / memory.GIB:.1f} GiB of it free now.",
        hint="Make the picture smaller, close other programs that use the device, or let weights be offloaded.",
        detail=str(error),
    )
