"""`--quant_options`: which frozen parts keep their linear layers quantized, and how.

Quantization is a function of the file, so a resumed run has the same base as before; what is saved is the adapter
alone, in the form that it has beside a full base."""

from __future__ import annotations

from collections.abc import Mapping

from backend.engine.quantization.config import QuantizeConfig
from backend.planner.rules.resolve_training import PartStorage


def configs_of(parts: Mapping[str, PartStorage]) -> dict[str, QuantizeConfig]:
    """Part -> how it is quantized. `parts`: of `ResolvedTraining`; what cannot be, `check_training` has refused."""
    return {
        name: QuantizeConfig(method=kept.quantization, exclude_modules=list(kept.excluded))
        for name, kept in parts.items()
        if kept.quantization
    }
