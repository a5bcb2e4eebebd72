"""Which modules of a part get an adapter, and with what rank and alpha, by the names of its linear layers. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from backend.catalog.family import LoraTargets
from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble
from backend.system.text_files import ends_with, listed

_REGEX = re.compile(r"[\\^$*+?()\[\]{}|]")


def target_modules(linear: Sequence[str], wanted: str, lora: LoraTargets, *, part: str) -> tuple[str, ...]:
    """Of the layers `linear` those that `wanted` means: see `lora_target_modules`.

    Raises Trouble for what matches nothing.
    """
    wanted = wanted.strip()
    if wanted == "all-linear" or (not wanted and part != lora.part):
        return tuple(linear)
    if not wanted:
        ends = lora.modules
    elif wanted in lora.presets:
        ends = lora.presets[wanted]
    elif _REGEX.search(wanted):
        try:
            found = tuple(name for name in linear if re.fullmatch(wanted, name))
        except re.error as error:
            words = f"{wanted!r} is no regular expression: {error} (--lora_target_modules)."
            hint = "Correct it, or name ends of modules' names."
            raise Trouble("bad_value", words, hint=hint, setting="lora_target_modules") from None
        return found or _nothing(wanted, linear, part)
    else:
        ends = listed(wanted)
    for end in ends:
        if not any(ends_with(name, end) for name in linear):
            _nothing(end, linear, part)
    return tuple(name for name in linear if any(ends_with(name, end) for end in ends))


def _nothing(wanted: str, linear: Sequence[str], part: str):
    kinds = sorted({re.sub(r"^(.*\.)?\d+\.", "", name, count=1) for name in linear})
    raise Trouble(
        "bad_value",
        f"No module of {part} is called {wanted!r} (--lora_target_modules).",
        hint=f"There are {', '.join(kinds[:24])}.",
        setting="lora_target_modules",
    )


def pattern_of(text: str | None, flag: str, modules: Iterable[str]) -> dict[str, float]:
    """`--lora_rank_pattern` or `--lora_alpha_pattern`: end of a module's name -> number. Raises Trouble."""
    if not text:
        return {}
    try:
        parsed = parse_json(text)
        if not isinstance(parsed, dict):
            raise TypeError("no JSON object")
        pattern = {str(end): float(value) for end, value in parsed.items()}
    except (ValueError, TypeError, AttributeError, OverflowError):
        words = f"--{flag} is {text!r}, not a JSON object of names and numbers."
        raise Trouble("bad_value", words, setting=flag) from None
    for end in pattern:
        if not any(ends_with(module, end) for module in modules):
            raise Trouble("bad_value", f"--{flag} names {end!r}, which gets no LoRA.", setting=flag)
        if (flag == "lora_rank_pattern" and (pattern[end] < 1 or pattern[end] % 1)) or not 0 <= pattern[end] < math.inf:
            kind = "a whole number above 0" if flag == "lora_rank_pattern" else "0 or more"
            raise Trouble("bad_value", f"--{flag} says {pattern[end]:g} for {end}; it has to be {kind}.", setting=flag)
    return pattern


def check_oft(lora, inputs: Mapping[str, int]) -> None:
    """OFT turns blocks of `lora_rank` inputs. `lora`: a `LoraSection`; `inputs`: of each module that gets it. Raises
    Trouble where they do not divide, and for what it has not."""
    for setting in ("lora_alpha", "lora_rank_pattern", "lora_alpha_pattern"):
        if getattr(lora, setting) not in (None, ""):
            raise Trouble(
                "bad_value",
                "OFT turns inputs by blocks of one size (--lora_rank); it has no alpha and no patterns.",
                hint="Leave --lora_alpha, --lora_rank_pattern and --lora_alpha_pattern out, or use lora.",
                setting=setting,
            )
    for name, width in inputs.items():
        if lora.lora_rank < 2 or width % lora.lora_rank:
            raise Trouble(
                "bad_value",
                f"OFT turns blocks of {lora.lora_rank} inputs (--lora_rank), but {name} has {width}.",
                hint=f"Use a number that divides it, such as {math.gcd(width, 96)}.",
                setting="lora_rank",
            )
