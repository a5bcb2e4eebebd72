"""What a LoRA file's metadata says about alpha: one for all, exceptions by name, and whether the root of the rank
divides it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from backend.catalog.lora.metadata import is_ours, number
from backend.catalog.lora.peft_config import fields_of, truth
from backend.catalog.lora.peft_patterns import matching
from backend.schema.messages import Trouble

__all__ = ["AlphaRule", "AlphaRules", "alpha_rules", "truth"]


@dataclass(frozen=True)
class AlphaRule:
    """What metadata says about alpha: one for all, exceptions by module, and whether the root of the rank divides it.

    `whole_rank` is PEFT's `r`, which divides alpha where a module's factors have no rank (two whole Kronecker factors);
    None: nothing does.
    """

    alpha: float | None = None
    exceptions: Mapping[str, float] = field(default_factory=dict)  # module name -> alpha
    root: bool = False
    whole_rank: float | None = None
    whole_ranks: Mapping[str, float] = field(default_factory=dict)  # module name -> r where it is another

    def alpha_of(self, names: Iterable[str]) -> float | None:
        """Of a module under its names: the file's and the model's own."""
        return next((self.exceptions[name] for name in names if name in self.exceptions), self.alpha)

    def whole_rank_of(self, names: Iterable[str]) -> float | None:
        return next((self.whole_ranks[name] for name in names if name in self.whole_ranks), self.whole_rank)


@dataclass(frozen=True)
class AlphaRules:
    """The rules of a file by component; `""` serves those without one of their own."""

    rules: dict[str, AlphaRule] = field(default_factory=dict)

    def scale(self, names: Sequence[str], component: str, rank: int | None) -> float:
        """alpha / rank (or its root) by metadata; 1 where it says nothing. `rank` None: the factors show none."""
        rule = self.rules.get(component) or self.rules.get("")
        alpha = rule.alpha_of(names) if rule else None
        if rule is None or alpha is None:
            return 1.0
        divisor = rule.whole_rank_of(names) if rank is None else rank
        if not divisor:
            return 1.0
        return alpha / math.sqrt(divisor) if rule.root else alpha / divisor


def alpha_rules(
    metadata: Mapping[str, str],
    config: Mapping[str, object],
    *,
    tensors_say: bool,
    names: Iterable[str] = (),
    source: str = "the file",
) -> AlphaRules:
    """The rules in a file's metadata, or in a `config` (PEFT's) beside it.

    `tensors_say`: some module has an alpha tensor, so file-wide numbers are no rule. `names`: all modules that will be
    asked for, under all their names. Raises Trouble for a pattern that cannot be used.
    """
    fields = fields_of(metadata, config)
    if fields:
        names = tuple(names)
        return AlphaRules({component: _rule(said, names, source) for component, said in fields.items()})
    if not tensors_say and not is_ours(metadata):
        for key in ("lora_alpha", "network_alpha", "alpha"):
            alpha = number(metadata.get(key))
            if alpha is not None:
                return AlphaRules({"": AlphaRule(alpha, root=truth(metadata.get("use_rslora")))})
    return AlphaRules()


def _rule(fields: Mapping[str, object], names: tuple[str, ...], source: str) -> AlphaRule:
    alpha = fields.get("lora_alpha", fields.get("alpha"))  # PEFT's LoHa and LoKr call it so
    lokr = str(fields.get("peft_type", "")).upper() == "LOKR"
    return AlphaRule(
        number(alpha),
        _by_module(fields, "alpha_pattern", names, source),
        truth(fields.get("use_rslora")),
        number(fields.get("r")) if lokr else None,
        _by_module(fields, "rank_pattern", names, source) if lokr else {},
    )


def _by_module(fields: Mapping[str, object], key: str, names: tuple[str, ...], source: str) -> dict[str, float]:
    """Module name -> number, for the modules that a pattern names."""
    patterns = fields.get(key)
    if not isinstance(patterns, dict) or not patterns:
        return {}
    numbers: dict[str, float] = {}
    for entry, value in patterns.items():
        found_number = number(value)
        if found_number is None:
            raise Trouble(
                "bad_value",
                f"{source}: {key} says {str(value)[:60]!r} for {str(entry)[:200]!r}, which is no number.",
                hint="Correct it there; nothing was changed.",
            )
        numbers[str(entry)] = found_number
    found = matching(numbers, names, source)
    return {name: numbers[entry] for name, entry in found.items() if entry is not None}
