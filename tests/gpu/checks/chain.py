"""A chain of large layers, streamed, for checks of order: what it answers must not depend on when its weights come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backend.catalog.spec import PartSpec
from backend.engine.devices import device_memory
from backend.engine.loading import pinned_copy
from backend.engine.offload import placement
from backend.schema.memory_plan import VramConfig
from tests.engine.fake_cuda import CARD, fake_card
from tests.engine.small import write_part

FP8 = "float8_e4m3fn"
RAM = {"offload_device": "cpu", "onload_device": "cpu", "preparing_device": "cpu"}
DISK = {"offload_device": "disk", "onload_device": "disk", "preparing_device": "disk"}
STATES = {"RAM": RAM, "disk": DISK, "FP8": {**RAM, "offload_dtype": FP8, "onload_dtype": FP8, "preparing_dtype": FP8}}
NUM_BLOCKS = 12


class Chain(nn.Module):
    """Blocks of one square matrix each."""

    def __init__(self, num_blocks: int, width: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_blocks))

    def forward(self, x, checkpoints: bool = False):
        for block in self.blocks:
            y = checkpoint(block, x, use_reentrant=False) if checkpoints else block(x)
            x = nn.functional.rms_norm(x + y, x.shape[-1:])
        return x


@dataclass(frozen=True)
class Written:
    """A chain in a file, and an input for it."""

    part: PartSpec
    num_blocks: int
    width: int

    def build(self) -> Chain:
        with torch.device("meta"):
            return Chain(self.num_blocks, self.width).requires_grad_(False)

    def placed(self, states: dict, device: torch.device) -> Chain:
        module = self.build()
        placement.place(module, self.part, VramConfig(**states), device=device).onload()
        return module

    def input(self, device: torch.device) -> torch.Tensor:
        numbers = torch.randn(16, self.width, generator=torch.Generator().manual_seed(1))
        return numbers.to(device, torch.bfloat16)


def written(folder: Path, *, tiny: bool) -> Written:
    """Twelve blocks of 8 MiB; tiny: three small ones."""
    num_blocks, width = (3, 64) if tiny else (NUM_BLOCKS, 2048)
    torch.manual_seed(0)
    part = write_part(folder, Chain(num_blocks, width), dtype=torch.bfloat16)
    return Written(part, num_blocks, width)


def gradient(module: Chain, x: torch.Tensor) -> torch.Tensor:
    """Of a loss, with respect to the input, through checkpointed blocks."""
    x = x.detach().requires_grad_()
    module(x, checkpoints=True).float().square().mean().backward()
    return x.grad


@dataclass
class Late:
    """A device whose copies and blocks may be held up. `faults`: what a fake card found wrong."""

    device: torch.device
    sleep: Callable[[], None]
    faults: list[str] = field(default_factory=list)


@contextlib.contextmanager
def late(device: torch.device, seed: int) -> Iterator[Late]:
    """On a card kernels that only pass time; in a rehearsal the fake card, which runs each copy as late as it may."""
    if not device_memory.is_ram(device):
        chance = torch.Generator().manual_seed(seed)
        longest = 400_000  # cycles, some 0.2 ms
        sleep = getattr(torch.get_device_module(device), "_sleep", lambda cycles: None)
        yield Late(device, lambda: sleep(int(torch.randint(longest, (), generator=chance))))
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pinned_copy.PinnedCopy.__init__, "__kwdefaults__", {"bounce_bytes": 4096})
        with fake_card(patched, seed, early=[0.0, 0.05, 0.3][seed % 3]) as card:
            yield Late(CARD, lambda: None, card.faults)


def hold_up(module: Chain, there: Late) -> None:
    """From now on each copy to the device, and each block, waits a random time first."""
    prefetcher = placement.of(module).transfer.prefetcher
    copy = prefetcher._copy

    def late_copy(target, source, left):
        with prefetcher._streams.stream(prefetcher._stream):
            there.sleep()
        return copy(target, source, left)

    prefetcher._copy = late_copy
    for block in module.blocks:
        block.register_forward_pre_hook(lambda *_: there.sleep(), prepend=True)
