"""Writes backend/catalog/lora/module_names.json: the modules of every family's denoiser in all spellings, from its networks in their published sizes.

`python -m tests.catalog.lora.make_module_names` from the project's folder; `tests/catalog/lora/test_module_names.py` tells when it is due.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

from backend.catalog.state_dict_keys import flatten, maps_of, spellings
from backend.engine.loading.load import _ParametersOnMeta, find_class
from backend.engine.lora.module_index import module_rows
from backend.families import FAMILIES

OUT = Path(__file__).parents[3] / "backend" / "catalog" / "lora" / "module_names.json"
SIZES = {  # what differs from a family's own configuration in the published models
    "flux": ({}, {"in_channels": 128}, {"in_channels": 384}),
    "flux2": (
        {},
        {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680},
        {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288},
    ),
    "sd3": (
        {"num_layers": 24, "num_attention_heads": 24, "dual_attention_layers": list(range(13))},
        {"num_layers": 38, "num_attention_heads": 38, "dual_attention_layers": [0]},
    ),
    "wan": (
        {},
        {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
        {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
    ),
}
NUMBER = re.compile(r"(?<![^_])\d+(?![^_])")


def tables() -> dict[str, dict[str, list]]:
    """family -> flattened name, its numbers left open ("{}") -> [numbers that it may have, input widths, numbers of rows]."""
    return {family.NAME: _table(family) for family in FAMILIES}


def _table(family) -> dict[str, list]:
    part = family.PARTS["dit"]
    found: dict[str, tuple[set, set, set]] = {}
    for size in SIZES.get(family.NAME, ({},)):
        config = {**part.config, **getattr(family, "WHOLE_CONFIG", {}), **size}
        with _ParametersOnMeta():
            module = find_class(part.network)(**config)
        rows = module_rows(module)
        for name, slots in spellings(rows, maps_of(family, "dit", rows)).items():
            weight = module.get_submodule(slots[0].module)._parameters.get("weight")
            numbers, widths, heights = found.setdefault(NUMBER.sub("{}", flatten(name)), (set(), set(), set()))
            numbers.add(tuple(map(int, NUMBER.findall(flatten(name)))))
            widths.add(int(weight.shape[1]) if weight is not None and weight.ndim > 1 else 0)
            start, stop, whole = slots[0].place
            heights.add(sum(rows[slot.module] for slot in slots) * (stop - start) // whole)
    return {
        name: [_places(numbers), sorted(widths), sorted(heights)]
        for name, (numbers, widths, heights) in sorted(found.items())
    }


def _places(numbers: set[tuple[int, ...]]) -> list:
    """For each place its numbers ("0-18" or "0,2"), where every combination is there; else all combinations."""
    places = [sorted(set(place)) for place in zip(*numbers, strict=True)]
    if set(product(*places)) != numbers:
        return sorted(map(list, numbers))
    whole = [place == list(range(place[0], place[-1] + 1)) for place in places]
    return [
        f"{place[0]}-{place[-1]}" if one else ",".join(map(str, place))
        for place, one in zip(places, whole, strict=True)
    ]


if __name__ == "__main__":
    lines = [
        f"{json.dumps(family)}: {{\n"
        + ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in table.items()
        )
        + "\n}"
        for family, table in tables().items()
    ]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
