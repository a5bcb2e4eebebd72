"""A request or a training config as the numbers that bytes and seconds depend on."""

from __future__ import annotations

import math
import re
from pathlib import Path

from backend.catalog.hub.part_entries import Files, means
from backend.catalog.quantization.methods import is_quantized
from backend.families import by_name
from backend.images.picture_sizes import sizes_of_files
from backend.planner.costs import prompt_length as words
from backend.planner.costs.layout import FP8, TRAINING_RUNGS, Layout, PartLayout, Update, Work
from backend.planner.costs.model_sizes import ModelSizes, PartSizes, published
from backend.planner.costs.training_method import method_of_values, numbers_of
from backend.schema.request import GenerationRequest
from backend.schema.settings import to_values
from backend.system.text_files import ends_with, listed

# bytes of state for each trained number in float32; what is not listed is taken for Adam's two moments
STATE_BYTES = {
    "adamw": 8.0, "adam": 8.0, "sgd": 0.0, "adafactor": 0.02, "lion": 4.0, "muon": 4.0,
    "adamw8bit": 2.1, "pagedadamw8bit": 0.2, "prodigy": 16.0,
}  # fmt: skip
# what is not listed steps as torch's AdamW on a card does: on all weights at once, with a number of each beside them
UPDATES = {
    "adafactor": Update(0.0, 4.0), "lion": Update(0.0, 4.0), "muon": Update(0.0, 10.0), "prodigy": Update(0.0, 8.0),
    "adamw8bit": Update(0.0), "pagedadamw8bit": Update(0.0),
}  # fmt: skip
COMPUTING = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}


def work_of_request(request: GenerationRequest, sizes: ModelSizes, *, computing: str = "bfloat16") -> Work:
    """What drawing `request` asks of the model."""
    said = sizes.defaults
    guided = request.guidance > 1 and said.get("guidance", True)
    pictures = (sizes_of_files(request.edit_images) or ((1, 1),)) if "reference_pixels" in said else ()
    prompts = [request.prompt, *([request.negative_prompt] if guided else [])]
    seen = [words.seen_each(sizes, pictures)] * len(prompts) if pictures else ()
    told = words.longest(words.told(sizes, prompts, seen=seen))
    return Work(
        width=request.width,
        height=request.height,
        frames=said.get("frames", 1) if sizes.geometry.get("video") else 1,
        steps=request.num_inference_steps,
        count=request.count,
        guidance=guided,
        reference_pictures=said.get("reference_pictures", 0) + said.get("layers", 0),
        from_picture=bool(request.input_image),
        lora_bytes=lora_bytes(request),
        computing=computing,
        decoder_dtype=computing,
        step_cache=request.step_cache > 0,
        compiled=request.compile,
        fp8_products=request.fp8_products,
        **{**_of_edited(sizes, said, pictures, 0), "text_tokens": told.given, "read_tokens": told.read},
    )


def _of_edited(sizes: ModelSizes, said: dict, pictures: tuple, words: int) -> dict:
    """Fields of `Work` that pictures of these sizes ask for where the model edits; one square picture stands for none."""
    if "reference_pixels" not in said:
        return {}
    pictures, pixels = pictures or ((1, 1),), said["reference_pixels"]
    family = by_name(sizes.family)
    seen = family.seen_tokens(pictures, said["seen_pixels"])
    return {
        "reference_pixels": max(width * height for width, height in family.reference_sizes(pictures, pixels)),
        "reference_tokens": family.reference_tokens(pictures, pixels),
        "seen_tokens": seen,
        "text_tokens": words + seen,
    }


def _brought_to(said: dict, pixels: int | None) -> dict:
    """`said` with pictures to edit brought to an area of `pixels`, where that is asked for."""
    if not pixels or "reference_pixels" not in said:
        return said
    apart = said["seen_pixels"] < said["reference_pixels"]  # the text encoder is shown them smaller
    return {**said, "reference_pixels": pixels, "seen_pixels": min(said["seen_pixels"], pixels) if apart else pixels}


def work_of_defaults(sizes: ModelSizes, **changes) -> Work:
    """A first picture as the model's makers draw it."""
    said = sizes.defaults
    values = {
        "width": said.get("width", 1024),
        "height": said.get("height", 1024),
        "frames": said.get("frames", 1),
        "steps": said.get("steps", 20),
        "guidance": said.get("guidance", False),
        "text_tokens": said.get("text_tokens", 128),
        "reference_pictures": said.get("reference_pictures", 0) + said.get("layers", 0),
    }
    return Work(**{**values, **_of_edited(sizes, said, (), values["text_tokens"]), **changes})


def work_of_training(config, sizes: ModelSizes) -> tuple[Work, Layout]:
    """What a step of `config` (a `TrainingConfig`) asks, and the arrangement that it names itself."""
    values = to_values(config)
    side = math.isqrt(values["max_pixels"])
    width, height = values.get("width") or side, values.get("height") or side
    cell = sizes.geometry["compression"] * sizes.geometry["patch"]
    full = listed(values.get("trainable_models"))
    base = values.get("lora_base_model") or ("" if full else "dit")
    part = sizes.parts.get(full[0] if full else base) or sizes.parts["dit"]
    targets, numel = (
        ("full", sum(sizes.parts[name].numel for name in full if name in sizes.parts))
        if full
        else lora_size(part, values["lora_target_modules"], values["lora_rank"], algorithm=values["lora_algorithm"])
    )
    computing, words = COMPUTING.get(values["mixed_precision"], "bfloat16"), sizes.defaults.get("text_tokens", 128)
    work = Work(
        width=max(width // cell, 1) * cell,
        height=max(height // cell, 1) * cell,
        frames=1,
        steps=values["sample_inference_steps"],
        guidance=values["sample_guidance"] > 1,
        **{
            "text_tokens": words,
            **_of_edited(sizes, _brought_to(sizes.defaults, values.get("edit_pixels")), (), words),
        },
        computing=computing,
        targets=targets,
        trained=full or (base,),
        method=method_of_values(values).word,
        algorithm=values["lora_algorithm"],
        rank=values["lora_rank"],
        trained_numel=numel,
        batch=values["batch_size"],
        accumulates=values["gradient_accumulation_steps"] > 1,
        samples=bool(values["sample_prompts"].strip()),
        sample_size=(values["sample_width"] or 0, values["sample_height"] or 0),
        caches=not {*full, base} & set(by_name(sizes.family).parts_of("text", sizes.variant) or ("text_encoder",)),
        keeps_encodings=values["data_cache"],
        keeps_states=values["keep_checkpoints"],
        decoder_dtype="float32",
        total_steps=values.get("max_steps") or 1000,
        idle_numel=min(
            numel,
            idle_numel(
                part,
                () if full else lora_targets(part, values["lora_target_modules"]),
                values["lora_rank"],
                algorithm=values["lora_algorithm"],
            ),
        ),
        saved_number_bytes=4 if values.get("save_dtype") == "float32" else 2,
        unknown_optimizer=bool(_optimizer(values)) and _optimizer(values) not in STATE_BYTES,
        averages=bool(values.get("ema_decay")),
        can=TRAINING_RUNGS & values.keys(),
    )
    return work, _own_layout(values, sizes)


def _optimizer(values: dict) -> str:
    """The optimizer as `STATE_BYTES` names it; "" where the settings name none."""
    return values["customized_optimizer"].strip().lower().rpartition(".")[2]


def _own_layout(values: dict, sizes: ModelSizes) -> Layout:
    offloads = bool(values.get("use_gradient_checkpointing_offload"))
    optimizer = _optimizer(values)
    state = STATE_BYTES.get(optimizer, 8.0)
    files = {name: part.files for name, part in sizes.parts.items()}
    kept = {name: _kept(values, name, files) for name in files}
    return Layout(
        parts={name: part for name, part in kept.items() if part != PartLayout(storage="", on_card=-1)},
        checkpointed=offloads or bool(values["use_gradient_checkpointing"]),
        checkpoints_in_ram=offloads,
        state_bytes=state + (4.0 if values.get("ema_decay") else 0.0),
        states_in_ram=bool(values.get("enable_optimizer_cpu_offload")),
        update=UPDATES.get(optimizer, Update()),
    )


def _kept(values: dict, name: str, files: Files) -> PartLayout:
    """How the config says that the part is kept: no storage and -1 blocks where it says nothing of that."""
    trained = [one.strip() for one in (values.get("trainable_models") or "").split(",")]
    away = (bool(values.get("enable_model_cpu_offload")) and name not in trained) or _is_named(
        name, values.get("offload_models"), files
    )
    stays = values.get("resident_blocks") if name == "dit" else 0
    return PartLayout(
        "streamed" if away else "resident",
        FP8 if _is_named(name, values.get("fp8_models"), files) else _rounding(values, name, files),
        "disk" if away and values.get("offload_device") == "disk" else "ram",
        -1 if stays is None or not away else stays,
    )


def _is_named(name: str, entries: str | None, files: Files) -> bool:
    return any(name in means(entry, files) for entry in listed(entries))


def _rounding(values: dict, name: str, files: Files) -> str:
    """METHOD[/LAYERS] of `--quant_options` for the part; "" where there is none that is known."""
    for entry in (values.get("quant_options") or "").split(";"):
        model, _, how = entry.strip().rpartition(":")
        if model and is_quantized(how) and name in means(model, files):
            return how
    return ""


def lora_size(part: PartSizes, wanted: str, rank: int, *, algorithm: str = "lora") -> tuple[str, int]:
    """(a traced set of modules that has all of them, how many numbers train) of a LoRA of `rank` on the modules that `wanted` names.

    As `lora_target_modules`: ends of names, a regular expression, "all-linear", the name of a set, or "" for those that are usual.
    """
    sets, chosen, layers = (
        published()["networks"].get(part.kind, {}).get("lora", {}),
        lora_targets(part, wanted),
        _layers(part),
    )
    numel = sum(numbers_of(algorithm, rank, rows, columns) * count for rows, columns, count in map(layers.get, chosen))
    holding = [name for name, inside in sets.items() if all(_targeted(one, "", inside) for one in chosen)]
    return min(holding, key=lambda name: len(sets[name]), default="all"), numel


def _layers(part: PartSizes) -> dict[str, tuple[int, int, int]]:
    """Every kind of linear layer: (rows, columns, how many)."""
    return part.linears | {name: (*size, 1) for name, size in part.outside.items()}


def lora_targets(part: PartSizes, wanted: str) -> list[str]:
    """The kinds of modules (names without the numbers of blocks) that `wanted` names."""
    ends, wanted = _ends_of(part, wanted), wanted.strip()
    if ends is None and wanted != "all-linear":
        return list(part.linears)  # a family without sets
    return [name for name in _layers(part) if ends is None or _targeted(name, wanted, ends)]


def _ends_of(part: PartSizes, wanted: str) -> list[str] | None:
    """The ends of names that `wanted` stands for; None for every layer."""
    facts, wanted = published()["networks"].get(part.kind, {}), wanted.strip()
    named = facts.get("means", {}).get(wanted, wanted)
    if named in ("", "all-linear"):
        return None
    return facts.get("lora", {}).get(named) or list(listed(named))


def unmatched(part: PartSizes, wanted: str) -> str | None:
    """What of `wanted` names no module; None where all of it does."""
    if is_pattern(wanted):
        return None if lora_targets(part, wanted) else wanted
    return next(
        (end for end in _ends_of(part, wanted) or () if not any(_targeted(name, "", [end]) for name in _layers(part))),
        None,
    )


def is_pattern(wanted: str) -> bool:
    """Whether the modules are named by a regular expression."""
    return re.search(r"[\\^$*+?()\[\]{}|]", wanted) is not None


def idle_numel(part: PartSizes, targets, rank: int, *, algorithm: str = "lora") -> int:
    """Numbers that train and never get a gradient: of the last block's modules whose results nothing reads. Without `targets` all train."""
    ends = published()["networks"].get(part.kind, {}).get("idle", ())
    idle = [name for name in targets or part.linears if _targeted(name, "", ends)]
    return sum(
        numbers_of(algorithm, rank, rows, columns) if targets else rows * (columns + 1)
        for rows, columns, _ in map(part.linears.get, idle)
    )


def _targeted(name: str, wanted: str, ends) -> bool:
    if any(ends_with(name, end) for end in ends):
        return True
    if not is_pattern(wanted):
        return False
    try:
        # a block's number was left out of `name`; the first block stands for all
        return re.fullmatch(wanted, re.sub(r"^([a-z_.]*?(?:blocks|layers|block))\.", r"\1.0.", name)) is not None
    except re.error:
        return False


def lora_bytes(request: GenerationRequest) -> int:
    """What its LoRAs take beside the weights; less where they are fused into them."""
    return sum(_file_bytes(use.path) for use in request.loras)


def _file_bytes(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
