"""Index of the modules of loaded parts, for resolving a LoRA's module names (`backend.catalog.lora.module_lookup`)."""

from __future__ import annotations

from torch import nn

from backend.catalog.family import Family
from backend.catalog.lora.module_lookup import Index, Resolved, index_of_rows, resolve
from backend.engine.quantization.layers import weight_shape

__all__ = ["Index", "Resolved", "index_of", "module_rows", "resolve"]


def index_of(module: nn.Module, part: str, family: Family | None) -> Index:
    """The index of a loaded part. A module counts if it has parameters of its own."""
    return index_of_rows(module_rows(module), part, family)


def module_rows(module: nn.Module) -> dict[str, int]:
    """Module name -> rows of its weight, of every module that has parameters of its own (1 where it has no weight)."""
    rows = {}
    for name, inner in module.named_modules():
        name = name.replace("_orig_mod.", "")
        shape = weight_shape(inner)
        if shape:
            rows[name] = shape[0]
        elif any(parameter is not None for parameter in inner._parameters.values()):
            rows[name] = 1
    return rows
