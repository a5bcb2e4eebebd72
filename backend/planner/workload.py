"""A request or a training config as the numbers that bytes and seconds depend on."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from backend.catalog.family import takes_negative
from backend.families import by_name
from backend.images.picture_sizes import sizes_of_files
from backend.planner.costs import prompt_length as words
from backend.planner.costs.layout import Layout, PartLayout, Work
from backend.planner.costs.model_sizes import ModelSizes, PartSizes, published
from backend.planner.costs.optimizers import OPTIMIZERS, is_unknown, optimizer_of
from backend.planner.costs.training_method import method_of_config, numbers_of
from backend.planner.rules.resolve_training import (
    PartStorage,
    ResolvedAdapter,
    ResolvedTraining,
    layers_of,
    resolve,
)
from backend.schema.request import GenerationRequest
from backend.schema.training.config import TrainingConfig
from backend.system.text_files import ends_with

COMPUTING = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}


def work_of_request(request: GenerationRequest, sizes: ModelSizes, *, computing: str = "bfloat16") -> Work:
    """What drawing `request` asks of the model."""
    said = sizes.defaults
    guided = said.get("guidance", True) and takes_negative(by_name(sizes.family), sizes.variant, request.guidance)
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
    """Fields of `Work` that pictures of these sizes ask for where the model edits; one square picture stands for
    none."""
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


def work_of_training(config: TrainingConfig, sizes: ModelSizes) -> tuple[Work, Layout]:
    """What a step of `config` asks, and the arrangement that it names itself."""
    resolved, samples = resolve(config, sizes), config.samples
    side = math.isqrt(config.dataset.max_pixels)
    width, height = config.dataset.width or side, config.dataset.height or side
    cell = sizes.geometry["compression"] * sizes.geometry["patch"]
    trained, adapter = resolved.trained, resolved.adapter
    first = trained[0] if trained else config.adapter_part or "dit"
    part = sizes.parts.get(first) or sizes.parts["dit"]
    chosen = () if trained or adapter is None else kinds_in(tuple(part.depths), adapter.modules)
    numel = sum(sizes.parts[name].numel for name in trained if name in sizes.parts)
    numel += adapter_numel(sizes.parts[adapter.part], adapter) if adapter else 0
    words = sizes.defaults.get("text_tokens", 128)
    encoders = by_name(sizes.family).parts_of("text", sizes.variant) or ("text_encoder",)
    work = Work(
        width=max(width // cell, 1) * cell,
        height=max(height // cell, 1) * cell,
        frames=1,
        steps=samples.sample_inference_steps,
        guidance=takes_negative(by_name(sizes.family), sizes.variant, samples.sample_guidance),
        **{
            "text_tokens": words,
            **_of_edited(sizes, _brought_to(sizes.defaults, config.dataset.edit_pixels), (), words),
        },
        computing=COMPUTING.get(config.training.mixed_precision, "bfloat16"),
        targets="full" if trained else traced_set(part, chosen),
        trained=config.parts_that_train,
        method=method_of_config(config).word,
        algorithm=config.lora.lora_algorithm,
        rank=config.lora.lora_rank,
        trained_numel=numel,
        batch=config.training.batch_size,
        accumulates=config.training.gradient_accumulation_steps > 1,
        samples=bool(samples.sample_prompts.strip()),
        sample_size=(samples.sample_width or 0, samples.sample_height or 0),
        caches=not {*encoders} & {*config.parts_that_train},
        keeps_encodings=config.dataset.data_cache,
        keeps_states=config.output.keep_checkpoints,
        decoder_dtype="float32",
        total_steps=config.training.max_steps or 1000,
        idle_numel=min(
            numel, idle_numel(part, chosen, adapter.rank if adapter else 0, algorithm=config.lora.lora_algorithm)
        ),
        saved_number_bytes=4 if config.output.save_dtype == "float32" else 2,
        unknown_optimizer=is_unknown(config.training.customized_optimizer),
        averages=bool(config.training.ema_decay),
    )
    return work, _own_layout(config, resolved)


def _own_layout(config: TrainingConfig, resolved: ResolvedTraining) -> Layout:
    memory, found = config.memory, optimizer_of(config.training.customized_optimizer)
    row = found or OPTIMIZERS["adamw"]
    kept = {name: _part_layout(part) for name, part in resolved.parts.items()}
    return Layout(
        parts={name: part for name, part in kept.items() if part != PartLayout(storage="", on_card=-1)},
        checkpointed=memory.use_gradient_checkpointing_offload or memory.use_gradient_checkpointing,
        checkpoints_in_ram=memory.use_gradient_checkpointing_offload,
        state_bytes=row.state_bytes + (4.0 if config.training.ema_decay else 0.0),
        states_in_ram=memory.enable_optimizer_cpu_offload,
        update=row.update,
    )


def _part_layout(kept: PartStorage) -> PartLayout:
    """How the config says that a part is kept: no storage and -1 blocks where it says nothing of that."""
    stays = kept.resident_blocks
    return PartLayout(
        "streamed" if kept.offloaded else "resident",
        kept.storage,
        kept.offload_device,
        -1 if stays is None or not kept.offloaded else stays,
    )


@lru_cache(maxsize=256)
def _numel(part: PartSizes, modules: tuple[str, ...], algorithm: str, rank: int) -> int:
    layers = layers_of(part)
    shapes = Counter(layers[name] for name in modules if name in layers)
    return sum(numbers_of(algorithm, rank, *shape) * count for shape, count in shapes.items())


def adapter_numel(part: PartSizes, adapter: ResolvedAdapter) -> int:
    """How many numbers train of an adapter on `part`."""
    by_rank: dict[int, list[str]] = {}
    if not adapter.ranks:
        return _numel(part, adapter.modules, adapter.algorithm, adapter.rank)
    for name in adapter.modules:
        by_rank.setdefault(adapter.rank_of(name), []).append(name)
    return sum(_numel(part, tuple(names), adapter.algorithm, rank) for rank, names in by_rank.items())


@lru_cache(maxsize=256)
def kinds_in(homes: tuple[str, ...], modules: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of modules (names without the numbers of blocks) among the full names `modules`, as `PartSizes.linears`
    has them. `homes`: the module lists that hold blocks."""

    def kind(name: str) -> str:
        home = next((home for home in homes if re.match(rf"{re.escape(home)}\.\d+\.", name)), None)
        return name if home is None else f"{home}.{name.removeprefix(f'{home}.').partition('.')[2]}"

    return tuple(dict.fromkeys(map(kind, modules)))


def traced_set(part: PartSizes, chosen: Sequence[str]) -> str:
    """The least set of modules that was traced and has all of the kinds `chosen`; "all" where none has."""
    sets = published()["networks"].get(part.kind, {}).get("lora", {})
    holding = [name for name, inside in sets.items() if all(_ends_in(one, inside) for one in chosen)]
    return min(holding, key=lambda name: len(sets[name]), default="all")


def idle_numel(part: PartSizes, chosen: Sequence[str], rank: int, *, algorithm: str = "lora") -> int:
    """Numbers that train and never get a gradient: of the last block's modules whose results nothing reads. `chosen`:
    kinds that get an adapter; without them all weights train."""
    ends = published()["networks"].get(part.kind, {}).get("idle", ())
    idle = [name for name in chosen or part.linears if _ends_in(name, ends)]
    return sum(
        numbers_of(algorithm, rank, rows, columns) if chosen else rows * (columns + 1)
        for rows, columns, _ in (part.linears[name] for name in idle)
    )


def _ends_in(name: str, ends: Iterable[str]) -> bool:
    return any(ends_with(name, end) for end in ends)


def lora_bytes(request: GenerationRequest) -> int:
    """What its LoRAs take beside the weights; less where they are fused into them."""
    return sum(_file_bytes(use.path) for use in request.loras)


def _file_bytes(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
