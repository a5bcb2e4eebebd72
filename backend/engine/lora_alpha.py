"""How strongly each module of a LoRA acts at strength 1: alpha from its tensor, else from metadata; rank from the tensors alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from backend.catalog.lora_facts import is_ours, number, table
from backend.engine.lora_source import Source
from backend.schema.messages import Trouble

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


def alpha_rules(source: Source, *, tensors_say: bool) -> AlphaRules:
    """The rules in a file's metadata or beside it. `tensors_say`: some module has an alpha tensor, so file-wide numbers are no rule."""
    said = table(source.metadata, "lora_adapter_metadata")
    if said:
        return AlphaRules(_by_component(said))
    if source.config:
        return AlphaRules({"": _rule(source.config)})
    if not tensors_say and not is_ours(source.metadata):
        for key in ("lora_alpha", "network_alpha", "alpha"):
            alpha = number(source.metadata.get(key))
            if alpha is not None:
                return AlphaRules({"": AlphaRule(alpha, root=_truth(source.metadata.get("use_rslora")))})
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
    return AlphaRule(number(fields.get("lora_alpha")), tuple(compiled), _truth(fields.get("use_rslora")))


def _pattern(text: str) -> re.Pattern:
    """PEFT's patterns: the end of a module name, or a regular expression for one (only simple ones are let in)."""
    if SIMPLE.fullmatch(text) and not RUNAWAY.search(text):
        try:
            start = "^" if text.startswith("^") else r"(?:^|\.)"
            return re.compile(rf"{start}(?:{text.lstrip('^').removesuffix('$')})$")
        except re.error:
            pass
    return re.compile(rf"(?:^|\.){re.escape(text)}$")


def _truth(value: object) -> bool:
    return value is True or str(value).lower() in ("true", "1")


def scale_of(
    source: Source,
    roles: Mapping[str, str],
    rank: int,
    rules: AlphaRules,
    names: Sequence[str],
    component: str,
    notes: list[str],
) -> float:
    """The factor of the change of a module known by `names`: alpha / rank. The alpha tensor, if there is one, is nearer evidence than metadata.

    Raises Trouble("not_finite") for an alpha that is NaN or infinite.
    """
    key = roles.get("alpha")
    if key is None:
        return rules.scale(names, component, rank)
    alpha = alpha_value(source, key)
    if not math.isfinite(alpha):
        raise Trouble("not_finite", f"{source.name}: alpha of {names[0]} is {alpha}.", hint="The file is damaged.")
    if alpha == 0.0:
        notes.append(f"alpha of {names[0]} is 0, so it does nothing")
    return alpha / rank


def alpha_value(source: Source, key: str) -> float:
    """The number in an alpha tensor of any dtype and of shape [] or [1]."""
    tensor = source.stored(key)
    if tensor.numel() != 1:
        raise Trouble("shape_mismatch", f"{source.name}: {key} has {tensor.numel()} elements; an alpha is one number.")
    return float(tensor.double() if tensor.is_floating_point() else tensor)


def warnings(source: Source, ranks: set[int], alphas: set[float]) -> list[str]:
    """What is suspicious about a file's alphas and cannot be decided from the file."""
    found = []
    dim = number(source.metadata.get("ss_network_dim"))
    if len(ranks) > 1 and len(alphas) == 1 and dim is not None and any(rank != dim for rank in ranks):
        found.append("all modules share one alpha though their ranks differ: some may act too strongly")
    arguments = source.metadata.get("ss_network_args", "")
    if "split_qkv" in arguments and _truth(_arguments(arguments).get("split_qkv")):
        found.append("trained with split_qkv: such files often store a third of the trained strength")
    return found


def _arguments(text: str) -> dict:
    try:
        value = json.loads(text[:1_000_000])
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
