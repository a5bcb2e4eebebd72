"""Noise levels of flow matching, as diffusers' scheduler sets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def flow_sigmas(scheduler: Mapping[str, object], levels: Sequence[float], *, tokens: int) -> torch.Tensor:
    """Noise levels, float32 of shape (N + 1,), from 1 down to 0: the even `levels` (N,) shifted as `scheduler`, the
    fields of scheduler_config.json, says; a shift by size is that of a picture of so many `tokens` (the `mu` of
    diffusers' pipelines)."""
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    wanted = dict(scheduler)
    if len(levels) == 1:
        wanted["shift_terminal"] = None  # stretching a single level divides nothing by nothing
    schedule = FlowMatchEulerDiscreteScheduler.from_config(wanted)
    said = schedule.config
    slope = (said.max_shift - said.base_shift) / (said.max_image_seq_len - said.base_image_seq_len)
    mu = tokens * slope + said.base_shift - slope * said.base_image_seq_len
    schedule.set_timesteps(sigmas=levels, mu=mu)
    return schedule.sigmas
