"""What a run with certain settings would be refused for, from the headers of its model: the one rule book of the form,
the plan, and the trainer, which asks it before any weight is loaded and anything is encoded. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from backend.catalog.family import Family
from backend.catalog.formats.read import read_header
from backend.catalog.lora import fit
from backend.catalog.lora.keys import is_adapter
from backend.catalog.lora.target_modules import check_oft
from backend.catalog.spec import ModelSpec
from backend.planner.costs.model_sizes import ModelSizes, compute_dtypes
from backend.planner.costs.optimizers import check_arguments, check_named, part_rates, part_schedules
from backend.planner.rules import input_rules, storage_rules
from backend.planner.rules.case import Case
from backend.planner.rules.resolve_training import ResolvedTraining, resolve
from backend.schema.messages import Trouble
from backend.schema.training.config import LoraSection, SampleSection, TrainingConfig
from backend.schema.untrusted import is_file


def check_training(
    config: TrainingConfig,
    sizes: ModelSizes,
    family: Family,
    *,
    spec: ModelSpec | None = None,
    known: tuple[str, ...] = (),
    here: bool = True,
    device: str = "",
) -> ResolvedTraining:
    """What `config` means for the model (`resolve`). Raises the first of `troubles_of`, whose arguments these are."""
    resolved = resolve(config, sizes, family, spec=spec, known=known)
    for trouble in _troubles(Case(config, resolved, sizes, family, spec, here=here, device=device)):
        raise trouble
    return resolved


def troubles_of(
    config: TrainingConfig,
    sizes: ModelSizes,
    family: Family,
    *,
    spec: ModelSpec | None = None,
    known: tuple[str, ...] = (),
    here: bool = True,
    device: str = "",
) -> list[Trouble]:
    """Everything that a run of `config` with this model would end with, each `Trouble` with the setting to be changed.

    `spec`: the model as found, for the names of all its layers and its files; without it they follow from `sizes`.
    `known`: entries of the command line, for hints. `here`: it is to run on this machine, with the packages that are
    installed. `device`: of torch, such as "cpu", where it is known."""
    resolved = resolve(config, sizes, family, spec=spec, known=known)
    return list(_troubles(Case(config, resolved, sizes, family, spec, here=here, device=device)))


def _troubles(case: Case) -> Iterator[Trouble]:
    for rule in RULES:
        try:
            yield from rule(case)
        except Trouble as trouble:
            yield trouble


def _parts(case: Case) -> Iterator[Trouble]:
    """Each part that is to train can, and is there."""
    config, there = case.config, case.sizes.parts
    trained, part = config.trained_parts, config.adapter_part
    # The first of two stages trains nothing, and need not have what will.
    named = [] if case.first_stage else [("trainable_models", one) for one in trained]
    named += [("lora_base_model", part)] if part and not case.first_stage else []
    for flag, name in named:
        if name not in case.trainable:
            can = " or ".join(one for one in case.trainable if one in there)
            yield Trouble(
                "bad_value",
                f"The part {name!r} cannot be trained here (--{flag}).",
                hint=f"Use {can}.",
                setting=flag,
            )
        elif name not in there:
            yield Trouble("missing_part", f"{case.sizes.title} has no {name} among the files given.", setting=flag)
    if part in trained:
        yield Trouble(
            "bad_value",
            f"The part {part} cannot both train whole and get a LoRA.",
            hint="Choose one.",
            setting="lora_base_model",
        )


def _adapter(case: Case) -> Iterator[Trouble]:
    yield from (one for one in case.resolved.troubles if one.setting.startswith("lora_"))
    adapter = case.resolved.adapter
    if adapter and adapter.algorithm == "oft":
        layers = case.resolved.layers[adapter.part]
        check_oft(case.config.lora, {name: layers[name][1] for name in adapter.modules})


def _preset(case: Case) -> Iterator[Trouble]:
    lora = case.config.lora
    if lora.preset_lora_model and not lora.preset_lora_path:
        yield Trouble(
            "bad_value",
            "--preset_lora_model says where a preset LoRA goes, but none is named.",
            hint="Set --preset_lora_path, or leave it out.",
            setting="preset_lora_model",
        )
    if lora.preset_lora_path and lora.preset_lora_model and lora.preset_lora_model not in case.trainable:
        can = " or ".join(one for one in case.trainable if one in case.sizes.parts)
        yield Trouble(
            "bad_value",
            f"The preset LoRA cannot go into {lora.preset_lora_model!r} (--preset_lora_model).",
            hint=f"Use {can}.",
            setting="preset_lora_model",
        )


def _optimizer(case: Case) -> Iterator[Trouble]:
    """Its name, what it is told, and what single parts are given."""
    section, trains = case.config.training, case.config.parts_that_train
    for ask in (
        lambda: check_named(section, here=case.here),
        lambda: check_arguments(section),
        lambda: part_rates(section.learning_rates, section.learning_rate, trains),
        lambda: part_schedules(section.lr_schedulers, section.lr_scheduler, trains),
    ):
        yield from raised(ask)


def _fp16(case: Case) -> Iterator[Trouble]:
    config = case.config
    if config.training.mixed_precision != "fp16":
        return
    in_ram = config.memory.enable_optimizer_cpu_offload
    if in_ram or config.training.customized_optimizer.strip().lower() == "muon":
        what = "An optimizer on the CPU" if in_ram else "Muon"
        hint = "Use --mixed_precision bf16."
        yield Trouble("bad_value", f"{what} does not train in fp16.", hint=hint, setting="mixed_precision")
    if "float16" not in compute_dtypes(case.sizes.family):
        yield Trouble(
            "bad_value",
            f"{case.sizes.title} does not train in fp16 (--mixed_precision): its activations overflow float16, and "
            "the loss becomes NaN.",
            hint="Use bf16; on a card without it, no (float32).",
            setting="mixed_precision",
        )
    if case.device == "cpu":
        yield Trouble(
            "bad_value",
            "Mixed precision fp16 does not train on a CPU.",
            hint="Use bf16 or no.",
            setting="mixed_precision",
        )


def strengths_of(section: SampleSection) -> list[float]:
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
            setting="sample_strengths",
        )
    return found


def _strengths(case: Case) -> Iterator[Trouble]:
    """Strengths that what trains can be drawn at: only what is added to the weights can be added in part."""
    config = case.config
    strengths = strengths_of(config.samples)
    kind = config.lora.lora_algorithm if config.adapter_part else "weights"
    drawn = bool(config.samples.sample_prompts.strip())
    if drawn and kind in ("weights", "dora", "oft") and any(strength != 1.0 for strength in strengths):
        yield Trouble(
            "bad_value",
            f"Samples at other strengths than 1 (--sample_strengths) need a LoRA; what trains here is {kind}.",
            hint="Leave --sample_strengths at 1.",
            setting="sample_strengths",
        )


def vram_gib(text: str | None) -> float | None:
    """`--vram` in GiB; None for "auto" and for nothing. Raises Trouble for what is no amount."""
    word = (text or "").strip().lower()
    if word in ("", "auto"):
        return None
    try:
        gib = float(word.removesuffix("gib").removesuffix("gb").strip())
    except ValueError:
        gib = 0.0
    if not 0 < gib <= 2**20:
        raise Trouble(
            "bad_value",
            f"--vram is {text!r}; it can be auto, or an amount in GiB such as 12.",
            setting="vram",
        )
    return gib


def _vram(case: Case) -> Iterator[Trouble]:
    yield from raised(lambda: vram_gib(case.config.memory.vram))


def check_files(lora: LoraSection) -> None:
    """Raises Trouble for a LoRA to begin from or to merge that is not there or is no LoRA, by its header alone."""
    for trouble in file_troubles(lora):
        raise trouble


def file_troubles(lora: LoraSection) -> Iterator[Trouble]:
    """What is wrong with the files of LoRAs that a run is given, by their headers alone."""
    for name in ("lora_checkpoint", "preset_lora_path"):
        text = getattr(lora, name)
        if text:
            yield from raised(lambda name=name, text=text: _check_lora_file(Path(text), text, name))


def _check_lora_file(path: Path, text: str, name: str) -> None:
    if not is_file(path):
        raise Trouble("missing_file", f"There is no LoRA file {text} (--{name}).", setting=name)
    if path.suffix.lower() == ".safetensors":
        try:
            tensors = read_header(path).tensors
        except Trouble as trouble:
            trouble.setting = name
            raise
        if not is_adapter(tensors):
            raise Trouble(
                "not_recognised",
                f"{path.name} is no LoRA (--{name}).",
                hint="Name the file of a LoRA or one of its kin.",
                setting=name,
            )
    elif name == "lora_checkpoint":
        raise Trouble(
            "not_supported",
            f"{path.name} is no safetensors file, and a run begins from no other (--{name}).",
            hint="Convert it: python -m backend lora, or the page's tools.",
            setting=name,
        )


def _files(case: Case) -> Iterator[Trouble]:
    """The LoRA to begin from has something to begin, and the one to merge fits the model."""
    config = case.config
    if config.lora.lora_checkpoint and config.adapter_part is None and not case.first_stage:
        yield Trouble(
            "bad_value",
            "--lora_checkpoint is a LoRA to begin from, but no LoRA trains here.",
            hint="Merge it with --preset_lora_path, or set --lora_base_model.",
            setting="lora_checkpoint",
        )
    path = Path(config.lora.preset_lora_path or "")
    if case.spec and config.preset_part in case.spec.parts and is_file(path) and not list(file_troubles(config.lora)):
        spec = case.spec
        for trouble in raised(lambda: fit.check(path, spec, case.family)):
            trouble.setting = "preset_lora_path"
            yield trouble


def raised(ask: Callable[[], object]) -> Iterable[Trouble]:
    """What calling `ask` raises, if it does."""
    try:
        ask()
    except Trouble as trouble:
        return (trouble,)
    return ()


RULES: tuple[Callable[[Case], Iterable[Trouble]], ...] = (
    input_rules.model_rules,
    _parts,
    _adapter,
    _preset,
    storage_rules.rules,
    _optimizer,
    _fp16,
    _strengths,
    _vram,
    _files,
    input_rules.stage_rules,
    input_rules.part_rules,
)
