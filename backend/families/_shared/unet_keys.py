"""The original Stable Diffusion UNet's module names, worked out from the loaded UNet's own module list.

The original numbers its blocks through; diffusers has levels. Which number is which depends on how many resnets a
level has, so the map is computed and no table of it is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from backend.catalog.family import NameMap, Rule

_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "emb_layers.1": "time_emb_proj",
    "skip_connection": "conv_shortcut",
}
_ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}


def unet_maps(part: str, modules: Iterable[str]) -> tuple[NameMap, ...]:
    """The original's spelling of every module in `modules` that it has."""
    if part != "dit":
        return ()
    modules = tuple(modules)
    blocks = _ENDS | _numbered(modules)
    rules = tuple(rule for theirs, ours in blocks.items() for rule in _inside(theirs, ours, modules))
    return (NameMap("ldm", "dit", rules),)


def _numbered(modules: tuple[str, ...]) -> dict[str, str]:
    """Original block -> ours, for every level."""
    found = {
        "middle_block.0": "mid_block.resnets.0",
        "middle_block.1": "mid_block.attentions.0",
        "middle_block.2": "mid_block.resnets.1",
    }
    down, up = _levels(modules, "down_blocks"), _levels(modules, "up_blocks")
    number = 1
    for level, resnets in enumerate(down):
        for slot in range(resnets):
            found[f"input_blocks.{number}.0"] = f"down_blocks.{level}.resnets.{slot}"
            found[f"input_blocks.{number}.1"] = f"down_blocks.{level}.attentions.{slot}"
            number += 1
        if _has(modules, f"down_blocks.{level}.downsamplers"):
            found[f"input_blocks.{number}.0.op"] = f"down_blocks.{level}.downsamplers.0.conv"
            number += 1
    number = 0
    for level, resnets in enumerate(up):
        for slot in range(resnets):
            found[f"output_blocks.{number}.0"] = f"up_blocks.{level}.resnets.{slot}"
            found[f"output_blocks.{number}.1"] = f"up_blocks.{level}.attentions.{slot}"
            number += 1
        if _has(modules, f"up_blocks.{level}.upsamplers"):
            place = 2 if _has(modules, f"up_blocks.{level}.attentions") else 1
            found[f"output_blocks.{number - 1}.{place}.conv"] = f"up_blocks.{level}.upsamplers.0.conv"
    return found


def _levels(modules: tuple[str, ...], kind: str) -> list[int]:
    """How many resnets each level of `down_blocks` or `up_blocks` has."""
    pattern = re.compile(rf"{kind}\.(\d+)\.resnets\.(\d+)\.")
    counts: dict[int, int] = {}
    for name in modules:
        match = pattern.match(name)
        if match:
            level, slot = int(match[1]), int(match[2])
            counts[level] = max(counts.get(level, 0), slot + 1)
    return [counts[level] for level in sorted(counts)]


def _has(modules: tuple[str, ...], beginning: str) -> bool:
    return any(name.startswith(beginning + ".") for name in modules)


def _inside(theirs: str, ours: str, modules: tuple[str, ...]) -> Iterable[Rule]:
    """Rules for a block itself and for what lies in it (a resnet's parts have names of their own, a transformer's are
    alike)."""
    for name in modules:
        if name == ours:
            yield Rule(theirs, (name,))
        elif name.startswith(ours + "."):
            inner = name[len(ours) + 1 :]
            if ".resnets." in f".{ours}.":
                inner = next((original for original, part in _RESNET.items() if part == inner), inner)
            yield Rule(f"{theirs}.{inner}", (name,))
