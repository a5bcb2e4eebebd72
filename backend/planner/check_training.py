"""What a run with certain settings would be refused for, from the headers of its model: the one rule book of the plan, the form and the
trainer, which asks it before any weight is loaded and anything is encoded. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from backend.catalog.family import Family
from backend.catalog.formats.read import read_header
from backend.catalog.hub.part_entries import all_meant, parts_meant, rounding_of
from backend.catalog.lora.keys import is_adapter
from backend.catalog.lora.target_modules import check_oft, pattern_of, target_modules
from backend.catalog.quantization.methods import METHODS, check_method, check_package
from backend.catalog.spec import ModelSpec, PartSpec
from backend.planner.costs.model_sizes import EMBEDDING, ModelSizes, PartSizes, compute_dtypes
from backend.planner.costs.optimizers import check_named, part_rates, part_schedules
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file
from backend.system.text_files import ends_with, listed

Layers = Mapping[str, tuple[int, int]]  # linear layer -> (rows, columns)


def check_training(
    config,
    sizes: ModelSizes,
    family: Family,
    *,
    spec: ModelSpec | None = None,
    known: tuple[str, ...] = (),
    here: bool = True,
) -> None:
    """Raises Trouble for what a run of `config` (a `TrainingConfig`) with this model would end with.

    `spec`: the model as found, for the names of all its layers and its files; without it they follow from `sizes`. `known`: entries of
    the command line, for hints. `here`: it is to run on this machine, with the packages that are installed.
    """
    trained = trained_parts(config)
    part = lora_part(config)
    first_stage = config.training.task.endswith(":data_process")  # it trains nothing, and need not have what will
    there, may = sizes.parts, trainable_parts(family, sizes.variant)
    if not first_stage:
        _check_parts(trained, part, may, there, title=sizes.title)
    if part in trained:
        raise Trouble("bad_value", f"The part {part} cannot both train whole and get a LoRA.", hint="Choose one.")
    layers = {name: layers_of(sizes.parts[name], spec and spec.parts.get(name)) for name in there}
    if part in there:
        _check_adapter(config.lora, layers[part], family, part)
    _check_presets(config.lora, may, there)
    files = {name: size.files for name, size in sizes.parts.items()}
    _check_kept(config, files, layers, trained, part or "", known=known, first_stage=first_stage)
    check_named(config.training, here=here)
    if here:
        for _, method, _ in rounding_of(config.model.quant_options):
            check_package(method, "--quant_options")
    trains = (*trained, *([part] if part else []))
    part_rates(config.training.learning_rates, config.training.learning_rate, trains)
    part_schedules(config.training.lr_schedulers, config.training.lr_scheduler, trains)
    _check_fp16(config, sizes)
    _check_strengths(config)


def trained_parts(config) -> tuple[str, ...]:
    """Parts whose own weights train."""
    return tuple(dict.fromkeys(listed(config.training.trainable_models)))


def lora_part(config) -> str | None:
    """The part that gets an adapter: the one named, or dit where nothing is named at all."""
    return config.lora.lora_base_model or (None if trained_parts(config) else "dit")


def layers_of(sizes: PartSizes, part: PartSpec | None = None) -> dict[str, tuple[int, int]]:
    """The linear layers of a part by their names: from its own headers, or, of one that is not here, block by block as it is published."""
    if part is not None:
        return {
            name.removesuffix(".weight"): tuple(at.shape)
            for name, at in part.tensors.items()
            if len(at.shape) == 2 and name.endswith(".weight") and not EMBEDDING.search(name)
        }
    found = dict(sizes.outside)
    for name, (rows, columns, _) in sizes.linears.items():
        home = next(home for home in sizes.depths if name.startswith(f"{home}."))
        for number in range(sizes.depths[home]):
            found[f"{home}.{number}.{name.removeprefix(f'{home}.')}"] = (rows, columns)
    return found


def check_files(lora) -> None:
    """Raises Trouble for a LoRA to begin from or to merge that is not there or is no LoRA, by its header alone."""
    for name in ("lora_checkpoint", "preset_lora_path"):
        text = getattr(lora, name)
        if not text:
            continue
        path = Path(text)
        if not is_file(path):
            raise Trouble("missing_file", f"There is no LoRA file {text} (--{name}).")
        if path.suffix.lower() == ".safetensors" and not is_adapter(read_header(path).tensors):
            raise Trouble(
                "not_recognised",
                f"{path.name} is no LoRA (--{name}).",
                hint="Name the file of a LoRA or one of its kin.",
            )
        if path.suffix.lower() != ".safetensors" and name == "lora_checkpoint":
            raise Trouble(
                "not_supported",
                f"{path.name} is no safetensors file, and a run begins from no other (--{name}).",
                hint="Convert it: python -m backend lora, or the page's tools.",
            )


def trainable_parts(family: Family, variant: str) -> tuple[str, ...]:
    """The parts of a variant whose weights may train: its networks, and what encodes prompts."""
    return (*family.parts_of("denoise", variant), *family.parts_of("text", variant))


def _check_parts(
    trained: tuple[str, ...], part: str | None, may: tuple[str, ...], there: Mapping[str, PartSizes], *, title: str
) -> None:
    for flag, names in (("trainable_models", trained), ("lora_base_model", (part,) if part else ())):
        for name in names:
            if name not in may:
                can = " or ".join(one for one in may if one in there)
                raise Trouble("bad_value", f"The part {name!r} cannot be trained here (--{flag}).", hint=f"Use {can}.")
            if name not in there:
                raise Trouble("missing_part", f"{title} has no {name} among the files given.")


def _check_adapter(lora, layers: Layers, family: Family, part: str) -> None:
    modules = target_modules(tuple(layers), lora.lora_target_modules, family.LORA, part=part)
    pattern_of(lora.lora_rank_pattern, "lora_rank_pattern", modules)
    pattern_of(lora.lora_alpha_pattern, "lora_alpha_pattern", modules)
    if lora.lora_algorithm == "oft":
        check_oft(lora, {name: layers[name][1] for name in modules})


def _check_presets(lora, may: tuple[str, ...], there: Mapping[str, PartSizes]) -> None:
    into = lora.preset_lora_model
    if into and not lora.preset_lora_path:
        raise Trouble(
            "bad_value",
            "--preset_lora_model says where a preset LoRA goes, but none is named.",
            hint="Set --preset_lora_path, or leave it out.",
        )
    if lora.preset_lora_path and into and into not in may:
        can = " or ".join(one for one in may if one in there)
        raise Trouble(
            "bad_value", f"The preset LoRA cannot go into {into!r} (--preset_lora_model).", hint=f"Use {can}."
        )


def _check_kept(
    config,
    files: dict,
    layers: dict[str, Layers],
    trained: tuple[str, ...],
    part: str,
    *,
    known: tuple[str, ...],
    first_stage: bool,
) -> None:
    """How parts are stored and moved."""
    model, memory = config.model, config.memory
    eight = all_meant(model.fp8_models, "fp8_models", files, known=known)
    away = all_meant(model.offload_models, "offload_models", files, known=known)
    rounded: dict[str, str] = {}
    asked = rounding_of(model.quant_options)
    if model.quant_options and not asked:
        raise Trouble(
            "bad_value",
            f"--quant_options is {model.quant_options!r}, which names no part.",
            hint="For example dit:int8, or leave it out.",
        )
    for entry, method, excluded in asked:
        check_method(method, "--quant_options")
        for name in sorted(parts_meant(entry, "quant_options", files, known=known)):
            if name in rounded:
                raise Trouble(
                    "bad_value",
                    f"--quant_options names the part {name} twice ({rounded[name]} and {method}).",
                    hint="Say one.",
                )
            rounded[name] = method
            _check_rounded(
                name, method, excluded, layers[name], trained, flowing=not first_stage and name in ("dit", part)
            )
    for name in sorted(eight & set(trained)):
        raise Trouble(
            "bad_value",
            f"The part {name} cannot be kept in FP8 (--fp8_models) while its own weights train: the steps of an optimizer are too small "
            "for 8 bits.",
            hint="Train a LoRA on it, or leave it out of --fp8_models.",
        )
    for name in sorted(away & set(trained)):
        raise Trouble(
            "bad_value",
            f"The part {name} cannot be offloaded (--offload_models) while its own weights train.",
            hint="Leave it out there.",
        )
    if memory.enable_model_cpu_offload:
        away |= files.keys() - set(trained)
    for name in sorted((eight | away) & rounded.keys()):
        flag = "fp8_models" if name in eight else "enable_model_cpu_offload or --offload_models"
        raise Trouble(
            "bad_value",
            f"The part {name} is quantized (--quant_options), and such weights are neither moved nor stored in FP8 (--{flag}).",
            hint="Name it in one of them only; --offload_models names single parts.",
        )
    _check_fetched(memory, away)
    if config.lora.lora_algorithm == "dora" and part in eight | away | rounded.keys():
        raise Trouble(
            "bad_value",
            f"DoRA needs the weights of {part} in full, not in FP8, quantized or offloaded.",
            hint="Use lora.",
        )


def _check_rounded(
    name: str, method: str, excluded: tuple[str, ...], layers: Layers, trained: tuple[str, ...], *, flowing: bool
) -> None:
    if name in trained:
        raise Trouble(
            "bad_value",
            f"The part {name} cannot be quantized (--quant_options) while its own weights train.",
            hint="Train a LoRA on it, or leave it out of --quant_options.",
        )
    if flowing and not METHODS[method].gradients:
        raise Trouble(
            "bad_value",
            f"The quantization {method} of {name} (--quant_options) passes no gradients, so no LoRA could learn there.",
            hint=f"Use one of {', '.join(name for name, one in METHODS.items() if one.gradients)}.",
        )
    for end in excluded:
        if not any(ends_with(layer, end) for layer in layers):
            raise Trouble(
                "bad_value",
                f"--quant_options leaves out {end!r}, but {name} has no linear layer of that name.",
                hint=f"There are {', '.join(_kinds(layers))}." if layers else "Leave the part out.",
            )
    if all(any(ends_with(layer, end) for end in excluded) for layer in layers):
        raise Trouble(
            "bad_value", f"The part {name} has no linear layer to quantize (--quant_options).", hint="Leave it out."
        )


def _kinds(layers: Layers) -> list[str]:
    return sorted({re.sub(r"^(.*\.)?\d+\.", "", name, count=1) for name in layers})[:24]


def _check_fetched(memory, away: set[str]) -> None:
    """Raises Trouble for what is said of fetched weights where there are none."""
    said = [
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
    ]
    for name, words, wrong in said:
        if wrong:
            raise Trouble(
                "bad_value",
                f"--{name} {words}, but none are offloaded.",
                hint="Set --enable_model_cpu_offload or --offload_models, or leave it out.",
            )


def _check_fp16(config, sizes: ModelSizes) -> None:
    if config.training.mixed_precision != "fp16":
        return
    beside = config.memory.enable_optimizer_cpu_offload
    if beside or config.training.customized_optimizer.strip().lower() == "muon":
        what = "An optimizer on the CPU" if beside else "Muon"
        raise Trouble("bad_value", f"{what} does not train in fp16.", hint="Use --mixed_precision bf16.")
    if "float16" not in compute_dtypes(sizes.family):
        raise Trouble(
            "bad_value",
            f"{sizes.title} does not train in fp16 (--mixed_precision): its activations overflow float16, and the loss becomes NaN.",
            hint="Use bf16; on a card without it, no (float32).",
        )


def strengths_of(section) -> list[float]:
    """The strengths of the LoRA at which samples are drawn. Raises Trouble for what is no number."""
    try:
        found = [float(word) for word in section.sample_strengths.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found:
        raise Trouble(
            "bad_value",
            f"Sample strengths (--sample_strengths) are {section.sample_strengths!r}, not numbers.",
            hint="For example 0.5,1.",
        )
    return found


def _check_strengths(config) -> None:
    """Raises Trouble for strengths that what trains cannot be drawn at: only what is added to the weights can be added in part."""
    strengths = strengths_of(config.samples)
    kind = config.lora.lora_algorithm if lora_part(config) else "weights"
    drawn = bool(config.samples.sample_prompts.strip())
    if drawn and kind in ("weights", "dora", "oft") and any(strength != 1.0 for strength in strengths):
        raise Trouble(
            "bad_value",
            f"Samples at other strengths than 1 (--sample_strengths) need a LoRA; what trains here is {kind}.",
            hint="Leave --sample_strengths at 1.",
        )
