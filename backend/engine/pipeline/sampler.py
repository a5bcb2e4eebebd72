"""From noise to latents: schedules, guidance and the Euler steps of flow matching. Shapes as in the family's functions.

`denoise(x, sigma) -> velocity` is the whole contract between a network and the loop: x (B, C, h, w), sigma (B,).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType

import torch

from backend.engine.acceleration.first_block_cache import StepCache
from backend.schema.messages import Cancelled

Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def noise(shape: tuple[int, ...], generator: torch.Generator, *, device, dtype: torch.dtype) -> torch.Tensor:
    """Normal noise of one picture `shape` (C, h, w) -> (1, C, h, w).

    The generator is the CPU's and the numbers are float32, so a seed means the same on every device and in every dtype.
    """
    return torch.randn((1, *shape), generator=generator).to(device=device, dtype=dtype)


def guided(
    family: ModuleType,
    parts: dict,
    towards: dict,
    away: dict | None,
    scale: float,
    *,
    device,
    together: bool,
    cache: StepCache | None = None,
) -> Denoise:
    """The velocity under guidance for one picture; `towards` and `away` are encodings of `encode_text`.

    `together`: both halves run as one batch, so that a streamed block is moved once a step. Else one after the other, which
    takes half the working memory. `cache` lets steps reuse what earlier ones computed.
    """

    def predict(x, sigma, cond, name="both"):
        with cache.step(name) if cache else nullcontext():
            return family.predict(parts, x, sigma, cond)

    if away is None or scale <= 1:
        alone = family.collate([towards], device=device)
        return lambda x, sigma: predict(x, sigma, alone)
    if together:
        both = family.collate([towards, away], device=device)

        def denoise(x, sigma):
            halves = predict(torch.cat([x, x]), torch.cat([sigma, sigma]), both)
            return family.guide(*halves.chunk(2), scale)

        return denoise
    first, second = family.collate([towards], device=device), family.collate([away], device=device)

    def denoise_in_turn(x, sigma):
        velocity = predict(x, sigma, first, "towards")
        return family.guide(velocity, predict(x, sigma, second, "away"), scale)

    return denoise_in_turn


def sample(
    denoise: Denoise,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    *,
    on_step: Callable[[int, Callable[[], torch.Tensor]], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> torch.Tensor:
    """Euler's method over `sigmas` (N + 1,), from `x` at sigmas[0] to the latents at sigmas[N].

    After each step `on_step(number, estimate)`, where `estimate()` is the picture's latents as expected now. Raises Cancelled
    as soon as `should_stop()` says so, before the next step. The arithmetic is that of diffusers' scheduler: float32 sums,
    rounded to the network's dtype after each step.
    """
    for index in range(len(sigmas) - 1):
        if should_stop and should_stop():
            raise Cancelled
        sigma = sigmas[index]
        velocity = denoise(x, sigma.to(x.device).expand(x.shape[0]))
        if on_step:
            before = x
            estimate = lambda: before.float() - sigma * velocity.float()  # noqa: B023, E731 (called within this step)
        x = (x.float() + (sigmas[index + 1] - sigma) * velocity).to(velocity.dtype)
        if on_step:
            on_step(index + 1, estimate)
    if should_stop and should_stop():
        raise Cancelled
    return x


def steps_from(sigmas: torch.Tensor, strength: float) -> torch.Tensor:
    """The tail of `sigmas` (N + 1,) for a picture that is departed from with `strength` in [0, 1]: 1 all steps, 0 none."""
    num_steps = len(sigmas) - 1
    return sigmas[int(max(num_steps - num_steps * strength, 0)) :]


def mix(latents: torch.Tensor, fresh: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """`latents` with noise `fresh` at level `sigma`."""
    sigma = sigma.to(device=latents.device, dtype=latents.dtype)
    return sigma * fresh + (1.0 - sigma) * latents
