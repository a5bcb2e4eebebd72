"""First-block cache (step cache): where the first block's output hardly changed, the other blocks are skipped.

The rule is that of first-block caching (ParaAttention; diffusers' `FirstBlockCacheConfig`): with r the change that the
first block makes to the picture's tokens and r' that of the last step computed whole, the other blocks are skipped
where mean|r - r'| / mean|r'| is at most the threshold. What they would have added is guessed from the last two steps
computed whole, half-way between the last answer and the straight line through both: on the starter that errs a quarter
to two fifths less than the last answer alone, which is diffusers' rule (docs/engine.md). It is lossy: the picture is
another one, close by for small thresholds.

The network's own loop runs as it is written: for the length of a call its list of blocks is one that decides, after the
first block, what comes next. A skipped block is not called, so its weights are not fetched; hot LoRAs and compiled
blocks are called as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from backend.catalog.family import CachedBlocks, Family
from backend.schema.messages import Trouble

FEWEST_BLOCKS = 3  # with fewer there is hardly anything to skip
SLOPE = 0.5  # of the straight line through the last two answers; 1 overshoots where steps are large


@dataclass
class Kept:
    """Residuals of the last two fully computed steps of one pass (conditional or not).

    `change`: what the first block added to the picture's tokens, (B, tokens, width). `added`, `earlier`: what the other
    blocks added to each stream, in the last step and the one before; `added_at`, `earlier_at`: at which calls.
    """

    change: torch.Tensor | None = None
    added: tuple[torch.Tensor, ...] = ()
    earlier: tuple[torch.Tensor, ...] = ()
    call: int = 0
    added_at: int = 0
    earlier_at: int = 0

    def renew(self, change: torch.Tensor, added: tuple[torch.Tensor, ...]) -> None:
        """Records a fully computed step; shapes as of the fields."""
        self.earlier, self.earlier_at = self.added, self.added_at
        self.change, self.added, self.added_at = change, added, self.call

    def guess(self) -> tuple[torch.Tensor, ...]:
        """What the other blocks would add to each stream in this call, extrapolated; shapes as of `added`."""
        if not self.earlier:
            return self.added
        weight = SLOPE * (self.call - self.added_at) / (self.added_at - self.earlier_at)
        return tuple(
            torch.lerp(before, now, 1.0 + weight) for before, now in zip(self.earlier, self.added, strict=True)
        )


class StepCache:
    """The cache of one picture and network. Passes of classifier-free guidance have residuals of their own."""

    def __init__(self, family: Family, module: nn.Module, threshold: float):
        if not family.CACHED_BLOCKS:
            raise Trouble("not_supported", f"Steps of {family.TITLE} cannot be cached.", hint="Set step_cache to 0.")
        self.module, self.threshold = module, threshold
        self.lists: dict[CachedBlocks, nn.ModuleList] = {
            said: cast(nn.ModuleList, module.get_submodule(said.name)) for said in family.CACHED_BLOCKS
        }
        if self.num_blocks < FEWEST_BLOCKS:
            raise Trouble(
                "not_supported",
                f"Step caching skips all blocks but the first, and this model has only {self.num_blocks}.",
                hint="Set step_cache to 0.",
            )
        self.num_calls = self.num_skipped = 0
        self._kept: dict[str, Kept] = {}

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self.lists.values())

    @contextmanager
    def step(self, name: str = "together") -> Iterator[None]:
        """Within it the network, called once, may skip its blocks. `name` tells one pass of a step from another."""
        call = _Call(self, self._kept.setdefault(name, Kept()))
        modules = self.module._modules
        for said in self.lists:
            modules[said.name] = _Deciding(call, said)
        try:
            yield
        finally:
            for said, blocks in self.lists.items():
                modules[said.name] = blocks

    @property
    def sentence(self) -> str:
        """How many passes were skipped, for the picture's notes."""
        if not self.num_skipped:
            return (
                f"Step cache {self.threshold:g}: no step was close enough to the one before it, "
                "so all were computed whole."
            )
        return (
            f"Step cache {self.threshold:g}: {self.num_skipped} of {self.num_calls} passes reused what an earlier one "
            "computed; the picture is close to the exact one, not the same."
        )


class _Call:
    """One call of the network: the first block of its first list runs, and then all others or none."""

    def __init__(self, cache: StepCache, kept: Kept):
        self.cache, self.kept = cache, kept
        self.skips = False
        self.change = torch.empty(0)  # until the first block has run
        self.begun: tuple[torch.Tensor, ...] = ()

    def blocks(self, said: CachedBlocks) -> Iterator:
        lists = self.cache.lists
        blocks = list(lists[said])
        if said is next(iter(lists)):
            yield from self._first(said, blocks.pop(0))
        if self.skips:
            return
        if said is next(reversed(lists)):
            yield from blocks[:-1]
            yield partial(self._last, blocks[-1])
        else:
            yield from blocks

    def _first(self, said: CachedBlocks, block: nn.Module) -> Iterator:
        self.kept.call += 1
        yield partial(self._begin, said, block)
        self.cache.num_calls += 1
        assert self.change is not None, "the first block has run"
        self.skips = _near(self.change, self.kept.change, self.cache.threshold)
        if self.skips:
            self.cache.num_skipped += 1
            yield self._reuse

    def _begin(self, said: CachedBlocks, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = block(*args, **kwargs)
        picture = said.streams[-1]
        self.begun = begun = _streams(output)
        self.change = begun[-1] - (args[picture] if isinstance(picture, int) else kwargs[picture])
        return output

    def _last(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert self.change is not None, "the first block runs first"
        output = block(*args, **kwargs)
        added = tuple(after - before for after, before in zip(_streams(output), self.begun, strict=True))
        self.kept.renew(self.change, added)
        return output

    def _reuse(self, *args: Any, **kwargs: Any) -> Any:
        moved = tuple(before + added for before, added in zip(self.begun, self.kept.guess(), strict=True))
        return moved[0] if len(moved) == 1 else moved


class _Deciding(nn.Module):
    """Stands in for a list of blocks during one call."""

    def __init__(self, call: _Call, said: CachedBlocks):
        super().__init__()
        # not as children: names of modules stay theirs
        self.__dict__.update(count=len(call.cache.lists[said]), iterate=partial(call.blocks, said))

    def __len__(self) -> int:
        return self.__dict__["count"]

    def __iter__(self) -> Iterator:
        return self.__dict__["iterate"]()


def _streams(output: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _near(change: torch.Tensor, before: torch.Tensor | None, threshold: float) -> bool:
    """Whether every picture (row) of the batch changed by at most `threshold`, relative to `before`."""
    if before is None or before.shape != change.shape:
        return False
    dims = list(range(1, change.ndim))
    apart, size = ((change - before).abs(), before.abs())
    return bool((apart.mean(dims, dtype=torch.float32) <= threshold * size.mean(dims, dtype=torch.float32)).all())
