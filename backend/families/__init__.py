"""One module or package for each family of models: names, signatures, text encoding, the one call of its network.

Packages: _shared (what several have in common), flux, qwen_image, z_image.
Read: flux2, sd15, sd3, sdxl, wan.
"""

import importlib
import pkgutil

from backend.catalog.family import Family, complete

FAMILIES: tuple[Family, ...] = tuple(
    complete(importlib.import_module(f"{__name__}.{found.name}"))
    for found in sorted(pkgutil.iter_modules(__path__), key=lambda found: found.name)
    if not found.name.startswith("_")
)


def by_name(name: str) -> Family:
    """The family called `name`; KeyError with the names there are."""
    found = next((family for family in FAMILIES if name == family.NAME), None)
    if found is None:
        raise KeyError(f"no family {name!r}; there are {', '.join(family.NAME for family in FAMILIES)}")
    return found


def of_network(kind: str) -> tuple[Family, str] | None:
    """(family, its part) of a network's class, of those that draw first; None where no family has it. Networks that several have, such as
    an autoencoder, compute alike in all of them."""
    found = [
        (family, name)
        for family in FAMILIES
        for name, part in family.PARTS.items()
        if part.network.rpartition(":")[2] == kind
    ]
    return max(found, key=lambda one: one[0].DRAWS, default=None)
