"""`--quant_options`: which frozen parts keep their linear layers quantized, and how.

Quantization is a function of the file, so a resumed run has the same base as before; what is saved is the adapter alone, in the form that it
has beside a full base.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.catalog.hub.part_entries import parts_meant, rounding_of
from backend.catalog.spec import PartSpec
from backend.engine.quantization.config import QuantizeConfig


def read_options(text: str | None, parts: Mapping[str, PartSpec]) -> dict[str, QuantizeConfig]:
    """Part -> how it is quantized, from `MODEL:METHOD[/LAYER,LAYER]`, separated by semicolons. `check_training` has refused what cannot be."""
    files = {name: part.files for name, part in parts.items()}
    return {
        name: QuantizeConfig(method=method, exclude_modules=list(excluded))
        for entry, method, excluded in rounding_of(text)
        for name in parts_meant(entry, "quant_options", files)
    }
