"""What a rule of the rule book looks at."""

from __future__ import annotations

from dataclasses import dataclass

from backend.catalog.family import Family
from backend.catalog.spec import ModelSpec
from backend.planner.costs.model_sizes import ModelSizes
from backend.planner.rules.resolve_training import ResolvedTraining
from backend.schema.training.config import TrainingConfig


@dataclass(frozen=True)
class Case:
    """A run that is asked for. `spec`: the model as found, None where only its sizes are known. `here`: it is to run on
    this machine. `device`: of torch, "" where it is not known."""

    config: TrainingConfig
    resolved: ResolvedTraining
    sizes: ModelSizes
    family: Family
    spec: ModelSpec | None = None
    here: bool = True
    device: str = ""

    @property
    def first_stage(self) -> bool:
        """Whether the run only encodes, and trains nothing."""
        return self.config.training.task.endswith(":data_process")

    @property
    def second_stage(self) -> bool:
        """Whether the run trains from encodings alone."""
        return self.config.training.task.endswith(":train")

    @property
    def trainable(self) -> tuple[str, ...]:
        """The parts whose weights may train: the variant's networks, and what encodes prompts."""
        variant = self.sizes.variant
        return (*self.family.parts_of("denoise", variant), *self.family.parts_of("text", variant))

    @property
    def edits(self) -> bool:
        """Whether the model makes pictures of pictures."""
        return self.sizes.variant in self.family.EDITS
