"""Which families' denoisers have modules of given names and sizes: looked up in `module_names.json`, which holds every
spelling of them.

The file is made from the networks in their published sizes (`tests/catalog/lora/make_module_names.py`). Small LoRA
files, which show none of the signs that a whole one has, are known by it where only one family has their modules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

TABLES = Path(__file__).with_name("module_names.json")
NUMBER = re.compile(r"(?<![^_])\d+(?![^_])")
LEAVES = ("_weight", "_modulation")  # what a file may name of a module beside the module itself


def families_with(modules: Iterable[tuple[str, int, int]]) -> tuple[str, ...]:
    """The families that have every one of `modules` (flattened name, input width, rows; 0 for unknown); none for no
    modules."""
    modules = tuple(modules)
    return tuple(family for family, table in _tables().items() if modules and all(_has(table, *one) for one in modules))


def _has(table: dict, name: str, width: int, rows: int) -> bool:
    for spelt in (name, *(name.removesuffix(leaf) for leaf in LEAVES if name.endswith(leaf))):
        entry = table.get(NUMBER.sub("{}", spelt))
        if entry is None:
            continue
        numbers, widths, heights = entry
        found = tuple(map(int, NUMBER.findall(spelt)))
        within = (
            found in numbers if isinstance(numbers, set) else all(n in p for n, p in zip(found, numbers, strict=True))
        )
        if within and (not width or width in widths) and (not rows or rows in heights):
            return True
    return False


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict]:
    said = json.loads(TABLES.read_text(encoding="utf-8"))
    return {
        family: {
            name: (_numbers(numbers), frozenset(widths), frozenset(rows))
            for name, (numbers, widths, rows) in table.items()
        }
        for family, table in said.items()
    }


def _numbers(places: list) -> set[tuple[int, ...]] | list:
    """All combinations as a set, or what each place may have."""
    if any(isinstance(place, list) for place in places):
        return {tuple(place) for place in places}
    return [_place(place) for place in places]


def _place(text: str) -> range | frozenset[int]:
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else frozenset(map(int, text.split(",")))


CLIP = re.compile(r"text_model_encoder_layers_\d+_(?:self_attn|mlp)_")
T5 = re.compile(r"encoder_block_\d+_layer_\d+_")
DECODER = re.compile(
    r"(?:model_|language_model_)*layers_\d+_(?:self_attn|mlp)_"
)  # Qwen2.5, Qwen3: encoders that are language models
TEXTS = (  # (names, input widths, what the prefix has to be, families whose encoder it is)
    (CLIP, (768, 3072), re.compile(r"lora_te_"), ("sd15",)),
    (CLIP, (768, 3072), re.compile(r"lora_te1_"), ("flux", "sd3", "sdxl")),
    (CLIP, (768, 3072), re.compile(r"(?!lora_te)"), ("flux", "sd15", "sd3", "sdxl")),
    (CLIP, (1280, 5120), re.compile(r""), ("sd3", "sdxl")),
    (T5, (4096, 10240), re.compile(r""), ("flux", "sd3")),
    (DECODER, (3584, 18944), re.compile(r""), ("qwen_image",)),
    (DECODER, (2560, 9728), re.compile(r""), ("flux2", "z_image")),
    (DECODER, (4096, 12288, 5120, 32768), re.compile(r""), ("flux2",)),
)


def families_of_encoders(texts: Iterable[tuple[str, str, int]]) -> tuple[str, ...]:
    """The families whose text encoders have every one of `texts` (prefix, flattened name, input width); none for none
    of them."""
    common: set[str] | None = None
    for prefix, name, width in texts:
        found = {
            family
            for names, widths, before, families in TEXTS
            if names.match(name) and width in widths and before.match(prefix)
            for family in families
        }
        common = found if common is None else common & found
    return tuple(sorted(common or ()))
