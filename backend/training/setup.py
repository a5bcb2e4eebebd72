"""Set up a run: base model, data loader, cached encodings, adapter, optimizers, EMA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from backend.dataset.bucket_sampler import Batch
from backend.dataset.check_inputs import asks_edits, read_data
from backend.dataset.crops import losses
from backend.dataset.dataset import Dataset
from backend.dataset.extra_inputs import check_processes, check_steps
from backend.engine.lora.adapters import Adapters
from backend.engine.offload import placement
from backend.engine.quantization.config import QuantizeConfig
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.rules.check_training import check_training
from backend.planner.rules.resolve_training import ResolvedTraining
from backend.schema.training.config import TrainingConfig
from backend.training.checkpoint.reporter import Reporter
from backend.training.encoding import encoded_dataset
from backend.training.encoding.cache_key import encoder_key, folder_digest
from backend.training.encoding.conditioning import (
    add_samples,
    cache_text_encoder_outputs,
    encoders_of,
    is_editing,
    processor_of,
    sample_prompt_inputs,
)
from backend.training.encoding.distributed_encoding import EncodingContext
from backend.training.encoding.encoding_cache import key_of
from backend.training.encoding.prepare import free_memory, prepare_source, split_validation
from backend.training.encoding.sample_source import Source, prompt_name
from backend.training.model import fsdp
from backend.training.model.base_model import DTYPES, BaseModel, find_base_model, load_parts
from backend.training.model.frozen_weights import Kept, fp8_without_effect, keeping
from backend.training.model.peft_adapters import add_adapter, load_file_adapter
from backend.training.model.quantization import configs_of
from backend.training.model.tokenizers import processor_folder, tokenizer_folders
from backend.training.model.training_module import TrainingModule, may_use_cpu_attention, named_trainable
from backend.training.optim.cpu_offload import OptimizerCpuOffload
from backend.training.optim.optimizers import EMA, check_optimizer, make_optimizers
from backend.training.run.check_weights import check_weight_files
from backend.training.run.state import Run, gather


@dataclass
class PartLoader:
    """Loads parts when they are first asked for, each once."""

    base: BaseModel
    resolved: ResolvedTraining
    kept: Mapping[str, Kept]
    quantized: Mapping[str, QuantizeConfig]
    split_bytes: int | None
    dtype: torch.dtype
    device: torch.device
    through_ram: bool
    processors: dict[str, object]  # tokenizers by their names and, of a model that works from pictures, "processor"
    tokenizer_digests: tuple[str, ...] = ()
    preset: tuple[str, Path] | None = None  # a LoRA that is merged into the base, and into which part
    processor_digest: str = ""
    parts: dict[str, torch.nn.Module] = field(default_factory=dict)
    _part_keys: dict[str, str] = field(default_factory=dict)

    def __call__(
        self,
        names: Iterable[str],
        *,
        to_train: bool = False,
        before_rounding: Callable[[str, torch.nn.Module], None] | None = None,
    ) -> dict:
        missing = [name for name in names if name not in self.parts]

        def merge(name: str, module: torch.nn.Module) -> None:
            if name == self.encoder_preset:
                self.merge_preset(name, module)
            if before_rounding:
                before_rounding(name, module)

        made = load_parts(
            self.base,
            missing,
            trained=self.resolved.trained if to_train else (),
            dtype=self.dtype,
            device=self.device,
            kept=self.kept,
            quantized=self.quantized,
            before_rounding=merge,
            split_bytes=self.split_bytes,
            through_ram=self.through_ram,
            stay_in_ram=to_train and fsdp.asked(),
        )
        for name in made.keys() & {self.encoder_preset} - set(self.quantized):
            self.merge_preset(name, made[name])
        self.parts |= made
        return {**{name: self.parts[name] for name in names}, **self.processors}

    @property
    def encoder_preset(self) -> str | None:
        """The part that the preset LoRA is merged into whenever it is loaded; the denoiser's waits until pictures of
        the untouched one are drawn."""
        return self.preset[0] if self.preset and self.preset[0] != "dit" else None

    def merge_preset(self, part: str, module: torch.nn.Module) -> None:
        """Merges the preset LoRA into the base, so that a new one learns the difference; beside weights that are not
        kept in full."""
        adapters = Adapters({part: module}, family=self.base.family, specs={part: self.base.spec.parts[part]})
        assert self.preset is not None
        adapters.add(str(self.preset[1]), strength=1.0, hot=part in self.kept)

    def part_key(self, name: str) -> str:
        """A hash of everything of the part `name` that what it makes depends on, with the tokenizers of a text
        encoder."""
        if name not in self._part_keys:
            key = encoder_key(
                self.base,
                name,
                dtype=self.dtype,
                device=self.device,
                kept=self.kept.get(name),
                quantized=self.quantized.get(name),
                adapter=self.preset[1] if self.preset and name == self.encoder_preset else None,
            )
            reads = name in encoders_of(self.base)
            self._part_keys[name] = key_of(key, *self.tokenizer_digests) if reads else key
        return self._part_keys[name]

    def drop_all_but(self, names: Iterable[str]) -> None:
        """Lets parts go that are no longer needed; of those whose weights are moved about, nothing is on its way any
        more."""
        for name in set(self.parts) - set(names):
            placed = placement.of(self.parts.pop(name))
            if placed is not None:
                placed.close()
        free_memory()


def set_up(
    config: TrainingConfig,
    folder: Path,
    output: Path,
    accelerator: Accelerator,
    reporter: Reporter,
    *,
    index: Path,
    known: Dataset | None = None,
) -> Run:
    """Reads, loads, encodes and wraps; the run is then ready for its first step."""
    reporter.phase("loading")
    load = make_loader(config, accelerator, folder)
    source = make_source(config, load, accelerator, reporter, index=index, known=known)
    reporter.phase("loading", 1, 2)
    learner = make_training_module(config, load, source)
    if fsdp.asked():
        learner.autocasts = True
        fsdp.spread(learner, accelerator)
    weights = named_trainable(learner)
    optimizer_offload = OptimizerCpuOffload(weights) if config.memory.enable_optimizer_cpu_offload else None
    optimizers = make_optimizers(optimizer_offload.copies if optimizer_offload else weights, config.training)
    # A launcher that starts one process has it wrapped for several all the same.
    if accelerator.distributed_type != DistributedType.NO and not fsdp.asked():
        learner._ddp_params_and_buffers_to_ignore = _without_gradient(learner, source, config, accelerator)
    placing = [False] * (1 + len(optimizers))  # all are where they belong
    if fsdp.asked():
        model, optimizers = learner, [accelerator.prepare_optimizer(one, device_placement=False) for one in optimizers]
    else:
        model, *optimizers = accelerator.prepare(learner, *optimizers, device_placement=placing)
    return Run(
        config=config,
        folder=folder,
        output=output,
        accelerator=accelerator,
        reporter=reporter,
        base=load.base,
        source=source,
        validation_items=split_validation(source, config.samples.validation_split, seed=config.training.seed),
        learner=learner,
        model=model,
        optimizers=optimizers,
        weights=weights,
        ema=EMA(weights, config.training.ema_decay) if config.training.ema_decay else None,
        optimizer_offload=optimizer_offload,
        vae=load(["vae"])["vae"] if config.samples.sample_prompts.strip() else None,
        resolved=load.resolved,
        device=load.device,
        dtype=load.dtype,
    )


def make_loader(config, accelerator, folder: Path) -> PartLoader:
    """Finds the base and decides how its parts are kept. Raises Trouble for whatever the run in `folder` could not be
    carried out with."""
    with accelerator.main_process_first():  # one downloads what is missing, the others find it
        base = find_base_model(config.model)
    check_processes(config)
    device, dtype = accelerator.device, DTYPES[config.training.mixed_precision]
    resolved = check_training(
        config,
        sizes_of(base.spec),
        base.family,
        spec=base.spec,
        known=tuple(filter(None, base.entries.values())),
        device=device.type,
    )
    check_optimizer(config.training, config.parts_that_train)
    check_weight_files(config, resolved, base, folder)
    quantized = configs_of(resolved.parts)
    kept = keeping(resolved.parts, device=device, dtype=dtype)
    fsdp.check(config, kept=kept, quantized=quantized)
    split = config.memory.cpu_offload_split_threshold
    words, digest = tokenizer_folders(config.model, base), ""
    processors = {name: base.family.load_tokenizer(folder, name) for name, folder in words.items()}
    if is_editing(base):
        looks = processor_folder(config.model, base)
        processors["processor"], digest = processor_of(looks, base, pixels=config.dataset.edit_pixels)
    return PartLoader(
        base=base,
        resolved=resolved,
        kept=kept,
        quantized=quantized,
        split_bytes=None if split is None else split * 2**20,
        dtype=dtype,
        device=device,
        through_ram=config.model.initialize_model_on_cpu,
        processors=processors,
        tokenizer_digests=tuple(map(folder_digest, words.values())),
        preset=(config.preset_part, Path(config.lora.preset_lora_path)) if config.preset_part else None,
        processor_digest=digest,
    )


def make_source(
    config: TrainingConfig,
    load: PartLoader,
    accelerator: Accelerator,
    reporter: Reporter,
    *,
    index: Path,
    known: Dataset | None = None,
    into: Path | None = None,
) -> Source:
    """What is trained on, encoded. `known`: the dataset as `early.look` has read it. `into`: encodings go to that
    folder, for a later run."""
    reporter.phase("caching")
    if unused := fp8_without_effect(load.resolved.parts, device=load.device):
        reporter.note(unused)
    encoders = encoders_of(load.base)
    trains_text = bool({*load.resolved.trains} & set(encoders))
    context = _encoding_context(accelerator, reporter, load, trains_text=trains_text)
    if config.training.task.endswith(":train"):
        source = encoded_dataset.read(Path(config.dataset.dataset_base_path), load.base, config)
        source.processor = load.processor_digest
        add_samples(source, load.base, load, context)
        unknown = [
            one
            for one in sample_prompt_inputs(source)
            if source.texts is not None and prompt_name(*one) not in source.texts
        ]
        if unknown:
            cache_text_encoder_outputs(source, load.base, load, context, unknown)
        return source
    edits = is_editing(load.base)
    data = (
        known
        if known is not None and edits == asks_edits(config.dataset)
        else read_data(config, index=index, edits=edits)
    )
    for note in data.notes:
        reporter.note(note)
    check_steps((item.steps for item in data.items), config.training.batch_size)
    source = prepare_source(data, load.base, config, load, context, folder=into, processor=load.processor_digest)
    fixed = config.dataset.height and config.dataset.width
    for note in losses(source.items, source.sizes, snapped=config.training.batch_size > 1 and not fixed):
        reporter.note(note)
    return source


def make_training_module(config: TrainingConfig, load: PartLoader, source: Source) -> TrainingModule:
    """The module that trains, with its adapter; encoders that are no longer needed are dropped first."""
    source.trained = load.resolved.trains
    needed = _needed(load, source)
    merging = load.preset[0] if load.preset and load.preset[0] == "dit" else None
    rounded = {merging} & set(load.quantized)  # a LoRA is merged into full weights, before they are rounded
    load.drop_all_but(set(needed) - set(load.resolved.trained) - rounded)

    def merge(name: str, module: torch.nn.Module) -> None:
        if name == merging:
            load.merge_preset(name, module)

    parts = {
        name: module
        for name, module in load(needed, to_train=True, before_rounding=merge if rounded else None).items()
        if name in needed
    }
    _use_cpu_attention(load.base, parts, source)
    if merging and not rounded:
        merge(merging, parts[merging])
    learner = TrainingModule(load.base.family, parts, processors=load.processors, dtype=load.dtype)
    _make_trainable(learner, config, load.resolved)
    memory = config.memory
    if memory.use_gradient_checkpointing or memory.use_gradient_checkpointing_offload:
        from backend.training.model.activation_checkpointing import enable_activation_checkpointing

        for module in parts.values():
            enable_activation_checkpointing(module, offload=memory.use_gradient_checkpointing_offload)
    torch.manual_seed(config.training.seed)
    return learner


def _needed(load: PartLoader, source: Source) -> list[str]:
    """The parts of a step: the network that trains, or that the gradient comes through, and text encoders where prompts
    are not encoded yet."""
    networks = load.base.family.parts_of("denoise", load.base.spec.variant)
    trains = [name for name in networks if name in load.resolved.trains]
    encoders = [] if source.texts is not None else encoders_of(load.base, pictures=bool(source.references))
    return [*(trains[:1] or networks[:1]), *encoders]


def _use_cpu_attention(base: BaseModel, parts: dict[str, torch.nn.Module], source: Source) -> bool:
    """Gives the transformer the family's attention for CPUs where that pays: for short sequences; whether it did."""
    family, tokens = base.family, max(map(source.pixels, range(len(source.items))))
    tokens //= family.sizes(base.spec.variant).pixels_per_token
    module = next(parts[name] for name in family.parts_of("denoise", base.spec.variant) if name in parts)
    return may_use_cpu_attention(family, module, tokens=tokens) and family.use_cpu_attention(module)


def _encoding_context(accelerator, reporter: Reporter, load: PartLoader, *, trains_text: bool) -> EncodingContext:
    return EncodingContext(
        trains_text=trains_text,
        dtype=load.dtype,
        rank=accelerator.process_index,
        processes=accelerator.num_processes,
        wait=accelerator.wait_for_everyone,
        gather=lambda value: gather(accelerator, value),
        progress=lambda done, total: reporter.event("phase", name="caching", done=done, total=total),
        note=reporter.note,
        part_key=load.part_key,
    )


def _make_trainable(learner: TrainingModule, config: TrainingConfig, resolved: ResolvedTraining) -> None:
    """Freezes everything but what trains; adds the adapter, and begins it from a file where one is named."""
    learner.requires_grad_(False)
    adapter = resolved.adapter
    if adapter:
        torch.manual_seed(config.training.seed)
        add_adapter(learner.parts[adapter.part], adapter)
        if config.lora.lora_checkpoint:
            load_file_adapter(adapter, named_trainable(learner), Path(config.lora.lora_checkpoint))
    for name in resolved.trained:
        learner.parts[name].requires_grad_(True)
    if adapter:
        from backend.engine.lora.low_memory_linear import computes_alone

        learner.adapters_cast = computes_alone(learner.parts[learner.part])
    for name, module in learner.parts.items():
        module.train(name in resolved.trains)


def _without_gradient(learner: TrainingModule, source: Source, config, accelerator) -> list[str]:
    """Frozen weights, and those that train but take no part in the loss (the last block's text half), by one backward
    pass.

    Processes that wait for each other's gradients must know the latter, and looking for them at every step costs more;
    the former are the same everywhere and need not be sent."""
    state = torch.get_rng_state()
    with accelerator.autocast():
        inputs = source.load_batch(Batch(items=(0,), places=(0,)), scale=1.0)
        learner(inputs.to(accelerator.device), config.loss)[0].backward()
    names = [name for name, weight in learner.named_parameters() if not weight.requires_grad or weight.grad is None]
    names += [name for name, _ in learner.named_buffers()]
    learner.zero_grad(set_to_none=True)
    torch.set_rng_state(state)
    return names
