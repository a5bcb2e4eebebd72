"""Classes by their dotted names, from packages that are listed.

To import a module is to run it, so the list is looked at first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from types import ModuleType

from backend.schema.messages import Trouble


def class_of(
    module: str, name: str, *, packages: Iterable[str], load: Callable[[str], ModuleType] = importlib.import_module
) -> object:
    """`name` of `module`, which has to be one of `packages` or inside one.

    Raises Trouble("not_allowed") before anything is imported; ImportError and AttributeError as an import does.
    """
    packages = tuple(packages)
    if not is_listed(module, packages):
        raise Trouble(
            "not_allowed",
            f"{f'{module}.{name}'[:200]!r} is of no package that may be used here.",
            hint=f"Those are {', '.join(packages)}.",
        )
    return getattr(load(module), name)


def is_listed(module: str, packages: Iterable[str]) -> bool:
    """Whether `module` is one of `packages` or inside one, by its name alone."""
    return all(part.isidentifier() for part in module.split(".")) and any(
        module == package or module.startswith(f"{package}.") for package in packages
    )
