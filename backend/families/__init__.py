"""One module or package for each family of models: names, signatures, text encoding, the one call of its network.

Packages: qwen_image.
Read: _bfl_keys, _unet_keys, flux, flux2, sd15, sd3, sdxl, wan, z_image.
"""

import importlib
import pkgutil
from types import ModuleType

FAMILIES: tuple[ModuleType, ...] = tuple(
    importlib.import_module(f"{__name__}.{found.name}")
    for found in sorted(pkgutil.iter_modules(__path__), key=lambda found: found.name)
    if not found.name.startswith("_")
)


def by_name(name: str) -> ModuleType:
    """The family called `name`; KeyError with the names there are."""
    found = next((family for family in FAMILIES if name == family.NAME), None)
    if found is None:
        raise KeyError(f"no family {name!r}; there are {', '.join(family.NAME for family in FAMILIES)}")
    return found
