"""Which attention a run computes with."""

from __future__ import annotations

import torch

from backend.engine import plain_attention


def plain_on_cpu(module: torch.nn.Module, *, tokens: int) -> bool:
    """Gives a transformer with joint attention the plain one where that pays: on a CPU, for short sequences; whether it did."""
    if next(module.parameters()).device.type != "cpu" or tokens > plain_attention.MAX_TOKENS:
        return False
    return plain_attention.use(module)
