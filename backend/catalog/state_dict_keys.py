"""Module names in every spelling: a model's own list, other programs' names by a family's rules, dotted or flattened.

A flattened name (`lora_unet_` files write `_` for `.`) cannot be taken apart by rule; it is looked up among the
flattened spellings of all modules there are. So everything is compared in flattened form, without underscores at its
ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from backend.catalog.family import Family, NameMap, Rule
from backend.catalog.spec import TensorAt


@dataclass(frozen=True)
class Slot:
    """A module that a name stands for, or the rows of it.

    `share`: which rows of the named (perhaps fused) thing are this module's, as (start, stop, whole). `place`: which
    rows of the module they are, likewise. `parameter`: which of its parameters a change of the weight changes.
    """

    module: str
    share: tuple[int, int, int] = (0, 1, 1)
    place: tuple[int, int, int] = (0, 1, 1)
    swap_halves: bool = False
    parameter: str = "weight"


def flatten(name: str) -> str:
    """`name` as it is compared: `transformer_blocks.0.attn.to_out.0` -> `transformer_blocks_0_attn_to_out_0`."""
    return name.replace(".", "_").strip("_")


def maps_of(family: Family | None, part: str, modules: Iterable[str]) -> tuple[NameMap, ...]:
    """The dialects in which others spell `part` of `family`; a family may derive some from the module list itself."""
    if family is None:
        return ()
    maps = [*family.derived_maps(part, tuple(modules)), *family.NAME_MAPS]
    return tuple(found for found in maps if found.part == part)


def spellings(
    rows: Mapping[str, int], maps: Iterable[NameMap] = (), cut: Iterable[str] = ()
) -> dict[str, tuple[Slot, ...]]:
    """Every flattened spelling of the modules in `rows` (own dotted name -> rows of its weight) and what it stands for.

    Own names win over a dialect's. `cut` are beginnings that files put before, or models before files' names.
    """
    found: dict[str, tuple[Slot, ...]] = {}
    for dialect in maps:
        for rule in dialect.rules:
            for theirs, slots in _applied(rule, rows):
                found.setdefault(flatten(theirs), slots)
    own = {flatten(name): (Slot(name),) for name in rows}
    for beginning in cut:
        for name in rows:
            if name.startswith(beginning):
                found.setdefault(flatten(name[len(beginning) :]), (Slot(name),))
    return {**found, **own}


def _applied(rule: Rule, rows: Mapping[str, int]) -> Iterable[tuple[str, tuple[Slot, ...]]]:
    """(their name, slots) for every set of modules in `rows` that the rule names completely."""
    pattern = _pattern(rule.modules[0])
    for name in rows:
        match = pattern.fullmatch(name)
        if not match:
            continue
        numbers = match.groups()
        modules = [fill(module, numbers) for module in rule.modules]
        if all(module in rows for module in modules):
            sizes = rule.rows or tuple(rows[module] for module in modules)
            yield fill(rule.theirs, numbers), _slots(rule, modules, sizes)


def _slots(rule: Rule, modules: list[str], sizes: tuple[int, ...]) -> tuple[Slot, ...]:
    place = rule.place or (0, 1, 1)
    if len(modules) == 1:
        return (Slot(modules[0], place=place, swap_halves=rule.swap_halves, parameter=rule.parameter),)
    whole, reached, slots = sum(sizes), 0, []
    for module, size in zip(modules, sizes, strict=True):
        slots.append(Slot(module, (reached, reached + size, whole), place, rule.swap_halves, rule.parameter))
        reached += size
    return tuple(slots)


@lru_cache(maxsize=4096)
def _pattern(form: str) -> re.Pattern:
    return re.compile(re.escape(form).replace(r"\{\}", r"(\d+)"))


def fill(form: str, numbers: Iterable[str | int]) -> str:
    """`form` with its "{}" replaced in turn."""
    for number in numbers:
        form = form.replace("{}", str(number), 1)
    return form


def own_tensors(tensors: Mapping[str, TensorAt], dialect: NameMap) -> dict[str, TensorAt]:
    """Stored tensors under the part's own parameter names: fused ones cut into their rows, which lie one after the
    other."""
    found = {}
    rules = [(_pattern(rule.theirs), rule) for rule in dialect.rules if not rule.place]
    for key, at in tensors.items():
        for name, piece in _owned(key, at, rules):
            found[name] = piece
    return found


def _owned(key: str, at: TensorAt, rules: list) -> list[tuple[str, TensorAt]]:
    module, _, leaf = key.rpartition(".")
    for pattern, rule in rules:
        if rule.parameter != "weight":
            match = pattern.fullmatch(key)
            if match:
                return [(f"{fill(rule.modules[0], match.groups())}.{rule.parameter}".lstrip("."), at)]
            continue
        match = pattern.fullmatch(module)
        if match:
            modules = [fill(name, match.groups()) for name in rule.modules]
            leaf = rule.leaf.get(leaf, leaf)
            sizes = rule.rows or (1,) * len(modules)
            return [
                (f"{slot.module}.{leaf}", _rows_of(at, slot.share, rule.swap_halves))
                for slot in _slots(rule, modules, sizes)
            ]
    return [(key, at)]


def _rows_of(at: TensorAt, share: tuple[int, int, int], swapped: bool) -> TensorAt:
    start, stop, whole = share
    if share == (0, 1, 1) or not at.shape or at.shape[0] % whole:
        return replace(at, swapped=swapped)
    rows = at.shape[0] // whole
    if at.packed is not None:  # dequantized whole, then cut
        shape = ((stop - start) * rows, *at.shape[1:])
        return replace(at, shape=shape, swapped=swapped, packed=replace(at.packed, rows=(start * rows, stop * rows)))
    row_bytes = at.nbytes // at.shape[0]
    return replace(
        at,
        shape=((stop - start) * rows, *at.shape[1:]),
        start=at.start + start * rows * row_bytes,
        end=at.start + stop * rows * row_bytes,
        swapped=swapped,
    )
