"""Pinned (page-locked) RAM for offloaded blocks: a pool bounded over the whole process that wastes little.

torch's host allocator rounds every pinned tensor up to a power of two (`torch.cuda.host_memory_stats` shows it), so
a block of 680 MB would take 1024 MiB and a model half as much again. Here blocks lie side by side in pieces whose
sizes are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.engine.devices import device_memory
from backend.engine.loading.disk_reader import ALIGNMENT, allocate

SHARE = 0.5  # of RAM may be pinned; other weights are copied through two small pinned buffers (`pinned_copy`)
LARGEST_PIECE = 4 << 30  # bytes: pinning more at once is slow, and fails in fragmented RAM


@dataclass(eq=False)
class PinnedPool:
    """Cuts buffers out of pinned pieces. A piece is freed with the last buffer in it.

    `expected_bytes`: about how much will be taken in all. `limit_bytes` of the process; None: its share of RAM,
    divided among the processes of a training run.
    """

    device: torch.device  # that the bytes will be copied to
    expected_bytes: int
    limit_bytes: int | None = None
    new_piece: Callable[[int], torch.Tensor] = lambda nbytes: allocate(nbytes, torch.device("cpu"), pinned=True)
    _rest: torch.Tensor | None = None  # of the last piece
    _taken: int = 0  # bytes of pieces; `device_memory.pinned` is 0 on devices that do not count
    _most_bytes: int = LARGEST_PIECE << 8  # halved each time that the system refuses to pin so much

    def take(self, nbytes: int) -> torch.Tensor | None:
        """`nbytes` of pinned RAM (uint8, shape (nbytes,)), or None beyond the limit or where the system refuses."""
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
        """Drops the unused rest of the last piece."""
        self._rest = None

    def _piece(self, size: int) -> torch.Tensor | None:
        """A new piece of the expected size or, where that is refused, of half of it, and so on down to `size`.
        A size that was refused is not tried again: each refusal can take seconds."""
        limit = self.limit_bytes
        if limit is None:
            limit = int(device_memory.ram()[0] * SHARE / device_memory.processes_here())
        reads_done = limit - max(device_memory.pinned(self.device), self._taken)
        least, nbytes = power_of_two(size), min(piece_bytes(size, self.expected_bytes), self._most_bytes)
        while nbytes >= least:
            if nbytes <= reads_done:
                try:
                    piece = self.new_piece(nbytes)
                except (RuntimeError, MemoryError, OSError):
                    # page-locked memory has limits of its own (WSL, containers, Windows): not an OOM of this process
                    self._most_bytes = nbytes // 2
                else:
                    self._taken += nbytes
                    return piece
            nbytes //= 2
        return None


def piece_bytes(size: int, expected_bytes: int) -> int:
    """Bytes of the piece to pin for a buffer of `size` bytes when `expected_bytes` are expected: a power of two."""
    wanted = min(max(expected_bytes, 1), LARGEST_PIECE)
    return max(power_of_two(size), 1 << (wanted.bit_length() - 1))


def power_of_two(nbytes: int) -> int:
    """The smallest power of two >= `nbytes`."""
    return 1 << max(nbytes - 1, 0).bit_length()
