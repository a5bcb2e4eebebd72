"""A run as the loop sees it: made once by `setup`, changed only by training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from backend.planner.rules.resolve_training import ResolvedAdapter, ResolvedTraining
from backend.schema.training.config import TrainingConfig
from backend.training.checkpoint.async_writer import Writer
from backend.training.checkpoint.reporter import Reporter
from backend.training.encoding.peak_meter import Peaks
from backend.training.encoding.prepare import Source
from backend.training.model.base_model import Base
from backend.training.model.training_module import Learner
from backend.training.optim.cpu_offload import Beside
from backend.training.optim.optimizers import Mean


@dataclass
class Run:
    """Everything that the loop needs, made once."""

    config: TrainingConfig
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
    resolved: ResolvedTraining  # what trains, and how each part is stored
    mean: Mean | None
    beside: Beside | None  # where the optimizer works in RAM
    vae: torch.nn.Module | None
    device: torch.device
    dtype: torch.dtype
    writer: Writer = field(default_factory=Writer)
    samples_lower: bool = False  # memory ran out in one, so they are drawn with less
    peaks: Peaks = field(init=False)

    def __post_init__(self):
        self.peaks = Peaks(self)

    @property
    def adapter(self) -> ResolvedAdapter | None:
        return self.resolved.adapter

    @property
    def first(self) -> bool:
        return self.accelerator.is_main_process


def gather(accelerator, value) -> list:
    """One value of every process, in the order of their ranks."""
    if accelerator.num_processes == 1:
        return [value]
    values = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(values, value)
    return values
