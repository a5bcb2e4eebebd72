"""The parts of a pipeline whose weights are moved about: placed when they are loaded, and placed anew where memory ran
out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from backend.engine.pipeline import part_loading
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble


def is_placed(pipeline, name: str) -> bool:
    """Whether the weights of the part are moved about, or are to be."""
    managed = pipeline.configs.get(name, VramConfig()).managed
    if part_loading.is_fixed(pipeline, name):
        return False
    return managed or (pipeline.limit_bytes is not None and name not in pipeline.packed)


def place(pipeline, name: str, module: torch.nn.Module, tell: Callable[[int, int], None] | None = None) -> None:
    """Puts the weights of `module`, the part `name`, where the pipeline's settings say. LoRAs that acted on it act
    beside them afterwards."""
    from backend.engine.offload import placement

    config = with_defaults(pipeline.configs.get(name, VramConfig()), pipeline.dtype, pipeline.device)
    found = placement.place(
        module,
        pipeline.spec.parts[name],
        config,
        vram_limit_bytes=pipeline.limit_bytes,
        device=pipeline.device,
        on_bytes=tell,
        resident=pipeline.resident_blocks.get(name),
        stays_packed=pipeline.packed.get(name),
    )
    if name in pipeline.adapters.modules:  # its weights were read anew
        try:
            pipeline.adapters.unfuse_part(name)
        except BaseException:
            found.close()
            raise
    pipeline.placements[name] = found
    # as scripts for DiffSynth-Studio ask; not through nn.Module's setattr, which is for tensors and modules
    module.__dict__["vram_management_enabled"] = True
    module.load_state_dict = _refuse_state


def _refuse_state(*_, **__):
    """Raises Trouble: what was assigned would be read from the file again when the weights move."""
    raise Trouble(
        "not_supported",
        "load_state_dict cannot change this part, whose weights are moved between devices and read from their files.",
        hint="Give the file when the part is loaded: ModelConfig(path=...); or load without vram_limit and the eight fields of placement.",
    )


def rearrange(pipeline, name: str, config: VramConfig, resident: tuple[int, ...] | None) -> None:
    """Places the weights of a part as `config` says from now on, with the blocks `resident` staying. Where memory runs
    out in this, it is done when the part is used."""
    old = pipeline.placements.pop(name, None)
    if old is not None:
        old.close()
    pipeline.configs[name] = config
    pipeline.resident_blocks.pop(name, None)
    if resident is not None:
        pipeline.resident_blocks[name] = resident
    pipeline.lower.moved.add(name)
    if name in pipeline.parts:
        place(pipeline, name, pipeline.parts[name])


def with_defaults(config: VramConfig, dtype: torch.dtype, device: torch.device) -> VramConfig:
    """`config` with what was left open: it computes in `dtype` on `device`."""
    return replace(
        config,
        computation_dtype=config.computation_dtype or str(dtype).removeprefix("torch."),
        computation_device=config.computation_device or str(device),
    )
