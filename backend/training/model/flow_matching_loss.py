"""Noise, noise levels and the loss. What is drawn for a sample depends on the seed and its place in the run alone.

So N processes with M batches each draw what one process with N * M batches does, and a resumed run goes on as if it had never
stopped. Flow matching: x = (1 - sigma) picture + sigma noise, the network learns noise - picture.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backend.catalog.family import TrainingSchedule

NUM_LEVELS = 1000  # of a training schedule


@dataclass(frozen=True)
class Draws:
    """Noise (B, C, h, w) float32 and noise levels (B,) float32 in (0, 1)."""

    noise: torch.Tensor
    sigma: torch.Tensor


@functools.cache
def training_levels(schedule: TrainingSchedule, count: int = NUM_LEVELS) -> torch.Tensor:
    """The `count` levels of a training schedule, float32, falling from 1; each is practised equally often.

    DiffSynth-Studio's `FlowMatchScheduler.set_timesteps(count, training=True)`: even levels 1 - i / count, shifted, stretched to `terminal`.
    """
    even = 1 - torch.arange(count, dtype=torch.float64) / count
    levels = schedule.shift * even / (1 + (schedule.shift - 1) * even)
    if schedule.terminal is not None and count > 1:  # stretching a single level divides nothing by nothing
        levels = 1 - (1 - levels) * (1 - schedule.terminal) / (1 - levels[-1])
    return levels.float()


def _bell(sigma: torch.Tensor) -> torch.Tensor:
    return torch.exp(-2 * (sigma - 0.5) ** 2)


@functools.cache
def _bell_over(schedule: TrainingSchedule) -> tuple[float, float]:
    """(least, mean above it) of the bell over a training schedule."""
    values = _bell(training_levels(schedule).double())
    return float(values.min()), float((values - values.min()).mean())


def seed_of(*words) -> int:
    """A seed of 63 bits from anything printable, the same on every machine."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest(), "big") >> 1


def draw(
    shape: Sequence[int], places: Sequence[int], section, *, seed: int, schedule: torch.Tensor | None = None
) -> Draws:
    """Noise of `shape` (C, h, w) and a noise level for each place. `schedule` (N,): the levels of "scheduler" and "shifted", drawn evenly."""
    noise, sigma = [], []
    for place in places:
        generator = torch.Generator().manual_seed(seed_of(seed, place, "noise"))
        sigma.append(_level(section, generator, schedule))
        noise.append(torch.randn(tuple(shape), generator=generator))
    return Draws(noise=torch.stack(noise), sigma=torch.stack(sigma))


def _level(section, generator: torch.Generator, schedule: torch.Tensor | None) -> torch.Tensor:
    choice, share = torch.rand(2, generator=generator)
    normal = torch.randn((), generator=generator)
    if choice < section.high_noise_share:
        level = section.high_noise_from + (1 - section.high_noise_from) * share
    elif section.timestep_sampling == "logit_normal":
        level = torch.sigmoid(section.logit_mean + section.logit_std * normal)
    elif section.timestep_sampling == "mode":  # Esser et al. 2024, section 3.1
        level = 1 - share - section.mode_scale * (torch.cos(math.pi / 2 * share) ** 2 - 1 + share)
    elif section.timestep_sampling in ("scheduler", "shifted"):
        assert schedule is not None
        level = schedule[(share * len(schedule)).long().clamp_max(len(schedule) - 1)]
    else:
        level = share
    return level.clamp(1e-4, 1.0)


def level_weight(sigma: torch.Tensor, section, schedule: TrainingSchedule) -> torch.Tensor:
    """Weight (B,) of samples at `sigma` (B,). "scheduler": the bell of DiffSynth-Studio's `set_training_weight`, 0 at the least and 1 in the
    mean over the levels of the family's training schedule."""
    if section.loss_weighting == "scheduler":
        least, mean = _bell_over(schedule)
        return (_bell(sigma) - least).clamp_min(0) / mean
    if (
        section.loss_weighting == "min_snr"
    ):  # Hang et al. 2023, for the error of the velocity: x0's error is sigma times it
        ratio = ((1 - sigma) / sigma.clamp_min(1e-4)) ** 2
        return ratio.clamp_max(section.min_snr_gamma) * sigma**2
    return torch.ones_like(sigma)


def noisy(pictures: torch.Tensor, draws: Draws) -> torch.Tensor:
    sigma = draws.sigma.view(-1, *[1] * (pictures.ndim - 1))
    return (1 - sigma) * pictures + sigma * draws.noise


def errors(velocity: torch.Tensor, target: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean squared error of each sample (B,) in float32; with `mask` (B, 1, h, w) a mean weighted by it."""
    squares = (velocity.float() - target.float()) ** 2
    if mask is None:
        return squares.flatten(1).mean(1)
    weighted = (squares * mask).flatten(1).mean(1)
    return weighted / mask.expand_as(squares).flatten(1).mean(1).clamp_min(1e-6)
