"""Transfers hide behind computing, there and back; torch's own cast from FP8 is fast enough. On a CPU nothing is timed."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint

from tests.gpu.test_placement_on_card import RAM, placed_on, wide  # noqa: F401

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

STREAMED = {**RAM, "preparing_device": "cpu"}
LONGEST = 1.25  # 1.10 where computing and moving take as long: behind the last block comes the second of the next pass


def seconds_of(device, work, rounds: int = 5) -> float:
    """The median, on the wall, of one `work` until the device is done. On a CPU, where nothing is judged by it, it runs once."""
    times, rounds = [], rounds if device.type != "cpu" else 1
    for _ in range(rounds + (device.type != "cpu")):
        _finish(device)
        begin = time.perf_counter()
        work()
        _finish(device)
        times.append(time.perf_counter() - begin)
    return sorted(times[-rounds:])[rounds // 2]


def _finish(device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def moving(device, nbytes: int) -> float:
    """Seconds that `nbytes` take from pinned RAM to the device."""
    if device.type == "cpu":
        return 0.0
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return seconds_of(device, lambda: target.copy_(pinned, non_blocking=True))


def train(module, x) -> None:
    y = x
    for block in module.blocks:
        y = checkpoint(block, y, use_reentrant=False)
    y.float().square().mean().backward()


@pytest.mark.parametrize("what", ["forward", "training"])
@pytest.mark.parametrize("tokens", [256, 2048, 8192])
def test_a_streamed_step_costs_the_longer_of_computing_and_moving(wide, device, tokens, what):  # noqa: F811
    tokens = 16 if device.type == "cpu" else tokens
    x = torch.randn(tokens, wide.width, dtype=torch.bfloat16, device=device, requires_grad=what == "training")
    figures = {}
    for name, config in (("resident", {}), ("streamed", STREAMED)):
        module = wide()
        placed = placed_on(device, module, wide.part, config)
        placed.onload()
        if what == "training":
            figures[name] = seconds_of(device, lambda module=module: train(module, x))
        else:
            with torch.no_grad():
                figures[name] = seconds_of(device, lambda module=module: module(x))
        placed.close()
    passes = 2 if what == "training" else 1
    figures["moving"] = passes * moving(device, wide.part.nbytes)
    longer = max(figures["resident"], figures["moving"])
    said = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in figures.items())
    print(f"{what}, {tokens} tokens: {said}; streamed / longer {figures['streamed'] / longer:.2f}")
    assert device.type == "cpu" or figures["streamed"] <= LONGEST * longer


def test_torchs_own_cast_is_fast_enough(device):
    """On a card torch casts FP8 itself: near the speed of its memory, so there is no kernel of ours."""
    count = 1 << (16 if device.type == "cpu" else 28)
    codes = torch.randint(0, 120, (count,), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    out, other = (torch.empty(count, dtype=torch.bfloat16, device=device) for _ in range(2))
    cast, copy = seconds_of(device, lambda: out.copy_(codes)), seconds_of(device, lambda: out.copy_(other))
    print(f"cast {count / cast / 1e9:.0f} G numbers/s, a copy of as many bfloat16 {count / copy / 1e9:.0f} G/s")
    assert device.type == "cpu" or cast <= 1.5 * copy
