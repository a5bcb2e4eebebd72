"""Module names and shapes of a family without a loaded model, for tools that convert state-dict keys.

Names are templates with numbers left open ("transformer_blocks.{}.attn.to_q"), so any depth is known. They come from a
base model's header if one is given, else from the family's network, built without memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from backend.catalog.family import Family, NameMap, Rule
from backend.catalog.lora.identify import outline_of
from backend.catalog.lora.keys import Reading, plain, readings
from backend.catalog.spec import PartSpec
from backend.catalog.state_dict_keys import Slot, fill, flatten
from backend.engine.loading.load import _ParametersOnMeta, find_class
from backend.engine.loading.tensor_source import Source

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Book:
    """The templates of one part of a family, and how others spell them."""

    family: Family
    own: tuple[tuple[re.Pattern, str], ...]  # flattened pattern, template
    named: Mapping[str, Rule]  # flattened name of theirs without a number left open, rule
    rules: tuple[tuple[re.Pattern, Rule], ...]  # flattened pattern of their name, rule
    beginnings: tuple[str, ...]
    maps: tuple[NameMap, ...]  # that `rules` are of, those that depend on the number of blocks first

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
            if flat in self.named:
                return _slots(self.named[flat], ()), reading
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


def book_of(family: Family, base: PartSpec | None = None, source: Source | None = None) -> Book:
    """The book of a family's denoiser. `base` is a model of it whose names are to be used; else `source`, a LoRA for
    it, may show in which size its network is meant, where names depend on that."""
    if base is not None:
        modules = {name.rpartition(".")[0] for name in base.tensors}
    else:
        modules = set(_modules_of(family.PARTS["dit"].network, _config_for(family, source)))
    maps = [*family.derived_maps("dit", tuple(sorted(modules))), *family.NAME_MAPS]
    maps = [found for found in maps if found.part == "dit"]
    rules = [rule for found in maps for rule in found.rules]
    templates = sorted({NUMBER.sub("{}", name) for name in modules if name})
    return Book(
        family,
        tuple((_pattern(template), template) for template in templates),
        {flatten(rule.theirs): rule for rule in reversed(rules) if "{}" not in rule.theirs},
        tuple((_pattern(rule.theirs), rule) for rule in rules if "{}" in rule.theirs),
        family.PARTS["dit"].prefixes,
        tuple(maps),
    )


def _config_for(family: Family, source: Source | None) -> str:
    """Keyword arguments of the family's network as JSON: its own, and what the sizes in a LoRA say."""
    said = {}
    if source is not None:
        said = family.config_from_lora(outline_of(tuple(source.shapes), tuple(source.shapes.values())).widths)
    return json.dumps({**family.PARTS["dit"].config, **family.WHOLE_CONFIG, **said})


@lru_cache(maxsize=16)
def _modules_of(network: str, config: str) -> tuple[str, ...]:
    """Names of all modules with parameters, of the network in the size that `config` (JSON) gives."""
    with _ParametersOnMeta():
        module = find_class(network)(**json.loads(config))
    return tuple(name for name, inner in module.named_modules() if any(True for _ in inner.parameters(recurse=False)))


def _pattern(template: str) -> re.Pattern:
    return re.compile(re.escape(flatten(template)).replace(r"\{\}", r"(\d+)"))


def native_rules(book: Book, layout: str) -> list[Rule]:
    """The rules of the dialect in which files of `layout` are named: the family's first unless it says otherwise; none
    where names are alike."""
    first = next((found.dialect for found in book.family.NAME_MAPS if found.part == "dit"), "")
    dialect = book.family.LORA_NAMES.get(layout, first)
    maps = [found for found in book.maps if dialect and found.dialect.startswith(dialect)]
    return [rule for found in maps for rule in found.rules if not rule.place]


def native_finder(book: Book, layout: str) -> Callable[[str], tuple[Rule, int, tuple[str, ...]] | None]:
    """Answers (rule, place among its modules, numbers) for the first rule that names a module; fused ones come
    first."""
    exact: dict[str, tuple[Rule, int]] = {}
    patterns: list[tuple[re.Pattern, Rule, int]] = []
    for rule in sorted(native_rules(book, layout), key=lambda rule: -len(rule.modules)):
        for place, template in enumerate(rule.modules):
            if rule.parameter != "weight":  # a table, known by its own name
                template = f"{template}.{rule.parameter}".lstrip(".")
            if "{}" in template:
                patterns.append((re.compile(re.escape(template).replace(r"\{\}", r"(\d+)")), rule, place))
            else:
                exact.setdefault(template, (rule, place))

    def find(module: str) -> tuple[Rule, int, tuple[str, ...]] | None:
        if module in exact:
            return *exact[module], ()
        for pattern, rule, place in patterns:
            match = pattern.fullmatch(module)
            if match:
                return rule, place, match.groups()
        return None

    return find
