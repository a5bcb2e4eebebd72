"""What of residence needs a card: the same answers in every state, transfers hidden behind computing, limits kept.

Takes about two minutes; `python -m pytest tests/gpu -s` prints the figures.
"""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from backend.engine import load, memory, placement
from backend.schema.vram import VramConfig
from tests.engine.small import inputs
from tests.engine.test_placement_training import adapt

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

FP8 = "float8_e4m3fn"
RAM = {"offload_device": "cpu", "onload_device": "cpu"}
DISK = {"offload_device": "disk", "onload_device": "disk"}
CONFIGS = {
    "resident": {},
    "part offload": {"offload_device": "cpu"},
    "streamed from RAM": {**RAM, "preparing_device": "cpu"},
    "streamed from disk": {**DISK, "preparing_device": "disk"},
    "disk to RAM, streamed": {"offload_device": "disk", "onload_device": "cpu", "preparing_device": "cpu"},
    "some stay": RAM,
    "some stay, the others from disk": DISK,
    "FP8 on the card": {"offload_device": "cpu", "offload_dtype": FP8, "onload_dtype": FP8, "preparing_dtype": FP8},
    "FP8 streamed": {
        "offload_dtype": FP8,
        "onload_dtype": FP8,
        "preparing_dtype": FP8,
        **RAM,
        "preparing_device": "cpu",
    },
    "disk, FP8 stays": {**DISK, "preparing_dtype": FP8},
}


@pytest.fixture
def device() -> torch.device:
    return memory.check_device("auto")


def on(device, values: dict) -> dict:
    return {name: value.to(device) for name, value in values.items()}


@pytest.mark.parametrize("limit", [None, 0, 200_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_answers_and_gradients_are_the_resident_modules(small, device, name, limit):
    part, build = small()
    module = build()
    placed = placement.place(module, part, VramConfig(**CONFIGS[name]), vram_limit_bytes=limit, device=device)
    with torch.no_grad():
        first = module(**on(device, inputs()))
    placed.onload()
    with torch.no_grad():
        for _ in range(3):
            got = module(**on(device, inputs()))
    plain = build()
    for key in part.tensors:
        load.assign(plain, key, placed.read(key))
    with torch.no_grad():
        want = plain(**on(device, inputs()))
    assert torch.equal(got, want)
    assert "FP8" in name or torch.equal(first, want)
    found = []
    for one in (module, plain.requires_grad_(False)):
        added = adapt(one.to(device) if one is plain else one)
        for adapter in added:
            adapter.data = adapter.data.to(device)
        one(**on(device, inputs(2))).float().square().mean().backward()
        found.append([adapter.grad for adapter in added])
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))
    placed.close()


class Wide(nn.Module):
    """Eight blocks of 128 MiB."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8192, 8192, bias=False) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            for _ in range(2):
                x = torch.nn.functional.rms_norm(block(x), (8192,))
        return x


def seconds_of(device, work, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds + 1):
        memory.synchronize(device)
        begin = time.perf_counter()
        work()
        memory.synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[rounds // 2]


@pytest.mark.parametrize("tokens", [256, 2048, 16384])
def test_a_streamed_step_costs_the_longer_of_computing_and_moving(write_part, device, tokens):
    part = write_part(Wide(), dtype=torch.bfloat16)
    x = torch.randn(tokens, 8192, dtype=torch.bfloat16, device=device)
    figures = {}
    with torch.no_grad():
        for name, config in (("resident", {}), ("streamed", {**RAM, "preparing_device": "cpu"})):
            with torch.device("meta"):
                module = Wide()
            placed = placement.place(module, part, VramConfig(**config), device=device)
            placed.onload()
            figures[name] = seconds_of(device, lambda module=module: module(x))
            placed.close()
    pinned = torch.empty(part.nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(part.nbytes, dtype=torch.uint8, device=device)
    figures["moving"] = seconds_of(device, lambda: target.copy_(pinned, non_blocking=True))
    longer = max(figures["resident"], figures["moving"])
    print(f"{tokens} tokens: {figures}, streamed / longer {figures['streamed'] / longer:.2f}")
    assert figures["streamed"] <= 1.15 * longer


def test_the_peak_stays_below_the_limit(write_part, device):
    part = write_part(Wide(), dtype=torch.bfloat16)
    limit = part.nbytes // 2
    with torch.device("meta"):
        module = Wide()
    memory.give_back(device)
    before, peak = memory.allocated(device), memory.Peak(device)
    placed = placement.place(module, part, VramConfig(**DISK), vram_limit_bytes=limit + before, device=device)
    placed.onload()
    x = torch.randn(16, 8192, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for _ in range(3):
            module(x)
    print(
        f"limit {limit / 2**20:.0f} MiB, peak {(peak.look() - before) / 2**20:.0f} MiB, stay {placed.resident_blocks()}"
    )
    assert len(placed.resident_blocks()) == 2  # two of four that fit are staging
    assert peak.look() - before <= limit + 8 * x.numel() * 2
    placed.close()
    memory.give_back(device)
    assert memory.allocated(device) <= before + x.numel() * 4


def test_torchs_own_cast_is_fast_enough(device):
    """On a card torch casts FP8 itself: near the speed of its memory, so there is no kernel of ours."""
    codes = torch.randint(0, 120, (1 << 28,), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=device)
    cast, copy = seconds_of(device, lambda: out.copy_(codes)), seconds_of(device, lambda: out.copy_(out.flip(0)))
    print(
        f"cast {codes.numel() / cast / 1e9:.0f} G numbers/s, a copy of as many bfloat16 {codes.numel() / copy / 1e9:.0f} G/s"
    )
    assert cast <= 1.5 * copy
