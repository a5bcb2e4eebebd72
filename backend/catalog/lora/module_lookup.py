"""Which parameters of a model a LoRA's modules are: looked up in the model's own module lists, in every spelling.

No weights, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from backend.catalog.family import Family
from backend.catalog.lora.keys import Reading, plain, readings
from backend.catalog.state_dict_keys import Slot, flatten, maps_of, spellings

TEXT = ("text_model.", "model.language_model.", "language_model.", "model.", "transformer.", "encoder.")
PARAMETERS = ("weight", "scale")
T5 = re.compile(r"encoder[._]block[._]\d+[._]layer")  # only T5 is named so, and trainers do not agree on its number


@dataclass(frozen=True)
class Index:
    """One part of a model as names see it."""

    part: str
    found: Mapping[str, tuple[Slot, ...]]  # flattened spelling -> what it stands for
    beginnings: tuple[str, ...]  # that files may put before this part's names

    def look_up(self, name: str) -> tuple[Slot, ...] | None:
        """What `name` stands for, as it is or after one of the beginnings."""
        slots = self.found.get(flatten(name))
        for ending in () if slots else PARAMETERS:
            if name.endswith((f".{ending}", f"_{ending}")):  # a file may name the parameter and not the module
                slots = slots or self.found.get(flatten(name[: -len(ending)]))
        for beginning in self.beginnings:
            if slots:
                break
            for spelt in (beginning, beginning.replace(".", "_")):
                if name.startswith(spelt):
                    slots = slots or self.found.get(flatten(name[len(spelt) :]))
        return slots or None


def index_of_rows(rows: Mapping[str, int], part: str, family: Family | None) -> Index:
    """The index of a part.

    `rows`: module -> rows of its weight, of every module with parameters of its own (1 where it has no weight).
    """
    text = part.startswith("text_encoder")
    described = family.PARTS.get(part) if family else None
    beginnings = (*(described.prefixes if described else ()), *(TEXT if text else ()))
    maps = maps_of(family, part, rows)
    return Index(part, spellings(rows, maps, cut=TEXT if text else ()), tuple(dict.fromkeys(beginnings)))


@dataclass(frozen=True)
class Resolved:
    """A LoRA's module found: the part, what of it, and how its name was read."""

    part: str
    slots: tuple[Slot, ...]
    reading: Reading


def resolve(stem: str, roles: Iterable[str], indexes: Mapping[str, Index]) -> Resolved | str:
    """Where a module of a LoRA belongs, or the reason why nowhere.

    Prefixes are cut only until what remains is found.
    """
    name = plain(stem)
    component = ""
    modulation = ".modulation" if set(roles) == {"diff_m"} else ""  # said of a whole block, meant for a parameter of it
    for reading in readings(name):
        component = reading.component or component
        parts = (reading.component,) if reading.component else tuple(indexes)
        if component.startswith("text_encoder") and T5.search(reading.name):
            parts = (component, *(part for part in indexes if part.startswith("text_encoder")))
        for part in parts:
            index = indexes.get(part)
            slots = index.look_up(reading.name + modulation) if index else None
            if slots:
                return Resolved(part, slots, reading)
    if component.startswith("text_encoder") and component not in indexes:
        return f"belongs to the {component.replace('_', ' ')}, which is not loaded here"
    return "this model has no such module"
