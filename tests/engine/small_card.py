"""Memory of a known size: what operations and placements make on the CPU is counted, and what goes beyond the limit raises as on a card."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from backend.engine.loading import disk_reader
from backend.engine.offload import block_storage, prefetch
from backend.engine.tracing import live_tensors


class SmallCard(live_tensors._Seen):
    """`now` bytes are alive, `highest` was the most; more than `most_bytes` is out of memory. Views of mapped files count nothing."""

    def __init__(self, most_bytes: float = float("inf")):
        super().__init__(torch.device("cpu"))
        self.most_bytes, self.num_refused = most_bytes, 0

    def _made(self, storage: torch.UntypedStorage) -> None:
        if self.now + storage.nbytes() > self.most_bytes:
            self.num_refused += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes")
        super()._made(storage)

    def allocate(self, nbytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
        buffer = disk_reader.allocate(nbytes, device)
        storage = buffer.untyped_storage()
        if storage.nbytes() and storage._cdata not in self.alive:  # small ones an operation has made
            self._made(storage)
        return buffer


@contextlib.contextmanager
def small_card(monkeypatch, most_bytes: float = float("inf")) -> Iterator[SmallCard]:
    card = SmallCard(most_bytes)
    with monkeypatch.context() as patched:
        patched.setattr(block_storage, "allocate", card.allocate)
        patched.setattr(prefetch, "allocate", card.allocate)
        card.watch()
        try:
            yield card
        finally:
            card.rest()
