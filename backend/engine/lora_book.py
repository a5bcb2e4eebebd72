"""Module names of a family without a loaded model: what the tools, which only move files, need to know of it.

Names are templates with numbers left open ("transformer_blocks.{}.attn.to_q"), so any depth is known. They come from a base model's header
if one is given, else from the family's network, built without memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

from backend.catalog.adapter import Reading, plain, readings
from backend.catalog.family import Rule
from backend.catalog.names import Slot, fill, flatten
from backend.catalog.spec import PartSpec
from backend.engine.load import _ParametersOnMeta, find_class

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Book:
    """The templates of one part of a family, and how others spell them."""

    family: ModuleType
    own: tuple[tuple[re.Pattern, str], ...]  # flattened pattern, template
    rules: tuple[tuple[re.Pattern, Rule], ...]  # flattened pattern of their name, rule
    beginnings: tuple[str, ...]

    def slots(self, stem: str) -> tuple[tuple[Slot, ...], Reading] | None:
        """What a file's module name stands for, by own names first."""
        for reading in readings(plain(stem)):
            if reading.component not in ("", "dit"):
                continue
            flat = flatten(reading.name)
            for pattern, template in self.own:
                match = pattern.fullmatch(flat)
                if match:
                    return (Slot(fill(template, match.groups())),), reading
            for pattern, rule in self.rules:
                match = pattern.fullmatch(flat)
                if match:
                    return _slots(rule, match.groups()), reading
        return None


def _slots(rule: Rule, numbers: tuple[str, ...]) -> tuple[Slot, ...]:
    modules = [fill(module, numbers) for module in rule.modules]
    sizes = rule.rows or (1,) * len(modules)
    place = rule.place or (0, 1, 1)
    if len(modules) == 1:
        return (Slot(modules[0], (0, 1, 1), place, rule.swap_halves, rule.parameter),)
    reached, slots = 0, []
    for module, size in zip(modules, sizes, strict=True):
        slots.append(Slot(module, (reached, reached + size, sum(sizes)), place, rule.swap_halves, rule.parameter))
        reached += size
    return tuple(slots)


def book_of(family: ModuleType, base: PartSpec | None = None) -> Book:
    """The book of a family's denoiser; `base` is a model of it whose names are to be used."""
    if base is not None:
        modules = {name.rpartition(".")[0] for name in base.tensors}
    else:
        modules = set(_modules_of(family.PARTS["dit"].network))
    derived = getattr(family, "derived_maps", None)
    maps = [*(derived("dit", tuple(sorted(modules))) if derived else ()), *family.NAME_MAPS]
    rules = [rule for found in maps if found.part == "dit" for rule in found.rules]
    templates = sorted({NUMBER.sub("{}", name) for name in modules if name})
    return Book(
        family,
        tuple((_pattern(template), template) for template in templates),
        tuple((_pattern(rule.theirs), rule) for rule in rules),
        family.PARTS["dit"].prefixes,
    )


@lru_cache(maxsize=16)
def _modules_of(network: str) -> tuple[str, ...]:
    """Names of all modules with parameters, of the network in its own default size."""
    with _ParametersOnMeta():
        module = find_class(network)()
    return tuple(name for name, inner in module.named_modules() if any(True for _ in inner.parameters(recurse=False)))


def _pattern(template: str) -> re.Pattern:
    return re.compile(re.escape(flatten(template)).replace(r"\{\}", r"(\d+)"))


def native_rules(book: Book) -> list[Rule]:
    """The rules of the family's first dialect, by which ComfyUI's and kohya's files are named; none where names are alike."""
    maps = [found for found in book.family.NAME_MAPS if found.part == "dit"]
    return [rule for rule in (maps[0].rules if maps else ()) if not rule.place and rule.parameter == "weight"]


def with_numbers(rules: Iterable[Rule], module: str) -> tuple[Rule, int, tuple[str, ...]] | None:
    """(rule, place among its modules, numbers) for the first fused or plain rule that names `module`; fused ones come first."""
    for rule in sorted(rules, key=lambda rule: -len(rule.modules)):
        for place, template in enumerate(rule.modules):
            match = re.fullmatch(re.escape(template).replace(r"\{\}", r"(\d+)"), module)
            if match:
                return rule, place, match.groups()
    return None
