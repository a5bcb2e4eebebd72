"""What a LoRA file's metadata says about alpha: one for all, exceptions by name, and whether the root of the rank divides it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from backend.catalog.lora_facts import is_ours, number, table

COMPONENTS = ("transformer", "unet", "text_encoder", "text_encoder_2", "text_encoder_3")
SIMPLE = re.compile(r"[\w.\\\[\]()|^$*+?-]{1,200}")
RUNAWAY = re.compile(r"\)[*+{?]|[*+]{2}")  # a repeated group may take for ever on a hostile name


@dataclass(frozen=True)
class AlphaRule:
    """What metadata says about alpha: one for all, exceptions by name, and whether the root of the rank divides it."""

    alpha: float | None = None
    patterns: tuple[tuple[re.Pattern, float], ...] = ()
    root: bool = False
    component: str = ""

    def alpha_of(self, names: Iterable[str]) -> float | None:
        """Of a module under its names: the model's own and the file's."""
        for pattern, alpha in self.patterns:
            if any(pattern.search(name) for name in names):
                return alpha
        return self.alpha


@dataclass(frozen=True)
class AlphaRules:
    """The rules of a file by component; `""` serves those without one of their own."""

    rules: dict[str, AlphaRule] = field(default_factory=dict)

    def scale(self, names: Sequence[str], component: str, rank: int) -> float:
        """alpha / rank (or its root) by metadata; 1 where it says nothing."""
        rule = self.rules.get(component) or self.rules.get("")
        alpha = rule.alpha_of(names) if rule else None
        if alpha is None:
            return 1.0
        return alpha / math.sqrt(rank) if rule.root else alpha / rank


def alpha_rules(metadata: Mapping[str, str], config: Mapping[str, object], *, tensors_say: bool) -> AlphaRules:
    """The rules in a file's metadata, or in a `config` (PEFT's) beside it. `tensors_say`: some module has an alpha tensor, so
    file-wide numbers are no rule."""
    said = table(metadata, "lora_adapter_metadata")
    if said:
        return AlphaRules(_by_component(said))
    if config:
        return AlphaRules({"": _rule(config)})
    if not tensors_say and not is_ours(metadata):
        for key in ("lora_alpha", "network_alpha", "alpha"):
            alpha = number(metadata.get(key))
            if alpha is not None:
                return AlphaRules({"": AlphaRule(alpha, root=truth(metadata.get("use_rslora")))})
    return AlphaRules()


def _by_component(said: Mapping[str, object]) -> dict[str, AlphaRule]:
    rules = {}
    for component in COMPONENTS:
        beginning = component + "."
        fields = {key[len(beginning) :]: value for key, value in said.items() if key.startswith(beginning)}
        if fields:
            rules[_part(component)] = _rule(fields)
    plain = {key: value for key, value in said.items() if "." not in key}
    if plain:
        rules[""] = _rule(plain)
    if len(rules) == 1 and "dit" in rules:
        rules[""] = rules["dit"]
    return rules


def _part(component: str) -> str:
    return "dit" if component in ("transformer", "unet") else component


def _rule(fields: Mapping[str, object]) -> AlphaRule:
    patterns = fields.get("alpha_pattern")
    patterns = patterns if isinstance(patterns, dict) else {}
    compiled = []
    for key, value in patterns.items():
        alpha = number(value)
        if alpha is not None:
            compiled.append((_pattern(str(key)), alpha))
    return AlphaRule(number(fields.get("lora_alpha")), tuple(compiled), truth(fields.get("use_rslora")))


def _pattern(text: str) -> re.Pattern:
    """PEFT's patterns: the end of a module name, or a regular expression for one (only simple ones are let in)."""
    if SIMPLE.fullmatch(text) and not RUNAWAY.search(text):
        try:
            start = "^" if text.startswith("^") else r"(?:^|\.)"
            return re.compile(rf"{start}(?:{text.lstrip('^').removesuffix('$')})$")
        except re.error:
            pass
    return re.compile(rf"(?:^|\.){re.escape(text)}$")


def truth(value: object) -> bool:
    return value is True or str(value).lower() in ("true", "1")
