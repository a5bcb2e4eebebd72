"""Saving beside the training: what is saved is copied in RAM, and a thread writes the copy while the next steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from backend.engine import memory

RAM_SHARE = 0.4  # of the free RAM that a copy may take


class Writer:
    """Does one piece of work at a time in a thread. What it failed by is raised to whoever asks next, once."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begins `work` once the piece before it is done. Raises what that one failed by; `work` is then not begun."""
        self.finish()
        self._thread = threading.Thread(target=self._do, args=(work,), name="writer")
        self._thread.start()

    def check(self) -> None:
        """Raises what the last piece failed by, if it has ended so. Does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Waits for the piece that is being done and raises what it failed by."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised where it can be answered: in the thread that trains
            self._failure = error


def copied(value):
    """`value` (tensors in dictionaries, lists and tuples) with every tensor copied to RAM, so that later steps do not change it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(inner) for inner in value)
    return value


def nbytes(value) -> int:
    """Bytes of all tensors in `value`."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    return sum(map(nbytes, value)) if isinstance(value, list | tuple) else 0


def fits_beside(num_bytes: int) -> bool:
    """Whether RAM has room for a copy of so many bytes while training goes on."""
    return num_bytes <= RAM_SHARE * memory.ram()[1]
