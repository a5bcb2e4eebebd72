"""What a trainer would refuse of a config, said by the plan before anything is loaded: parts and modules that are not there, and ways to keep a
part that exclude one another. From sizes alone; no torch."""

from __future__ import annotations

import re

from backend.catalog.rounded import METHODS, NO_GRADIENT
from backend.catalog.sizes import ModelSizes
from backend.catalog.text import listed
from backend.catalog.work import STATE_BYTES, is_named, is_pattern, lora_targets, unmatched
from backend.schema.knobs import to_values
from backend.schema.messages import Trouble

TRAINABLE = ("dit", "text_encoder")


def check_training(config, sizes: ModelSizes) -> None:
    """Raises Trouble for what a run of `config` with this model would end with at once."""
    values = to_values(config)
    trained = listed(values.get("trainable_models"))
    base = values.get("lora_base_model") or ("" if trained else "dit")
    for flag, names in (("trainable_models", trained), ("lora_base_model", (base,) if base else ())):
        for name in names:
            if name not in TRAINABLE or name not in sizes.parts:
                there = " or ".join(part for part in TRAINABLE if part in sizes.parts)
                raise Trouble(
                    "bad_value", f"The part {name!r} (--{flag}) cannot be trained here.", hint=f"Use {there}."
                )
    if base in trained:
        raise Trouble("bad_value", f"The part {base} cannot both train whole and get a LoRA.", hint="Choose one.")
    if base:
        _check_targets(sizes.parts[base], base, values["lora_target_modules"].strip())
    _check_kept(values, sizes, trained, base)
    optimizer = values["customized_optimizer"].strip()
    if optimizer.lower() not in STATE_BYTES and "." not in optimizer:
        raise Trouble(
            "bad_value",
            f"There is no optimizer {optimizer!r} (--customized_optimizer).",
            hint=f"There are {', '.join(STATE_BYTES)}, or a class by its dotted name.",
        )


def _check_targets(part, name: str, wanted: str) -> None:
    missing = unmatched(part, wanted)
    if missing is None:
        return
    if is_pattern(wanted):
        try:
            re.compile(wanted)
        except re.error as error:
            words = f"{wanted!r} is no regular expression: {error} (--lora_target_modules)."
            raise Trouble("bad_value", words, hint="Correct it, or name ends of modules' names.") from None
    kinds = sorted({one.partition(".")[2] if one in part.linears else one for one in lora_targets(part, "all-linear")})
    raise Trouble(
        "bad_value",
        f"No module of {name} is called {missing!r} (--lora_target_modules).",
        hint=f"There are {', '.join(kinds[:24])}.",
    )


def _check_kept(values: dict, sizes: ModelSizes, trained: tuple[str, ...], base: str) -> None:
    """How parts are stored and moved."""
    kept: dict[str, set[str]] = {}
    for flag in ("fp8_models", "offload_models"):
        for entry in listed(values.get(flag)):
            for name in _parts_of(entry, flag, sizes):
                kept.setdefault(name, set()).add(flag)
    for entry in filter(str.strip, (values.get("quant_options") or "").split(";")):
        model, _, how = entry.strip().rpartition(":")
        method = how.partition("/")[0].strip()
        if not model:
            raise Trouble(
                "bad_value",
                f"{entry.strip()!r} in --quant_options is not `model:method`.",
                hint="For example dit:int8.",
            )
        if method not in METHODS:
            raise Trouble(
                "bad_value",
                f"There is no quantisation method {method!r} (--quant_options).",
                hint=f"There are {', '.join(METHODS)}.",
            )
        for name in _parts_of(model, "quant_options", sizes):
            kept.setdefault(name, set()).add("quant_options")
            if method in NO_GRADIENT and name in ("dit", base):
                raise Trouble(
                    "bad_value",
                    f"The quantisation {method} of {name} (--quant_options) passes no gradients, so no LoRA could learn there.",
                    hint=f"Use one of {', '.join(one for one in METHODS if one not in NO_GRADIENT)}.",
                )
    if values.get("enable_model_cpu_offload"):
        for name in sizes.parts.keys() - set(trained):
            kept.setdefault(name, set()).add("enable_model_cpu_offload")
    for name, flags in sorted(kept.items()):
        _check_part(name, flags, trained, dora=values["lora_algorithm"] == "dora" and name == base)
    away = {name for name, flags in kept.items() if flags & {"offload_models", "enable_model_cpu_offload"}}
    for flag, needs, is_there in (
        ("resident_blocks", "how many fetched blocks of the transformer stay", "dit" in away),
        ("cpu_offload_split_threshold", "in which pieces weights are fetched", bool(away)),
    ):
        if values.get(flag) and not is_there:
            raise Trouble(
                "bad_value",
                f"--{flag} says {needs}, but none are offloaded.",
                hint="Set --enable_model_cpu_offload or --offload_models.",
            )


def _check_part(name: str, flags: set[str], trained: tuple[str, ...], *, dora: bool) -> None:
    shown = " and ".join(f"--{flag}" for flag in sorted(flags))
    if name in trained and flags:
        raise Trouble(
            "bad_value",
            f"The part {name} cannot be stored or moved otherwise ({shown}) while its own weights train.",
            hint="Leave it out there.",
        )
    if "quant_options" in flags and len(flags) > 1:
        raise Trouble(
            "bad_value",
            f"The part {name} is quantised, and such weights are neither moved nor stored in FP8 ({shown}).",
            hint="Name it in one of them only; --offload_models names single parts.",
        )
    if dora:
        raise Trouble(
            "bad_value",
            f"DoRA needs the weights of {name} in full, not in FP8, quantised or offloaded ({shown}).",
            hint="Use lora.",
        )


def _parts_of(entry: str, flag: str, sizes: ModelSizes) -> list[str]:
    """The parts that an entry means. A file that is not the usual one may be any part: what it is, is known when it is read."""
    found = [name for name in sizes.parts if is_named(name, entry)]
    if not found and not re.search(r"[/\\:.\[]", entry):
        raise Trouble(
            "bad_value",
            f"--{flag} names {entry!r}, which is no part of this model.",
            hint=f"It can be {', '.join(sizes.parts)}.",
        )
    return found
