"""What a setting is: a field of a frozen dataclass with its range, its words and its place.

`knobs` computes the rest from it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Knob:
    """One setting: its name, where it sits, what it may hold and how it is spoken of."""

    name: str
    path: tuple[str, ...]  # attribute path from the config's root, the name last
    section: str  # title of its section, "" at the root
    kind: type  # str, int, float, bool, or tuple (of str)
    optional: bool  # may be None
    default: object
    help: str
    label: str
    unit: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    step: float | None
    lines: int
    level: str  # "basic" | "advanced" | "hidden" (not in the form)


def knob(
    default: object,
    *,
    help: str,
    label: str = "",
    unit: str = "",
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    lines: int = 1,
    level: str = "basic",
) -> Any:
    """A dataclass field that is a setting. `low` and `high` are inclusive; `choices` are strings."""
    return field(
        default=default,
        metadata={
            "knob": dict(
                help=help,
                label=label,
                unit=unit,
                choices=tuple(choices),
                low=low,
                high=high,
                step=step,
                lines=lines,
                level=level,
            )
        },
    )


def switch(*, help: str) -> Any:
    """A field that only a command line typed by hand can turn on: no file, form or preset knows its name."""
    return field(default=False, metadata={"switch": {"help": help}})


def section(cls: type, title: str) -> Any:
    """A dataclass field that is a group of settings."""
    return field(default_factory=cls, metadata={"section": title})


@functools.cache
def knobs_of(cls: type) -> tuple[Knob, ...]:
    """Every knob of a config class, depth first, in the order written. Made once: the page asks at every keystroke."""
    return tuple(_knobs_of(cls, path=(), title=""))


def _knobs_of(cls: type, *, path: tuple[str, ...], title: str) -> Iterator[Knob]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if "section" in item.metadata:
            yield from _knobs_of(hints[item.name], path=(*path, item.name), title=item.metadata["section"])
        elif "knob" in item.metadata:
            said = dict(item.metadata["knob"])
            kind, optional = _kind_of(hints[item.name])
            said["label"] = said["label"] or _label_of(item.name)
            yield Knob(
                name=item.name,
                path=(*path, item.name),
                section=title,
                kind=kind,
                optional=optional,
                default=item.default,
                **said,
            )


@functools.cache
def switches_of(cls: type) -> dict[str, tuple[tuple[str, ...], str]]:
    """Every switch of a config class: its name, its attribute path and its help."""
    found = {}
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if "section" in item.metadata:
            inner = switches_of(hints[item.name])
            found |= {name: ((item.name, *path), help) for name, (path, help) in inner.items()}
        elif "switch" in item.metadata:
            found[item.name] = ((item.name,), item.metadata["switch"]["help"])
    return found


_SPELT = {
    "cpu": "CPU",
    "csv": "CSV",
    "fp8": "FP8",
    "id": "ID",
    "lora": "LoRA",
    "lr": "LR",
    "num": "",
    "snr": "SNR",
    "std": "deviation",
    "swanlab": "SwanLab",
    "tensorboard": "TensorBoard",
    "wandb": "W&B",
}


def _label_of(name: str) -> str:
    """A setting's name as people write it: `lora_dropout` is "LoRA dropout", `num_epochs` "Epochs"."""
    text = " ".join(word for word in (_SPELT.get(part, part) for part in name.split("_")) if word)
    return text[:1].upper() + text[1:]


def _kind_of(hint) -> tuple[type, bool]:
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        optional = len(inner) < len(typing.get_args(hint))
        hint = inner[0]
    origin = typing.get_origin(hint) or hint
    assert origin in (str, int, float, bool, tuple), f"a knob cannot hold {hint}"
    return origin, optional
