"""Fuse (merge) LoRAs into resident weights ("cold"), and restore the weights exactly as their files have them.

The change is computed and added in float32 and rounded once to the weight's dtype, in strips of rows that stay in the
processor's cache; where the processor multiplies bfloat16 and sums in float32, from factors split into bfloat16 digits,
to 2^-16 of the change (the weight's own rounding is 2^-9). Several changes of one weight are added up in float32, from
the weight as its file has it, and rounded once together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from backend.catalog.spec import PartSpec
from backend.engine.loading import load
from backend.engine.lora.algorithms.delta import Change, LowRank

STRIP = 1 << 17  # numbers of a weight worked on at a time: half a MiB of float32


def parameter(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer `name` (dotted) of `module`, in its own shape."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


@torch.no_grad()
def fuse(weight: torch.Tensor, change: Change, strength: float, base: torch.Tensor | None = None) -> None:
    """Merges: weight += strength * change, in place, computed in float32 and rounded once to the weight's dtype.

    `weight` has the shape of the change. `base`: the unchanged weight, of that shape, needed where it is a DoRA.
    """
    body = change.body
    if isinstance(body, LowRank) and change.dora is None:
        _add_low_rank(weight, body, strength)
        return
    delta = change.dense(None if base is None else base.cpu()).mul_(strength)
    weight.copy_(weight.float().add_(delta.to(weight.device)))


@torch.no_grad()
def fuse_all(weight: torch.Tensor, uses: Sequence[tuple[Change, float]], base: torch.Tensor) -> None:
    """weight = base + the sum of strength * change, rounded once. `base`: the unchanged weight (same shape), on any
    device."""
    total = base.to(weight.device, torch.float32, copy=True)
    whole = base.cpu() if any(change.dora for change, _ in uses) else None
    for change, strength in uses:
        fuse(total, change, strength, whole)
    weight.copy_(total.view(weight.shape))


def _add_low_rank(weight: torch.Tensor, body: LowRank, strength: float) -> None:
    scale = strength * body.scale
    flat = weight.view(weight.shape[0], -1) if weight.ndim > 1 else weight.view(-1, 1)
    up, down = body.up.to(weight.device), body.down.flatten(1).to(weight.device)
    if weight.dtype == torch.float32:
        flat.addmm_(up.float(), down.float(), alpha=scale)
    elif weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and _has_bf16_products():
        flat.addmm_(*_in_bf16(up, down), alpha=scale)
    else:
        _add_in_strips(flat, up.float(), down.float(), scale)


@cache
def _has_bf16_products() -> bool:
    """Whether this processor multiplies bfloat16 and sums in float32, which gives the float32 product rounded once."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _in_bf16(up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors in bfloat16 whose product is that of `up` and `down`: high times high, high times low and low times high,
    side by side."""
    if up.dtype == down.dtype == torch.bfloat16:
        return up, down
    ups, downs = _digits(up), _digits(down)
    pairs = [(a, b) for i, a in enumerate(ups) for j, b in enumerate(downs) if i + j < 2]
    return torch.cat([a for a, _ in pairs], dim=1), torch.cat([b for _, b in pairs])


def _digits(values: torch.Tensor) -> list[torch.Tensor]:
    """One or two bfloat16 tensors of 8 bits each whose sum is `values`, for float32 to 2^-17 of each number."""
    if values.dtype == torch.bfloat16:
        return [values]
    high = values.to(torch.bfloat16)
    return [high, (values.float() - high.float()).to(torch.bfloat16)]


def _add_in_strips(flat: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float) -> None:
    rows = max(1, STRIP // flat.shape[1]) if flat.device.type == "cpu" else flat.shape[0]
    strip = torch.empty(min(rows, flat.shape[0]), flat.shape[1], dtype=torch.float32, device=flat.device)
    for start in range(0, flat.shape[0], rows):
        target = flat[start : start + rows]
        part = strip[: target.shape[0]]
        part.copy_(target)
        part.addmm_(up[start : start + rows], down, alpha=scale)
        target.copy_(part)


def original(name: str, part: PartSpec | None, kept: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The unmerged values of the parameter `name`, in the shape and dtype of `like`: from its file, or where there is
    none from the copy in `kept`."""
    if part is None or name not in part.tensors:
        return kept[name]
    return load.read_tensor(part.tensors[name], part.scales.get(name)).to(like.dtype)


@torch.no_grad()
def restore(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Unmerges: copies `values` (as many numbers as `weight`) back, bit for bit."""
    weight.copy_(values.view(weight.shape))
