"""Samplers: from noise to latents over a schedule of noise levels. Shapes as in `backend.catalog.family`.

`Denoise` is the whole contract between a network under guidance (`guidance.guided`) and the loop: the derivative dx /
dsigma at x. It is the same for flow matching and for noise that is added without bound (epsilon and v models), so one
sampler serves all: x - sigma * dx / dsigma are the latents that are expected at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from backend.catalog.family import Latents, Levels, each_stream
from backend.schema.messages import Cancelled


class Denoise(Protocol):
    def __call__(self, x: Latents, sigma: Levels, sigma_next: Levels, step: int) -> Latents:
        """dx / dsigma at `x` (B, C, h, w) and level `sigma` (), on the way to `sigma_next`, in step `step` from 0."""


OnStep = Callable[[int, Callable[[], Latents]], None]
Method = Callable[..., Latents]


def noise(shape, generator: torch.Generator, *, device, dtype: torch.dtype) -> Latents:
    """Normal noise of one picture `shape` (C, h, w) -> (1, C, h, w), or of its streams in their order.

    The generator is the CPU's and the numbers are float32, so a seed means the same on every device and in every dtype.
    """
    return each_stream(lambda one: torch.randn((1, *one), generator=generator).to(device=device, dtype=dtype), shape)


def sample(
    denoise: Denoise,
    x: Latents,
    sigmas: Levels,
    *,
    method: str = "euler",
    on_step: OnStep | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Latents:
    """`x` at sigmas[0] brought to the latents at sigmas[N] by the sampler `method`; `sigmas` (N + 1,).

    After each step `on_step(number, estimate)`, where `estimate()` is the picture's latents as expected now. Raises
    Cancelled as soon as `should_stop()` says so, before the next step.
    """
    for index in range(num_steps(sigmas)):
        if should_stop and should_stop():
            raise Cancelled
        sigma, following = (each_stream(lambda levels, at=at: levels[at], sigmas) for at in (index, index + 1))
        before = x
        x, derivative = METHODS[method](denoise, x, sigma, following, index)
        if on_step:
            on_step(index + 1, lambda: each_stream(_expected, before, sigma, derivative))  # noqa: B023 (called within this step)
    if should_stop and should_stop():
        raise Cancelled
    return x


def _expected(x: torch.Tensor, sigma: torch.Tensor, derivative: torch.Tensor) -> torch.Tensor:
    return x.float() - sigma * derivative.float()


def euler(denoise: Denoise, x: Latents, sigma: Levels, following: Levels, index: int) -> tuple[Latents, Latents]:
    """One step of Euler's method: (the next x, the derivative at this one). The arithmetic is that of diffusers'
    schedulers: float32 sums, rounded to the network's dtype after each step."""
    derivative = denoise(x, sigma, following, index)
    moved = each_stream(
        lambda at, slope, now, then: (at.float() + (then - now) * slope).to(slope.dtype),
        x,
        derivative,
        sigma,
        following,
    )
    return moved, derivative


METHODS: dict[str, Method] = {"euler": euler}


def num_steps(sigmas: Levels) -> int:
    """N of levels (N + 1,)."""
    return len(next(iter(sigmas.values())) if isinstance(sigmas, dict) else sigmas) - 1


def steps_from(sigmas: Levels, strength: float) -> Levels:
    """The tail of `sigmas` (N + 1,) for a picture that is departed from with `strength` in [0, 1]: 1 all steps, 0
    none."""
    count = num_steps(sigmas)
    return each_stream(lambda levels: levels[int(max(count - count * strength, 0)) :], sigmas)
