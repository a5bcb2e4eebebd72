"""How frozen parts are kept: in FP8, or away from the device that computes and fetched block by block."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from backend.catalog.sizes import spread
from backend.catalog.spec import PartSpec
from backend.engine import placement
from backend.engine.load import build_meta
from backend.engine.units import Unit
from backend.schema.messages import Trouble
from backend.schema.vram import VramConfig

FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Kept:
    """How a frozen part is kept: its four states, and how many of its fetched blocks stay on the device."""

    states: VramConfig
    resident_blocks: int = 0


def keeping(
    model,
    memory,
    entries: Mapping[str, str],
    parts: Mapping[str, PartSpec],
    *,
    trained: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
    quantised: Collection[str] = (),
) -> dict[str, Kept]:
    """Part -> how it is kept, for the parts that are not simply kept where they compute.

    `fp8_models` and `offload_models` name parts as they were given on the command line (`entries`), or by their own names; an entry that names
    none is an error, and so are a part whose own weights train and one that is `quantised`.
    """
    eight = _named(model.fp8_models, "fp8_models", entries, parts)
    away = _named(model.offload_models, "offload_models", entries, parts)
    for name in eight:
        if name in trained:
            raise Trouble(
                "bad_value",
                f"The part {name} cannot be kept in FP8 (--fp8_models) while its own weights train: the steps of "
                "an optimizer are too small for 8 bits.",
                hint="Train a LoRA on it, or leave it out of --fp8_models.",
            )
    for name in away & set(trained):
        raise Trouble(
            "bad_value", f"The part {name} cannot be offloaded (--offload_models) while its own weights train."
        )
    if memory.enable_model_cpu_offload:
        away |= set(parts) - set(trained)
    _check_fetched(memory, away)
    for name in sorted((eight | away) & set(quantised)):
        flag = "fp8_models" if name in eight else "enable_model_cpu_offload or --offload_models"
        raise Trouble(
            "bad_value",
            f"The part {name} is quantised (--quant_options), and such weights are neither moved nor stored in FP8 (--{flag}).",
            hint="Name it in one of them only; --offload_models names single parts.",
        )
    return {
        name: Kept(
            _states(
                name in eight,
                name in away,
                device,
                torch.float32 if name == "vae" else dtype,
                in_file=memory.offload_device == "disk",
            ),
            (memory.resident_blocks or 0) if name == "dit" and name in away else 0,
        )
        for name in {*eight, *away}
    }


def _check_fetched(memory, away: Collection[str]) -> None:
    """Raises Trouble for what is said of fetched weights where there are none."""
    said = [
        (
            "cpu_offload_split_threshold",
            "says in which pieces weights are fetched",
            memory.cpu_offload_split_threshold is not None and not away,
        ),
        (
            "resident_blocks",
            "says how many of the transformer's fetched blocks stay",
            bool(memory.resident_blocks) and "dit" not in away,
        ),
    ]
    for name, words, wrong in said:
        if wrong:
            raise Trouble(
                "bad_value",
                f"--{name} {words}, but none are offloaded.",
                hint="Set --enable_model_cpu_offload or --offload_models, or leave it out.",
            )


def _named(text: str | None, setting: str, entries: Mapping[str, str], parts: Mapping[str, PartSpec]) -> set[str]:
    wanted = (one.strip() for one in (text or "").split(","))
    return {part for one in wanted if one for part in parts_called(one, setting, entries, parts)}


def parts_called(wanted: str, setting: str, entries: Mapping[str, str], parts: Mapping[str, PartSpec]) -> set[str]:
    """The parts that `wanted` means: an entry of the command line (a JSON list of shards too), a shard, or a part's own name.

    Raises Trouble in the name of `setting` for one that is no part of the model.
    """
    joined = (
        ",".join(shard for group in listed_paths(wanted, setting) for shard in group) if "[" in wanted[:1] else wanted
    )
    names = {part for part, entry in entries.items() if joined in (entry, *entry.split(","))} or ({wanted} & set(parts))
    if not names:
        known = [*dict.fromkeys(entry for entry in entries.values() if entry), *parts]
        raise Trouble(
            "bad_value",
            f"--{setting} names {wanted!r}, which is no part of this model.",
            hint=f"It can be {', '.join(known)}.",
        )
    return names


def listed_paths(text: str | None, setting: str = "model_paths") -> list[list[str]]:
    """`--model_paths`: a JSON list of files, or of lists of shards; one file alone may stand without brackets."""
    if not text:
        return []
    try:
        listed = json.loads(text) if text.lstrip().startswith(("[", '"')) else [text]
        groups = [
            [entry] if isinstance(entry, str) else list(entry)
            for entry in ([listed] if isinstance(listed, str) else listed)
        ]
        if all(isinstance(shard, str) for group in groups for shard in group):
            return groups
    except (ValueError, TypeError):
        pass
    raise Trouble("bad_value", f"--{setting} holds {text!r}, which is not a JSON list of files.")


def _states(eight: bool, away: bool, device: torch.device, dtype: torch.dtype, *, in_file: bool) -> VramConfig:
    """Away from a card is RAM, or with `in_file` the file; away from a CPU is the file, and nothing is then stored in another format.
    Blocks of an offloaded part that stay do so in the preparing state."""
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
    """The numbers of the `units` that stay where `count` blocks do: all pieces of a block share its number (`layers.3` of `layers.3.mlp`)."""
    blocks = [re.match(r"(.*?\.\d+)(\.|$)", unit.name).group(1) for unit in units]
    order = list(dict.fromkeys(blocks))
    kept = {order[index] for index in spread(len(order), min(count, len(order)))}
    return tuple(index for index, block in enumerate(blocks) if block in kept)
