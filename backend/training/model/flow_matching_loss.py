"""Noise, noise levels and the loss. What is drawn for a sample depends on the seed and its place in the run alone.

So N processes with M batches each draw what one process with N * M batches does, and a resumed run goes on as if it had
never stopped. How latents are noised and what the network learns, the family says (`noised`, `target`).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backend.catalog.family import DrawSettings, Family, Prediction, TrainingSchedule, settings_of
from backend.catalog.spec import ModelSpec
from backend.schema.training.config import LossSection

NUM_LEVELS = 1000  # of a training schedule
FLOW = Prediction()


@dataclass(frozen=True)
class Draws:
    """Noise (B, C, h, w) float32 and noise levels (B,) float32 in (0, 1)."""

    noise: torch.Tensor
    sigma: torch.Tensor


@functools.cache
def training_levels(schedule: TrainingSchedule, count: int = NUM_LEVELS) -> torch.Tensor:
    """The `count` levels of a training schedule, float32, falling from 1; each is practised equally often.

    DiffSynth-Studio's `FlowMatchScheduler.set_timesteps(count, training=True)`: even levels 1 - i / count, shifted,
    stretched to `terminal`.
    """
    if schedule.lowest is None:
        even = 1 - torch.arange(count, dtype=torch.float64) / count
    else:
        even = torch.linspace(1.0, schedule.lowest, count, dtype=torch.float64)
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


class NoiseLevels:
    """The noise levels of one model: those that it draws with, and those that a run practises."""

    def __init__(self, family: Family, spec: ModelSpec):
        self.family, self.spec = family, spec
        self._drawn: dict[tuple, torch.Tensor] = {}

    def settings(self, size: tuple[int, int]) -> DrawSettings:
        """What the family is told of a sample of `size` (height, width)."""
        scale = self.family.guidance(self.spec.variant).training
        return settings_of(self.spec, width=size[1], height=size[0], guidance=scale)

    def drawn(self, size: tuple[int, int], steps: int = NUM_LEVELS) -> torch.Tensor:
        """(steps + 1,): those of drawing in so many steps."""
        if (size, steps) not in self._drawn:
            self._drawn[size, steps] = self.family.sigmas(self.settings(size), steps)
        return self._drawn[size, steps]

    def practised(self, size: tuple[int, int], count: int = NUM_LEVELS) -> torch.Tensor:
        """(count,): those of the training schedule."""
        own = self.family.training_levels(self.settings(size), count)
        return training_levels(self.family.TRAINING_SCHEDULE, count) if own is None else own

    def table(self, size: tuple[int, int]) -> torch.Tensor | None:
        """(N,): what a share of the way from 1 (noise) to 0 stands for, where that is not the level itself."""
        said = self.family.prediction(self.spec.variant, self.spec.scheduler)
        return None if said.noising == "flow" else self.practised(size)


def draw(
    shape: Sequence[int],
    places: Sequence[int],
    section: LossSection,
    *,
    seed: int,
    schedule: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    within: tuple[float, float] = (0.0, 1.0),
) -> Draws:
    """Noise of `shape` (C, h, w) and a noise level for each place. `schedule` (N,): the levels of "scheduler" and
    "shifted", drawn evenly. `table` (N,): what the levels of all others stand for. `within`: the levels that are
    practised, of an expert for a range of them."""
    noise, sigma = [], []
    for place in places:
        generator = torch.Generator().manual_seed(seed_of(seed, place, "noise"))
        sigma.append(_within(_level(section, generator, schedule, table), *within))
        noise.append(torch.randn(tuple(shape), generator=generator))
    return Draws(noise=torch.stack(noise), sigma=torch.stack(sigma))


def _within(level: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """A level of the whole range brought to a part of it, in proportion."""
    return level if (low, high) == (0.0, 1.0) else low + (high - low) * level


def _level(
    section: LossSection, generator: torch.Generator, schedule: torch.Tensor | None, table: torch.Tensor | None
) -> torch.Tensor:
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
        return level if table is not None else level.clamp(1e-4, 1.0)
    else:
        level = share
    level = level.clamp(1e-4, 1.0)
    return level if table is None else table[((1 - level) * len(table)).long().clamp_max(len(table) - 1)]


def level_weight(
    sigma: torch.Tensor, section: LossSection, schedule: TrainingSchedule, said: Prediction = FLOW
) -> torch.Tensor:
    """Weight (B,) of samples at `sigma` (B,). "scheduler": the bell of DiffSynth-Studio's `set_training_weight`, 0 at
    the least and 1 in the mean over the levels of the family's training schedule; even weights where noise is added
    without bound."""
    if section.loss_weighting == "scheduler" and said.noising == "flow":
        least, mean = _bell_over(schedule)
        return (_bell(sigma) - least).clamp_min(0) / mean
    if (
        section.loss_weighting == "min_snr"
    ):  # Hang et al. 2023, for the error of x0, which is a multiple of what is predicted
        signal = (1 - sigma) if said.noising == "flow" else torch.ones_like(sigma)
        ratio = (signal / sigma.clamp_min(1e-4)) ** 2
        least = ratio.clamp_max(section.min_snr_gamma)
        return least * _x0_error(sigma, ratio, said)
    return torch.ones_like(sigma)


def _x0_error(sigma: torch.Tensor, ratio: torch.Tensor, said: Prediction) -> torch.Tensor:
    """The square of x0's error for an error of 1 of what is predicted."""
    match said.kind:
        case "velocity":
            return sigma**2
        case "epsilon":
            return 1 / ratio
        case "v":
            return 1 / (ratio + 1)
    return torch.ones_like(sigma)


def errors(prediction: torch.Tensor, target: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean squared error of each sample (B,) in float32; with `mask` (B, 1, h, w) a mean weighted by it."""
    squares = (prediction.float() - target.float()) ** 2
    if mask is None:
        return squares.flatten(1).mean(1)
    weighted = (squares * mask).flatten(1).mean(1)
    return weighted / mask.expand_as(squares).flatten(1).mean(1).clamp_min(1e-6)
