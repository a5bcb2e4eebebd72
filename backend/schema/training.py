"""Everything that a training run can be told: the sections of `training_inputs`, `training_method` and `training_output` together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from backend.schema.knobs import section
from backend.schema.training_inputs import DatasetSection, ModelSection, PriorSection
from backend.schema.training_method import (
    ADAPTERS,
    SCHEDULES,
    TASKS,
    LoraSection,
    LossSection,
    MemorySection,
    TrainingSection,
    check_optimizer_name,
)
from backend.schema.training_output import OutputSection, SampleSection

__all__ = [
    "ADAPTERS",
    "SCHEDULES",
    "TASKS",
    "DatasetSection",
    "LoraSection",
    "LossSection",
    "MemorySection",
    "ModelSection",
    "OutputSection",
    "PriorSection",
    "SampleSection",
    "TrainingConfig",
    "TrainingSection",
]


@dataclass(frozen=True)
class TrainingConfig:
    """A run. `--name value` on the command line, a field in the form, a key in `config.json`: the same names."""

    REFUSED: ClassVar[dict[str, str]] = {
        "fp8_products": "FP8 products have no gradient, and their rounding would be learnt: training multiplies in bfloat16. "
        "Storing frozen weights in FP8 is allowed (fp8_models).",
        "step_cache": "Steps are reused while a picture is drawn; a training step has no earlier one to reuse.",
        "compile": "Only drawing is compiled: adapters, checkpointing and moving weights change a training step's graph too often.",
    }

    CHECKS: ClassVar[tuple] = (lambda config: check_optimizer_name(config.training),)

    model: ModelSection = section(ModelSection, "Model")
    dataset: DatasetSection = section(DatasetSection, "Dataset")
    lora: LoraSection = section(LoraSection, "LoRA")
    training: TrainingSection = section(TrainingSection, "Training")
    prior: PriorSection = section(PriorSection, "Keeping what it knows")
    loss: LossSection = section(LossSection, "Noise and loss")
    samples: SampleSection = section(SampleSection, "Samples and validation")
    memory: MemorySection = section(MemorySection, "Memory")
    output: OutputSection = section(OutputSection, "Output")
