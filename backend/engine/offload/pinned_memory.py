"""Pinned RAM for blocks that wait there for an accelerator: bounded over the whole process, and never much more than is asked for.

torch takes the next power of two from the system for every pinned tensor (`torch.cuda.host_memory_stats` says so), so a block of 680 MB would take 1024 MiB
and a model half as much again. Here blocks lie side by side in pieces that are powers of two themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.engine.devices import device_memory
from backend.engine.loading.disk_reader import ALIGNMENT, allocate

SHARE = 0.5  # of RAM may be pinned; what is beyond goes through two small pinned buffers
LARGEST_PIECE = 4 << 30  # bytes: more at once is slow to take, and hard to find in fragmented RAM


@dataclass(eq=False)
class Pinned:
    """Gives buffers out of pieces. `expected_bytes`: about how much will be taken in all. A piece goes when the last buffer in it goes."""

    device: torch.device  # that the bytes will be copied to
    expected_bytes: int
    limit_bytes: int | None = (
        None  # of the process; None: its share of RAM, which the processes of a run divide among them
    )
    new_piece: Callable[[int], torch.Tensor] = lambda nbytes: allocate(nbytes, torch.device("cpu"), pinned=True)
    _rest: torch.Tensor | None = None  # of the last piece
    _taken: int = 0  # bytes of pieces; not every device counts for itself
    _most_bytes: int = LARGEST_PIECE << 8  # that the system may give at once, as far as is known

    def take(self, nbytes: int) -> torch.Tensor | None:
        """`nbytes` of pinned RAM (uint8), or None where that would be too much or the system gives no more."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._rest is None or self._rest.numel() < size:
            self._rest = self._piece(size)
        if self._rest is None:
            return None
        with torch.inference_mode(False):
            found, self._rest = self._rest[:nbytes], self._rest[size:]
        self.expected_bytes -= size
        return found

    def finish(self) -> None:
        """Keeps no piece alive that no buffer lies in."""
        self._rest = None

    def _piece(self, size: int) -> torch.Tensor | None:
        """Half as much, and half of that, down to `size`, where there is less. What was refused once is not asked for again: each refusal can take
        seconds."""
        limit = self.limit_bytes
        if limit is None:
            limit = int(device_memory.ram()[0] * SHARE / device_memory.processes_here())
        left = limit - max(device_memory.pinned(self.device), self._taken)
        least, nbytes = power_of_two(size), min(piece_bytes(size, self.expected_bytes), self._most_bytes)
        while nbytes >= least:
            if nbytes <= left:
                try:
                    piece = self.new_piece(nbytes)
                except (
                    RuntimeError,
                    MemoryError,
                    OSError,
                ):  # locked memory has limits of its own: WSL's, a container's, Windows'
                    self._most_bytes = nbytes // 2
                else:
                    self._taken += nbytes
                    return piece
            nbytes //= 2
        return None


def piece_bytes(size: int, expected_bytes: int) -> int:
    """The power of two to take for a first buffer of `size` when `expected_bytes` are to come in all."""
    wanted = min(max(expected_bytes, 1), LARGEST_PIECE)
    return max(power_of_two(size), 1 << (wanted.bit_length() - 1))


def power_of_two(nbytes: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(nbytes - 1, 0).bit_length()
