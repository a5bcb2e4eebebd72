"""Rules of how the parts of a run's model are stored and moved: FP8, quantization, offloading."""

from __future__ import annotations

from collections.abc import Iterator

from backend.catalog.quantization.methods import METHODS, check_package
from backend.planner.rules.case import Case
from backend.planner.rules.resolve_training import Layers, kinds_of
from backend.schema.messages import Trouble
from backend.system.text_files import ends_with


def rules(case: Case) -> Iterator[Trouble]:
    """What cannot be of the settings `fp8_models`, `quant_options` and those that offload."""
    resolved, memory = case.resolved, case.config.memory
    yield from (one for one in resolved.troubles if not one.setting.startswith("lora_"))
    part = case.config.adapter_part or ""
    for name, kept in resolved.parts.items():
        if kept.quantization:
            flowing = not case.first_stage and name in ("dit", part)
            yield from _quantized(case, name, kept.quantization, kept.excluded, resolved.layers[name], flowing=flowing)
    eight = sorted(name for name, kept in resolved.parts.items() if kept.fp8)
    away = sorted(name for name, kept in resolved.parts.items() if kept.offloaded)
    for name in eight:
        if name in resolved.trained:
            yield Trouble(
                "bad_value",
                f"The part {name} cannot be kept in FP8 (--fp8_models) while its own weights train: the steps of an "
                "optimizer are too small for 8 bits.",
                hint="Train a LoRA on it, or leave it out of --fp8_models.",
                setting="fp8_models",
            )
    for name in away:
        if name in resolved.trained:
            yield Trouble(
                "bad_value",
                f"The part {name} cannot be offloaded (--offload_models) while its own weights train.",
                hint="Leave it out there.",
                setting="offload_models",
            )
    for name in sorted({*eight, *away}):
        if resolved.parts[name].quantization:
            flag = "fp8_models" if name in eight else "enable_model_cpu_offload or --offload_models"
            yield Trouble(
                "bad_value",
                f"The part {name} is quantized (--quant_options), and such weights are neither moved nor stored in FP8 "
                f"(--{flag}).",
                hint="Name it in one of them only; --offload_models names single parts.",
                setting="quant_options",
            )
    yield from _offloading(memory, away)
    if case.config.lora.lora_algorithm == "dora" and part in resolved.parts and not resolved.parts[part].full:
        yield Trouble(
            "bad_value",
            f"DoRA needs the weights of {part} in full, not in FP8, quantized or offloaded.",
            hint="Use lora.",
            setting="lora_algorithm",
        )


def _quantized(
    case: Case, name: str, method: str, excluded: tuple[str, ...], layers: Layers, *, flowing: bool
) -> Iterator[Trouble]:
    """`flowing`: gradients pass through the part."""

    def wrong(message: str, hint: str) -> Trouble:
        return Trouble("bad_value", message, hint=hint, setting="quant_options")

    if name in case.resolved.trained:
        yield wrong(
            f"The part {name} cannot be quantized (--quant_options) while its own weights train.",
            "Train a LoRA on it, or leave it out of --quant_options.",
        )
    if flowing and not METHODS[method].gradients:
        yield wrong(
            f"The quantization {method} of {name} (--quant_options) passes no gradients, so no LoRA could learn there.",
            f"Use one of {', '.join(name for name, one in METHODS.items() if one.gradients)}.",
        )
    for end in excluded:
        if not any(ends_with(layer, end) for layer in layers):
            yield wrong(
                f"--quant_options leaves out {end!r}, but {name} has no linear layer of that name.",
                f"There are {', '.join(kinds_of(layers)[:24])}." if layers else "Leave the part out.",
            )
    if all(any(ends_with(layer, end) for end in excluded) for layer in layers):
        yield wrong(f"The part {name} has no linear layer to quantize (--quant_options).", "Leave it out.")
    if case.here:
        try:
            check_package(method, "--quant_options")
        except Trouble as trouble:
            trouble.setting = "quant_options"
            yield trouble


def _offloading(memory, away: list[str]) -> Iterator[Trouble]:
    """What is said of offloaded weights where there are none."""
    said = (
        (
            "cpu_offload_split_threshold",
            "says in which pieces weights are fetched",
            memory.cpu_offload_split_threshold is not None and not away,
        ),
        (
            "resident_blocks",
            "says how many of the transformer's fetched blocks stay",
            bool(memory.resident_blocks) and "dit" not in away,
        ),
    )
    for name, words, wrong in said:
        if wrong:
            yield Trouble(
                "bad_value",
                f"--{name} {words}, but none are offloaded.",
                hint="Set --enable_model_cpu_offload or --offload_models, or leave it out.",
                setting=name,
            )
