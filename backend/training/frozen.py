"""How frozen parts are kept: in FP8, or away from the device that computes and fetched block by block."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from backend.catalog.spec import PartSpec
from backend.engine import placement
from backend.engine.load import build_meta
from backend.schema.messages import Trouble
from backend.schema.vram import VramConfig

FP8 = "float8_e4m3fn"


def keeping(
    model, memory, entries: Mapping[str, str], parts: Mapping[str, PartSpec], *, trained: tuple[str, ...], device: torch.device,
    dtype: torch.dtype,
) -> dict[str, VramConfig]:  # fmt: skip
    """Part -> its four states, for the parts that are not simply kept where they compute.

    `fp8_models` and `offload_models` name parts as they were given on the command line (`entries`), or by their own names; an entry that names
    none is an error, and so is a part whose own weights train.
    """
    eight = _named(model.fp8_models, "fp8_models", entries, parts)
    away = _named(model.offload_models, "offload_models", entries, parts)
    for name in eight:
        if name in trained:
            raise Trouble(
                "bad_value", f"The part {name} cannot be kept in FP8 (--fp8_models) while its own weights train: the steps of "
                "an optimizer are too small for 8 bits.", hint="Train a LoRA on it, or leave it out of --fp8_models.",
            )  # fmt: skip
    for name in away & set(trained):
        raise Trouble(
            "bad_value", f"The part {name} cannot be offloaded (--offload_models) while its own weights train."
        )
    if memory.enable_model_cpu_offload:
        away |= set(parts) - set(trained)
    return {
        name: _states(name in eight, name in away, device, torch.float32 if name == "vae" else dtype)
        for name in {*eight, *away}
    }


def _named(text: str | None, setting: str, entries: Mapping[str, str], parts: Mapping[str, PartSpec]) -> set[str]:
    found = set()
    for wanted in (text or "").split(","):
        wanted = wanted.strip()
        if not wanted:
            continue
        names = {part for part, entry in entries.items() if wanted in (entry, *entry.split(","))} or (
            {wanted} & set(parts)
        )
        if not names:
            known = [*dict.fromkeys(entry for entry in entries.values() if entry), *parts]
            raise Trouble("bad_value", f"--{setting} names {wanted!r}, which is no part of this model.",
                          hint=f"It can be {', '.join(known)}.")  # fmt: skip
        found |= names
    return found


def _states(eight: bool, away: bool, device: torch.device, dtype: torch.dtype) -> VramConfig:
    """Away from a card is RAM; away from a CPU is the file on disk, in the format that it has there."""
    computing = {"computation_dtype": str(dtype).removeprefix("torch."), "computation_device": _name(device)}
    stored = FP8 if eight else computing["computation_dtype"]
    if away and device.type == "cpu":
        places = {"offload_device": "disk", "onload_device": "disk", "preparing_device": "disk"}
        return VramConfig(**places, **computing)
    place = "cpu" if away else _name(device)
    dtypes = {"offload_dtype": stored, "onload_dtype": stored, "preparing_dtype": stored}
    return VramConfig(**dtypes, offload_device=place, onload_device=place, preparing_device=place, **computing)


def _name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(device)


def place(part: PartSpec, states: VramConfig, *, device: torch.device) -> torch.nn.Module:
    """The part's network with its weights where `states` says, ready to be called; gradients pass through it to adapters."""
    module = build_meta(part)
    placement.place(module, part, states, device=device).onload()
    return module.eval().requires_grad_(False)
