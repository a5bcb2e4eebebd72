"""Predicted against measured peaks."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

import torch

from tests.gpu import plan_check
from tests.gpu.runner import Outcome

TINY = (
    "QwenImageTransformer2DModel",
    {"num_layers": 1, "num_attention_heads": 1, "joint_attention_dim": 64},
    {"h": 8, "w": 8, "t": 8},
    "forward",
)


def plan(device: torch.device, tiny: bool) -> Outcome:
    """All of `plan_check`; tiny, or where no CUDA is: one small network. Of a CPU's peak nothing is asked."""
    is_card = device.type == "cuda"
    with _kept_lines() as lines:
        worst, wrong = plan_check.networks(device, plan_check.CASES if is_card and not tiny else [TINY])
        if is_card and not tiny:
            wrong += plan_check.pictures(str(device))
    measured = {"worst error of allocated": worst, "lines": lines}
    if not is_card:
        return Outcome(None, measured)
    workspaces = {"allowed for workspaces MiB": plan_check.libraries_bytes(device) / 2**20}
    return Outcome(not wrong, {**measured, **workspaces, "beyond the limit": wrong})


@contextlib.contextmanager
def _kept_lines() -> Iterator[list[str]]:
    """What is printed, also while it is being printed: of a check that does not end, what it has found stays."""
    lines: list[str] = []

    class Both(io.TextIOBase):
        def write(self, text: str) -> int:
            lines.extend(filter(str.strip, text.splitlines()))
            return sys.__stderr__.write(text)

    with contextlib.redirect_stdout(Both()):
        yield lines
