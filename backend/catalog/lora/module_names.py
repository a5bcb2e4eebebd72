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

from backend.catalog.family import Family

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


# Beginnings of flattened names in text encoders, for families' `LORA_TEXT_SIGNS`.
CLIP = r"text_model_encoder_layers_\d+_(?:self_attn|mlp)_"
T5 = r"encoder_block_\d+_layer_\d+_"
DECODER = r"(?:model_|language_model_)*layers_\d+_(?:self_attn|mlp)_"  # encoders that are language models
FIRST = r"lora_te1_|(?!lora_te)"  # the prefix of the first of several encoders


def families_of_encoders(texts: Iterable[tuple[str, str, int]], families: Iterable[Family]) -> tuple[str, ...]:
    """The families whose text encoders have every one of `texts` (prefix, flattened name, input width); none for none
    of them."""
    texts = tuple(texts)
    found = (family.NAME for family in families if texts and all(_is_of(family, *one) for one in texts))
    return tuple(sorted(found))


def _is_of(family: Family, prefix: str, name: str, width: int) -> bool:
    return any(
        re.match(sign.names, name) and width in sign.widths and re.match(sign.prefix, prefix)
        for sign in family.LORA_TEXT_SIGNS
    )
