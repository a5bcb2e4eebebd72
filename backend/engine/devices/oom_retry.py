"""Memory that runs out beside the steps: fewer things at once, a picture in tiles, guidance in two passes. Each is said, and kept from then on.

Where that is not enough, and in the steps themselves, the run begins anew one rung lower (`ladder.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from backend.engine.devices import device_memory, out_of_memory

T = TypeVar("T")


def attempt(work: Callable[[], T]) -> T | None:
    """What `work()` gives; None, with everything of it let go, where memory ran out."""
    with out_of_memory.passed_over():
        return work()
    device_memory.give_back(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    return None


class Fewer:
    """`work` on a sequence (tensors or a list), on as many of it at once as memory is enough for. One alone that is too much is raised."""

    def __init__(self, work: Callable[[Sequence], Sequence], note: Callable[[str], None], *, what: str):
        self.work, self.note, self.what = work, note, what
        self.most: int | None = None

    def __call__(self, some: Sequence) -> list:
        found: list = []
        while len(found) < len(some):
            piece = some[len(found) : len(found) + (self.most or len(some))]
            if len(piece) == 1:
                found += list(self.work(piece))
                continue
            done = attempt(lambda piece=piece: list(self.work(piece)))
            if done is None:
                self.most = len(piece) // 2
                self.note(
                    f"Memory ran out while {self.what} were encoded; {self.most} are encoded at once from now on."
                )
            found += done or []
        return found


class Tiled:
    """`encode(pixels, tiled=...)` of single pictures in tiles where memory runs out without. `exact`: none was so far."""

    def __init__(self, encode: Callable[..., torch.Tensor], note: Callable[[str], None]):
        self.encode, self.note = encode, note
        self.least: int | None = None  # pixels from which on a picture is encoded in tiles

    @property
    def exact(self) -> bool:
        return self.least is None

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        size = pixels.shape[-2] * pixels.shape[-1]
        if self.least is not None and size >= self.least:
            return self.encode(pixels, tiled=True)
        if len(pixels) > 1:
            return self.encode(pixels, tiled=False)
        found = attempt(lambda: self.encode(pixels, tiled=False))
        if found is not None:
            return found
        self.least = size
        self.note(
            "Memory ran out while a picture was encoded; such pictures are encoded in tiles, which other runs do not take over. A smaller --max_pixels needs none."
        )
        return self.encode(pixels, tiled=True)
