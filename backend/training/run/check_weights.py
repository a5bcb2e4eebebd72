"""Check LoRA and checkpoint files against networks on the meta device, before anything is loaded or encoded."""

from __future__ import annotations

from pathlib import Path

import torch

from backend.catalog.formats.read import read_header
from backend.engine.loading.load import build_meta
from backend.engine.lora.adapters import Adapters
from backend.planner.rules.resolve_training import ResolvedAdapter, ResolvedTraining
from backend.schema.training.config import TrainingConfig
from backend.training.checkpoint.state import list_states
from backend.training.model.base_model import BaseModel
from backend.training.model.peft_adapters import add_adapter, load_file_adapter
from backend.training.run.resume import check_result, check_state


def check_weight_files(config: TrainingConfig, resolved: ResolvedTraining, base: BaseModel, folder: Path) -> None:
    """Raises Trouble for a preset LoRA, a LoRA to begin from, and a state or result to go on from that are not of this
    model or these settings. `folder`: the run's own, whose newest state "latest" is."""
    lora, resume = config.lora, _resumed(config.output.resume_from_checkpoint, folder)
    if lora.preset_lora_path:
        part = config.preset_part
        if part in base.spec.parts:
            network = {part: build_meta(base.spec.parts[part])}
            Adapters(network, family=base.family, specs={part: base.spec.parts[part]}).check(lora.preset_lora_path)
    if not (lora.lora_checkpoint or resume) or config.training.task.endswith(":data_process"):
        return
    adapter, weights = _what_trains(resolved, base)
    if lora.lora_checkpoint and adapter:
        load_file_adapter(adapter, weights, Path(lora.lora_checkpoint))
    if resume is None:
        return
    if resume.suffix != ".safetensors":
        check_state(_shapes(resume / "weights.safetensors"), weights)
    elif adapter is not None:
        load_file_adapter(adapter, weights, resume, flag="resume_from_checkpoint")
    else:
        check_result(resume.name, _shapes(resume), weights, prefix=config.output.remove_prefix_in_ckpt)


def _resumed(wanted: str | None, folder: Path) -> Path | None:
    """The state's folder or the result's file that is gone on from. A damaged state is told of when it is read."""
    if not wanted:
        return None
    if wanted == "latest":
        states = list_states(folder)
        path = states[-1] if states else None
    else:
        path = Path(wanted)
    if path is None or path.suffix == ".safetensors" or (path / "weights.safetensors").is_file():
        return path
    return None


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: at.shape for name, at in read_header(path).tensors.items()}


def _what_trains(
    resolved: ResolvedTraining, base: BaseModel
) -> tuple[ResolvedAdapter | None, dict[str, torch.nn.Parameter]]:
    """The adapter, if there is one, and `part.parameter` -> what trains, on the meta device."""
    weights, adapter = {}, resolved.adapter
    for name in resolved.trained:
        weights |= {f"{name}.{inner}": weight for inner, weight in build_meta(base.spec.parts[name]).named_parameters()}
    if adapter:
        module = build_meta(base.spec.parts[adapter.part])
        add_adapter(module, adapter)
        trains = ((name, weight) for name, weight in module.named_parameters() if weight.requires_grad)
        weights |= {f"{adapter.part}.{name}": weight for name, weight in trains}
    return adapter, weights
