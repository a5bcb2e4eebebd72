"""How a LoRA was trained, read from its metadata, as values of the training form: "Train again with these settings"."""

from __future__ import annotations

import re
from collections.abc import Mapping

from backend.catalog.lora.metadata import number, table, trigger_words
from backend.catalog.spec import LoraSpec
from backend.schema.training.config import TrainingConfig
from studio.state.saved_forms import with_known

# Optimizers and schedules by what their names hold, in the words of other trainers.
OPTIMIZERS = {
    "adamw8bit": "adamw8bit",
    "prodigy": "prodigy",
    "lion": "lion",
    "adafactor": "adafactor",
    "adamw": "adamw",
}
SCHEDULES = {
    "cosine_with_restarts": "cosine_with_restarts",
    "cosine": "cosine",
    "constant": "constant",
    "linear": "linear",
}
# What a file may say of how it was trained. No paths, no models, no data, nothing that names code, and nothing that is
# of one machine or one run: a LoRA's metadata is a stranger's text.
TAKEN = (
    "name", "trigger_word", "lora_rank", "lora_alpha", "lora_dropout", "lora_algorithm", "lora_target_modules", "lora_rank_pattern",
    "lora_alpha_pattern", "learning_rate", "num_epochs", "max_steps", "batch_size", "gradient_accumulation_steps", "customized_optimizer",
    "weight_decay", "lr_scheduler", "lr_warmup_steps", "lr_restarts", "max_grad_norm", "ema_decay", "seed", "mixed_precision",
    "timestep_sampling", "logit_mean", "logit_std", "mode_scale", "high_noise_share", "high_noise_from", "loss_weighting", "min_snr_gamma",
    "height", "width", "max_pixels", "dataset_repeat", "caption_dropout", "caption_shuffle", "flip", "crops", "crop_zoom", "masked_loss",
    "mask_floor", "prior_pictures", "prior_weight", "prior_share", "prior_guidance", "sample_prompts", "sample_every",
    "sample_inference_steps", "sample_guidance", "sample_seed", "sample_strengths", "sample_width", "sample_height", "validation_split",
    "validation_every", "save_steps", "use_gradient_checkpointing",
)  # fmt: skip
PROSE = ("sample_prompts", "trigger_word")  # texts that no file is opened for
NAMED_OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor", "lion", "muon", "adamw8bit", "pagedadamw8bit", "prodigy")


def settings_of(spec: LoraSpec) -> dict[str, object]:
    """Values of `TrainingConfig` by name, as far as the file tells: Loft, sd-scripts and its kin, ai-toolkit,
    OneTrainer, diffusers."""
    metadata = spec.metadata
    values = _common(spec)
    for reader in (_diffusers, _onetrainer, _ai_toolkit, _kohya, _loft):
        values |= {name: value for name, value in reader(metadata).items() if value not in (None, "")}
    return {name: value for name, value in values.items() if _may_be_taken(name, value)}


def _may_be_taken(name: str, value: object) -> bool:
    """Whether a setting is one that a file may say: optimizers by their short names, modules by plain names, and
    nothing that could be a path."""
    if name not in TAKEN or not isinstance(value, str | int | float):
        return False
    said = str(value).strip()
    if name == "customized_optimizer":
        return said.lower() in NAMED_OPTIMIZERS
    if name == "lora_target_modules":  # not a regular expression, which may run for ever
        return re.fullmatch(r"[\w., -]*", said) is not None
    if name in PROSE:
        return not said.lower().endswith(".txt")  # else it would be read as a file of lines
    return not isinstance(value, str) or not any(letter in said for letter in "/\\\n\0")


def config_of(spec: LoraSpec, base: TrainingConfig) -> TrainingConfig:
    """`base` (pictures and model) with the settings of `spec` over the defaults for everything else."""
    values = settings_of(spec)
    fresh = TrainingConfig(model=base.model)
    kept = {
        "dataset_base_path": base.dataset.dataset_base_path,
        "dataset_metadata_path": base.dataset.dataset_metadata_path,
    }
    return with_known(fresh, values | kept)


def _common(spec: LoraSpec) -> dict[str, object]:
    values: dict[str, object] = {"name": f"{spec.path.stem}-again"[:40]}
    if spec.ranks:
        values["lora_rank"] = max(spec.ranks)
    if len(spec.alphas) == 1:
        values["lora_alpha"] = spec.alphas[0]
    words = spec.trigger_words or trigger_words(spec.metadata)
    if words:
        values["trigger_word"] = words[0]
    return values


def _loft(metadata: Mapping[str, str]) -> dict[str, object]:
    return dict(table(metadata, "config")) if metadata.get("software", "").startswith("Loft") else {}


def _kohya(metadata: Mapping[str, str]) -> dict[str, object]:
    """The `ss_*` keys of sd-scripts, musubi-tuner and LyCORIS."""
    if not any(key.startswith("ss_") for key in metadata):
        return {}

    def value(key: str) -> float | None:
        return number(metadata.get(key))

    values: dict[str, object] = {
        "learning_rate": value("ss_unet_lr") or value("ss_learning_rate"),
        "lora_rank": _whole(value("ss_network_dim")),
        "lora_alpha": value("ss_network_alpha"),
        "num_epochs": _whole(value("ss_num_epochs")),
        "max_steps": _whole(value("ss_max_train_steps")),
        "seed": _whole(value("ss_seed")),
        "gradient_accumulation_steps": _whole(value("ss_gradient_accumulation_steps")),
        "lr_warmup_steps": _whole(value("ss_lr_warmup_steps")),
        "max_grad_norm": value("ss_max_grad_norm"),
        "batch_size": _whole(value("ss_batch_size_per_device") or value("ss_total_batch_size")),
        "customized_optimizer": _named(metadata.get("ss_optimizer", ""), OPTIMIZERS),
        "lr_scheduler": _named(metadata.get("ss_lr_scheduler", ""), SCHEDULES),
        "caption_dropout": value("ss_caption_dropout_rate"),
        "flip": metadata.get("ss_flip_aug", "").lower() == "true" or None,
        "caption_shuffle": metadata.get("ss_shuffle_caption", "").lower() == "true" or None,
        "use_gradient_checkpointing": metadata.get("ss_gradient_checkpointing", "").lower() == "true" or None,
        "name": metadata.get("ss_output_name"),
    }
    resolution = metadata.get("ss_resolution", "").strip("()[] ")
    sides = [number(part) for part in resolution.replace("x", ",").split(",") if part.strip()]
    if sides and all(sides):
        values["max_pixels"] = int(sides[0] * sides[-1])
    return values


def _ai_toolkit(metadata: Mapping[str, str]) -> dict[str, object]:
    """`training_info` says how far it went; the job's settings lie under `config` where they were written."""
    if table(metadata, "software").get("name") != "ai-toolkit":
        return {}
    done = table(metadata, "training_info")
    job = table(metadata, "config")
    train, network = _inner(job, "train"), _inner(job, "network")
    return {
        "max_steps": _whole(number(train.get("steps"))) or _whole(number(done.get("step"))),
        "num_epochs": _whole(number(done.get("epoch"))),
        "learning_rate": number(train.get("lr")),
        "batch_size": _whole(number(train.get("batch_size"))),
        "gradient_accumulation_steps": _whole(number(train.get("gradient_accumulation_steps"))),
        "customized_optimizer": _named(str(train.get("optimizer", "")), OPTIMIZERS),
        "lora_rank": _whole(number(network.get("linear"))),
        "lora_alpha": number(network.get("linear_alpha")),
        "name": metadata.get("name"),
    }


def _onetrainer(metadata: Mapping[str, str]) -> dict[str, object]:
    job = table(metadata, "ot_config")
    optimizer, prior = _inner(job, "optimizer"), _inner(job, "transformer") or _inner(job, "unet")
    resolution = number(str(job.get("resolution", "")).split(",")[0])
    return {
        "learning_rate": number(prior.get("learning_rate")) or number(job.get("learning_rate")),
        "num_epochs": _whole(number(job.get("epochs"))),
        "batch_size": _whole(number(job.get("batch_size"))),
        "gradient_accumulation_steps": _whole(number(job.get("gradient_accumulation_steps"))),
        "lr_warmup_steps": _whole(number(job.get("learning_rate_warmup_steps"))),
        "lr_scheduler": _named(str(job.get("learning_rate_scheduler", "")), SCHEDULES),
        "customized_optimizer": _named(str(optimizer.get("optimizer", "")), OPTIMIZERS),
        "lora_rank": _whole(number(job.get("lora_rank"))),
        "lora_alpha": number(job.get("lora_alpha")),
        "max_pixels": int(resolution * resolution) if resolution else None,
    }


def _diffusers(metadata: Mapping[str, str]) -> dict[str, object]:
    """peft's config, of which diffusers keeps one for each component under its name."""
    adapter = table(metadata, "lora_adapter_metadata")

    def of(name: str):
        return next((value for key, value in adapter.items() if key.rpartition(".")[2] == name), None)

    targets = of("target_modules")
    return {
        "lora_rank": _whole(number(of("r"))),
        "lora_alpha": number(of("lora_alpha")),
        "lora_dropout": number(of("lora_dropout")),
        "lora_target_modules": ",".join(map(str, targets)) if isinstance(targets, list) else targets,
    }


def _inner(values: dict, name: str) -> dict:
    """The dictionary called `name`, at the top, under "config", or in the first of its "process" list."""
    found = values.get(name)
    if isinstance(found, dict):
        return found
    inside = values.get("config", values)
    steps = inside.get("process") if isinstance(inside, dict) else None
    first = steps[0] if isinstance(steps, list) and steps and isinstance(steps[0], dict) else {}
    return first.get(name) if isinstance(first.get(name), dict) else {}


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and value == int(value) and value > 0 else None


def _named(text: str, names: Mapping[str, str]) -> str | None:
    """The first of `names` that `text` holds."""
    plain = text.lower().replace("_", "").replace(" ", "")
    return next((ours for theirs, ours in names.items() if theirs.replace("_", "") in plain), None)
