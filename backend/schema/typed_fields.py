"""Whether the fields of a dataclass hold what they are declared to hold: for what was read from a file."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping


def checked(record):
    """`record`, a dataclass.

    Raises TypeError for the first field whose value is not of its declared type, as far as that can be told.
    """
    for name, hint in _hints(type(record)).items():
        if not fits(getattr(record, name), hint):
            raise TypeError(f"{name} of {type(record).__name__} is {type(getattr(record, name)).__name__}")
    return record


@functools.cache
def _hints(cls: type) -> dict[str, object]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


def fits(value: object, hint: object) -> bool:
    """Whether `value` is of the type `hint`, with all that is in it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(inner) == 2 and inner[1] is Ellipsis:
            return all(fits(one, inner[0]) for one in value)
        return len(value) == len(inner) and all(map(fits, value, inner))
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            fits(key, inner[0]) and fits(one, inner[1]) for key, one in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)
