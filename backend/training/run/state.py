"""The state of a run: config, model, optimizers, EMA and data loader, as `setup` assembles them for the training
loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator

from backend.planner.rules.resolve_training import ResolvedAdapter, ResolvedTraining
from backend.schema.training.config import TrainingConfig
from backend.training.checkpoint.async_writer import AsyncWriter
from backend.training.checkpoint.reporter import Reporter
from backend.training.encoding.peak_meter import PeakMeter
from backend.training.encoding.prepare import Source
from backend.training.model.base_model import BaseModel
from backend.training.model.training_module import TrainingModule
from backend.training.optim.cpu_offload import OptimizerCpuOffload
from backend.training.optim.optimizers import EMA


@dataclass
class Run:
    """Everything that the training loop works with. Only training changes it."""

    config: TrainingConfig
    folder: Path
    output: Path
    accelerator: Accelerator
    reporter: Reporter
    base: BaseModel
    source: Source
    validation_items: list[int]  # numbers of the items held out for the validation loss
    learner: TrainingModule
    model: torch.nn.Module  # the learner as accelerate wraps it
    optimizers: list[torch.optim.Optimizer]
    weights: dict[str, torch.nn.Parameter]
    resolved: ResolvedTraining  # what trains, and how each part is stored
    ema: EMA | None
    optimizer_offload: OptimizerCpuOffload | None
    vae: torch.nn.Module | None
    device: torch.device
    dtype: torch.dtype
    writer: AsyncWriter = field(default_factory=AsyncWriter)
    sample_fallback: bool = False  # one ran out of memory: sequential guidance and tiled decoding from then on
    peaks: PeakMeter = field(init=False)

    def __post_init__(self):
        self.peaks = PeakMeter(self)

    @property
    def adapter(self) -> ResolvedAdapter | None:
        return self.resolved.adapter

    @property
    def is_main_process(self) -> bool:
        return self.accelerator.is_main_process


def sum_over_processes(accelerator: Accelerator, value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes (all-reduce), of its shape and dtype."""
    total = accelerator.reduce(value, reduction="sum")
    assert isinstance(total, torch.Tensor)
    return total


def gather(accelerator: Accelerator, value) -> list:
    """All-gathers one picklable value from every process, in rank order."""
    if accelerator.num_processes == 1:
        return [value]
    values = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(values, value)
    return values
