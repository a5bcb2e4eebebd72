"""OOM retry while encoding for training: smaller batches, or VAE tiling. Each is noted, and kept from then on.

Where that is not enough, and in the training steps themselves, the run restarts with the next OOM fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from backend.engine.devices import device_memory, out_of_memory

T = TypeVar("T")


def attempt(work: Callable[[], T]) -> T | None:
    """The result of `work()`; None, with its tensors released, where it ran out of memory."""
    with out_of_memory.suppress_oom():
        return work()
    device_memory.empty_cache(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    return None


class SmallerBatches:
    """`work` on a sequence (a tensor, by its first dimension, or a list), in smaller batches after an OOM.

    As accelerate's `find_executable_batch_size`: the batch size is halved each time. Raises the out-of-memory error
    where a single item is too much. `what` is encoded, in words ("captions").
    """

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
                self.note(f"Out of memory while {self.what} were encoded; {self.most} are encoded at once from now on.")
            found += done or []
        return found


class TiledOnOom:
    """`encode(pixels, tiled=...)`, with VAE tiling for pictures that run out of memory without.

    `exact`: no picture was tiled so far.
    """

    def __init__(self, encode: Callable[..., torch.Tensor], note: Callable[[str], None]):
        self.encode, self.note = encode, note
        self.least: int | None = None  # pixels from which on a picture is encoded in tiles

    @property
    def exact(self) -> bool:
        return self.least is None

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Latents of `pixels`, shape (B, 3, H, W) in -1..1; both as `encode` takes and returns them."""
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
            "Out of memory while a picture was encoded; such pictures are encoded in tiles (VAE tiling), "
            "which other runs do not take over. A smaller --max_pixels needs none."
        )
        return self.encode(pixels, tiled=True)
