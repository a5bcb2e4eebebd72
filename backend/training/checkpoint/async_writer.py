"""Asynchronous checkpoint writer: a thread writes while the next step computes; its optimizer step waits for it.

Until then nothing that is saved changes, so what lies in RAM is written from where it is; what lies on a card is copied
first, for a copy that is issued during the step would queue behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from backend.engine.devices import device_memory

RAM_SHARE = 0.4  # of the free RAM that a copy of what lies on a card may take


class AsyncWriter:
    """Does one piece of work at a time in a thread. What it failed by is raised to whoever asks next, once."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._kept = threading.Event()  # by the piece that is being done

    def start(self, work: Callable[[Callable[[], None]], None]) -> None:
        """Begins `work(kept)` once the piece before it is done; it calls `kept` when everything is on the disk, and may
        clear up then.

        Raises what the piece before failed by; `work` is then not begun.
        """
        self.finish()
        self._kept = threading.Event()
        self._thread = threading.Thread(target=self._do, args=(work, self._kept), name="writer")
        try:
            self._thread.start()
        except RuntimeError:  # no memory for another thread: what is to be saved is saved all the same
            self._thread = None
            self._do(work, self._kept)

    def wait(self) -> None:
        """Waits until what is being written is on the disk. Raises what it failed by."""
        if self._thread is not None:
            self._kept.wait()
        if self._failure is not None or self._thread is None or not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Waits for the piece that is being done and raises what it failed by."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _do(self, work: Callable[[Callable[[], None]], None], kept: threading.Event) -> None:
        try:
            work(kept.set)
        except BaseException as error:  # raised where it can be answered: in the thread that trains
            self._failure = error
        finally:
            kept.set()


def in_ram(value):
    """`value` (tensors in dictionaries, lists and tuples) with every tensor in RAM: those that are there already, and
    copies."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu")
    if isinstance(value, dict):
        return {name: in_ram(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_ram(inner) for inner in value)
    return value


def nbytes(value, *, elsewhere: bool = False) -> int:
    """Bytes of all tensors in `value`. `elsewhere`: only of those that are not in RAM."""
    if isinstance(value, torch.Tensor):
        return 0 if elsewhere and value.device.type == "cpu" else value.nbytes
    if isinstance(value, dict):
        return sum(nbytes(inner, elsewhere=elsewhere) for inner in value.values())
    return sum(nbytes(inner, elsewhere=elsewhere) for inner in value) if isinstance(value, list | tuple) else 0


def fits_in_ram(num_bytes: int) -> bool:
    """Whether RAM has room for a copy of so many bytes while the next step computes."""
    return num_bytes <= RAM_SHARE * device_memory.ram()[1] / device_memory.processes_here()
