"""How frozen parts are kept: in FP8, or away from the device that computes and fetched block by block."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from backend.catalog.spec import PartSpec
from backend.engine.loading.load import build_meta
from backend.engine.offload import placement
from backend.engine.offload.blocks import Unit
from backend.planner.costs.layout import FP8
from backend.planner.costs.model_sizes import spread
from backend.planner.rules.resolve_training import PartStorage
from backend.schema.memory_plan import VramConfig


@dataclass(frozen=True)
class Kept:
    """How a frozen part is kept: its four states, and how many of its fetched blocks stay on the device."""

    states: VramConfig
    resident_blocks: int = 0


def keeping(parts: Mapping[str, PartStorage], *, device: torch.device, dtype: torch.dtype) -> dict[str, Kept]:
    """Part -> how it is kept, for the parts that are not simply kept where they compute. `parts`: of
    `ResolvedTraining`; what cannot be, `check_training` has refused."""
    return {
        name: Kept(
            _states(
                kept.fp8,
                kept.offloaded,
                device,
                torch.float32 if name == "vae" else dtype,
                in_file=kept.offload_device == "disk",
            ),
            kept.resident_blocks or 0,
        )
        for name, kept in parts.items()
        if kept.fp8 or kept.offloaded
    }


def fp8_without_effect(parts: Mapping[str, PartStorage], *, device: torch.device) -> str:
    """A sentence about parts in FP8 that wait in their file on a CPU, where nothing is stored in another format; ""
    where there are none."""
    names = ", ".join(sorted(name for name, kept in parts.items() if kept.fp8 and kept.offloaded))
    if device.type != "cpu" or not names:
        return ""
    return (
        f"--fp8_models has no effect on {names} here: on a CPU offloaded weights wait in their file and are fetched in "
        "full."
    )


def _states(eight: bool, away: bool, device: torch.device, dtype: torch.dtype, *, in_file: bool) -> VramConfig:
    """Away from a card is RAM, or with `in_file` the file; away from a CPU is the file, and nothing is then stored in
    another format. Blocks of an offloaded part that stay do so in the preparing state."""
    computing = str(dtype).removeprefix("torch.")
    in_file = away and (in_file or device.type == "cpu")
    stored = FP8 if eight and not (away and device.type == "cpu") else computing
    waits = (
        {"dtype": None, "device": "disk"} if in_file else {"dtype": stored, "device": "cpu" if away else _name(device)}
    )
    return VramConfig(
        offload_dtype=waits["dtype"],
        offload_device=waits["device"],
        onload_dtype=waits["dtype"],
        onload_device=waits["device"],
        preparing_dtype=stored,
        preparing_device=_name(device),
        computation_dtype=computing,
        computation_device=_name(device),
    )


def _name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(device)


def place(part: PartSpec, kept: Kept, *, device: torch.device, split_bytes: int | None = None) -> torch.nn.Module:
    """The part's network with its weights as `kept` says, ready to be called; gradients pass through it to adapters.

    `split_bytes`: blocks with more are fetched in pieces, child by child.
    """
    module = build_meta(part)
    placed = placement.place(module, part, kept.states, device=device, split_bytes=split_bytes, resident=())
    placed.resident = staying(placed.blocks, kept.resident_blocks)
    placed.onload()
    return module.eval().requires_grad_(False)


def staying(units: Sequence[Unit], count: int) -> tuple[int, ...]:
    """The numbers of the `units` that stay where `count` blocks do: all pieces of a block share its number (`layers.3`
    of `layers.3.mlp`)."""
    blocks = [match[1] for unit in units if (match := re.match(r"(.*?\.\d+)(\.|$)", unit.name))]
    order = list(dict.fromkeys(blocks))
    kept = {order[index] for index in spread(len(order), min(count, len(order)))}
    return tuple(index for index, block in enumerate(blocks) if block in kept)
