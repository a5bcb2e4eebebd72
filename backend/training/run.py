"""A run put together: base, data, adapter, optimizers; what its files hold; and what is saved and restored of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from backend import __version__
from backend.schema.knobs import to_values
from backend.schema.messages import Trouble
from backend.training.adapters import Adapter, adapter_state, add_adapter, load_adapter
from backend.training.attention import plain_on_cpu
from backend.training.base import DTYPES, Base, find_base, load_parts, part_digest, tokenizer_folder
from backend.training.batches import Batch
from backend.training.captions import lines_of
from backend.training.dataset import Dataset, read_dataset, read_folder
from backend.training.learner import Learner, named_trainable
from backend.training.material import Source, Wishes, free_memory, prepare_source, split_off
from backend.training.optimizers import Mean, make_optimizers
from backend.training.reporter import Reporter

SAVE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class Run:
    """Everything that the loop needs, made once."""

    config: object
    folder: Path
    output: Path
    accelerator: object
    reporter: Reporter
    base: Base
    source: Source
    aside: list[int]  # items kept for validation
    learner: Learner
    model: torch.nn.Module  # the learner as accelerate wraps it
    optimizers: list
    weights: dict[str, torch.nn.Parameter]
    adapter: Adapter | None
    mean: Mean | None
    vae: torch.nn.Module | None
    trained: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype

    @property
    def first(self) -> bool:
        return self.accelerator.is_main_process


def trained_parts(config) -> tuple[str, ...]:
    """Parts whose own weights train."""
    return tuple(part.strip() for part in (config.training.trainable_models or "").split(",") if part.strip())


def lora_part(config) -> str | None:
    """The part that gets an adapter: the one named, or dit where nothing is named at all."""
    return config.lora.lora_base_model or (None if trained_parts(config) else "dit")


def read_data(config, *, index: Path | None) -> Dataset:
    data = read_dataset(config.dataset, trigger=config.dataset.trigger_word, index=index)
    if config.prior.regularisation_path:
        prior = read_folder(Path(config.prior.regularisation_path), prior=True)
        data = Dataset(items=(*data.items, *prior.items), notes=(*data.notes, *prior.notes), broken=data.broken)
    return data


def set_up(config, folder: Path, output: Path, accelerator, reporter: Reporter, *, index: Path | None) -> Run:
    """Reads, loads, encodes and wraps; the run is then ready for its first step."""
    reporter.phase("loading")
    device, dtype = accelerator.device, _dtype(config, accelerator.device)
    base = find_base(config.model)
    trained, part = trained_parts(config), lora_part(config)
    _check_parts(base, (*trained, *([part] if part else [])))
    data = read_data(config, index=index)
    for note in data.notes:
        reporter.note(note)
    loaded: dict[str, torch.nn.Module] = {}
    tokenizer = base.family.load_tokenizer(_tokenizer(config, base))

    def load(names: list[str], trained: tuple[str, ...] = ()) -> dict:
        missing = [name for name in names if name not in loaded]
        loaded.update(load_parts(base, missing, trained=trained, dtype=dtype, device=device))
        return {**{name: loaded[name] for name in names}, "tokenizer": tokenizer}

    reporter.phase("caching")
    trains_text = "text_encoder" in trained or part == "text_encoder"
    samples = lines_of(config.samples.sample_prompts)
    wishes = _wishes(accelerator, reporter, trains_text=trains_text, dtype=dtype)
    source = prepare_source(data, base, config, load, wishes, more_prompts=samples)
    reporter.phase("loading", 1, 2)
    needed = ["dit"] if source.texts is not None else ["dit", "text_encoder"]
    for name in set(loaded) - (set(needed) - set(trained)):
        del loaded[name]
    free_memory()
    load(needed, trained)
    plain_on_cpu(loaded["dit"], tokens=max(height * width for height, width in source.sizes) // 256)
    learner = Learner(base.family, {name: loaded[name] for name in needed}, tokenizer=tokenizer, dtype=dtype)
    adapter = _make_trainable(learner, config, base, trained, part)
    torch.manual_seed(config.training.seed)
    weights = named_trainable(learner)
    optimizers = make_optimizers(weights, config.training)
    _checkpointing(learner, config.memory)
    if accelerator.num_processes > 1:
        learner._ddp_params_and_buffers_to_ignore = _without_gradient(learner, source, config, accelerator)
    model, *optimizers = accelerator.prepare(learner, *optimizers)
    return Run(
        config=config, folder=folder, output=output, accelerator=accelerator, reporter=reporter, base=base, source=source,
        aside=split_off(source, config.samples.validation_split, seed=config.training.seed), learner=learner, model=model,
        optimizers=optimizers, weights=weights, adapter=adapter,
        mean=Mean(weights, config.training.ema_decay) if config.training.ema_decay else None,
        vae=load(["vae"])["vae"] if samples else None, trained=trained, device=device, dtype=dtype,
    )  # fmt: skip


def _dtype(config, device: torch.device) -> torch.dtype:
    if config.training.mixed_precision == "fp16" and device.type == "cpu":
        raise Trouble("bad_value", "Mixed precision fp16 does not train on a CPU.", hint="Use bf16 or no.")
    return DTYPES[config.training.mixed_precision]


def _tokenizer(config, base: Base) -> Path:
    folder = tokenizer_folder(config.model, base)
    if folder is None or not folder.is_dir():
        raise Trouble(
            "missing_file",
            f"The tokenizer of {base.spec.title} was not found ({folder}).",
            hint="Set --tokenizer_path.",
        )
    return folder


def _check_parts(base: Base, names: tuple[str, ...]) -> None:
    for name in names:
        if name not in ("dit", "text_encoder"):
            raise Trouble("bad_value", f"The part {name!r} cannot be trained here.", hint="Use dit or text_encoder.")
        if name not in base.spec.parts:
            raise Trouble("missing_part", f"{base.spec.title} has no {name} among the files given.")


def _wishes(accelerator, reporter: Reporter, *, trains_text: bool, dtype: torch.dtype) -> Wishes:
    return Wishes(
        trains_text=trains_text, dtype=dtype, rank=accelerator.process_index, processes=accelerator.num_processes,
        wait=accelerator.wait_for_everyone, gather=lambda value: gather(accelerator, value),
        progress=lambda done, total: reporter.event("phase", name="caching", done=done, total=total),
    )  # fmt: skip


def gather(accelerator, value) -> list:
    """One value of every process, in the order of their ranks."""
    if accelerator.num_processes == 1:
        return [value]
    values = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(values, value)
    return values


def _make_trainable(learner: Learner, config, base: Base, trained: tuple[str, ...], part: str | None) -> Adapter | None:
    learner.requires_grad_(False)
    adapter = None
    if part:
        if part in trained:
            raise Trouble("bad_value", f"The part {part} cannot both train whole and get a LoRA.", hint="Choose one.")
        torch.manual_seed(config.training.seed)
        adapter = add_adapter(learner.parts[part], config.lora, base.family, part=part)
        if config.lora.lora_checkpoint:
            _begin_from(learner, adapter, Path(config.lora.lora_checkpoint))
    for name in trained:
        learner.parts[name].requires_grad_(True)
    for name, module in learner.parts.items():
        module.train(name in trained or name == part)
    return adapter


def _without_gradient(learner: Learner, source: Source, config, accelerator) -> list[str]:
    """Weights that train but take no part in the loss (the last block's text half is one), found by one backward pass.

    Processes that wait for each other's gradients must know them; looking for them at every step costs more.
    """
    state = torch.get_rng_state()
    with accelerator.autocast():
        material = source.material(Batch(items=(0,), places=(0,)), scale=1.0)
        learner(material.to(accelerator.device), config.loss)[0].backward()
    names = [name for name, weight in learner.named_parameters() if weight.requires_grad and weight.grad is None]
    learner.zero_grad(set_to_none=True)
    torch.set_rng_state(state)
    return names


def _begin_from(learner: Learner, adapter: Adapter, path: Path) -> None:
    from safetensors.torch import load_file

    if not path.is_file():
        raise Trouble("missing_file", f"There is no LoRA file {path} (--lora_checkpoint).")
    load_adapter(adapter, named_trainable(learner), load_file(path))


def _checkpointing(learner: Learner, memory) -> None:
    if not (memory.use_gradient_checkpointing or memory.use_gradient_checkpointing_offload):
        return
    from backend.training.offload import turn_on

    for module in learner.parts.values():
        turn_on(module, offload=memory.use_gradient_checkpointing_offload)


def result_tensors(run: Run) -> dict[str, torch.Tensor]:
    """What is saved as a result: the adapter, or the parts that trained under `pipe.<part>.` without the prefix to cut."""
    dtype = SAVE_DTYPES[run.config.output.save_dtype]
    adapted = run.adapter.part if run.adapter else None
    state = {}
    if run.adapter:
        own = {name: weight for name, weight in run.weights.items() if name.startswith(f"{adapted}.")}
        state.update(adapter_state(run.adapter, own, dtype=dtype))
    for part in run.trained:
        for name, tensor in run.learner.parts[part].state_dict().items():
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            state[f"pipe.{part}.{name}"] = tensor.detach().to(device="cpu", dtype=kind).contiguous()
    prefix = run.config.output.remove_prefix_in_ckpt
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def result_metadata(run: Run, *, step: int, epoch: int) -> dict[str, str]:
    """Where a result comes from, in the header of its file; text only, without paths of this machine."""
    config, defaults = to_values(run.config), to_values(type(run.config)())
    changed = {name: value for name, value in config.items() if value != defaults[name]}
    metadata = {
        "format": "pt",
        "software": f"Loft {__version__}",
        "family": run.base.spec.family,
        "base": _model_name(run.config.model),
        "base_hash": part_digest(run.base, "dit" if "dit" in run.base.spec.parts else next(iter(run.base.spec.parts))),
        "name": run.config.output.name,
        "trigger": run.config.dataset.trigger_word,
        "steps": str(step),
        "epochs": str(epoch),
        "pictures": str(sum(not item.prior for item in run.source.items)),
        "config": json.dumps(
            {name: value for name, value in changed.items() if not _is_private(name)}, ensure_ascii=False
        ),
    }
    if run.adapter:
        alpha = {round(value, 6) for value in run.adapter.alphas.values()}
        metadata |= {
            "algorithm": run.adapter.algorithm,
            "part": run.adapter.part,
            "rank": str(run.adapter.rank),
            "alpha": str(max(alpha)),
            "targets": ",".join(sorted({_kind(name) for name in run.adapter.modules})),
        }
    return metadata


def _kind(module: str) -> str:
    pieces = module.split(".")
    last = max((place for place, piece in enumerate(pieces[:-1]) if piece.isdigit() and place < 2), default=-1)
    return ".".join(pieces[last + 1 :])


def _is_private(name: str) -> bool:
    return name.endswith(("_path", "_paths", "_project")) or name in (
        "prior_prompts",
        "lora_checkpoint",
        "resume_from_checkpoint",
    )


def _model_name(section) -> str:
    if section.model_id_with_origin_paths:
        return section.model_id_with_origin_paths.partition(":")[0]
    if section.model_paths:
        return Path(
            json.loads(section.model_paths)[0] if isinstance(json.loads(section.model_paths)[0], str) else "model"
        ).stem
    return Path(section.model).name if Path(section.model).exists() else section.model
