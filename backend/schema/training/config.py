"""Everything that a training run can be told: the sections of `training_inputs`, `training_method` and
`training_output` together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from backend.schema.settings import section
from backend.schema.training.inputs import DatasetSection, ModelSection, PriorSection
from backend.schema.training.method import (
    ADAPTERS,
    SCHEDULES,
    TASKS,
    LoraSection,
    LossSection,
    MemorySection,
    TrainingSection,
    check_optimizer_name,
)
from backend.schema.training.output import OutputSection, SampleSection

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


# DiffSynth-Studio's flags for distillation by distribution matching (`--dmd2_…`)
DMD2 = tuple(
    f"dmd2_{name}"
    for name in (
        "student_update_freq",
        "student_sample_steps",
        "student_sample_type",
        "student_schedule",
        "student_t_list",
        "matching_t_min",
        "matching_t_max",
        "matching_t_sampling",
        "matching_t_mean",
        "matching_t_std",
        "gan_loss_weight",
        "gan_r1_reg_weight",
        "gan_r1_reg_alpha",
        "fake_score_learning_rate",
        "discriminator_learning_rate",
        "feature_indices",
        "teacher_cfg_scale",
        "student_grad_clip_norm",
    )
)


@dataclass(frozen=True)
class TrainingConfig:
    """A run. `--name value` on the command line, a field in the form, a key in `config.json`: the same names."""

    REFUSED: ClassVar[dict[str, str]] = {
        "template_model_id_or_path": (
            "Template models (--template_model_id_or_path), which turn a picture into a "
            "LoRA or a cache, are not trained here."
        ),
        "enable_lora_hot_loading": "--enable_lora_hot_loading is for models that turn a picture into a LoRA, which "
        "are not trained here. A LoRA that "
        "trains always acts beside the weights, and --preset_lora_path says by itself whether it can be merged.",
        **dict.fromkeys(
            DMD2,
            (
                "Distillation by DMD2 (--dmd2_…) is not trained here; --task direct_distill teaches a model to draw in "
                "few steps."
            ),
        ),
        "fp8_products": "FP8 products have no gradient, and their rounding would be learnt: training multiplies in "
        "bfloat16. "
        "Storing frozen weights in FP8 is allowed (fp8_models).",
        "step_cache": "Steps are reused while a picture is drawn; a training step has no earlier one to reuse.",
        "compile": (
            "Only drawing is compiled: adapters, checkpointing and moving weights change a training step's "
            "graph too often."
        ),
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

    @property
    def trained_parts(self) -> tuple[str, ...]:
        """Parts whose own weights train (`trainable_models`), each once, as they were named."""
        names = (name.strip() for name in (self.training.trainable_models or "").split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def adapter_part(self) -> str | None:
        """The part that gets an adapter: `lora_base_model`, or dit where neither that nor a part that trains is
        named."""
        return (self.lora.lora_base_model or "").strip() or (None if self.trained_parts else "dit")

    @property
    def parts_that_train(self) -> tuple[str, ...]:
        """Parts with weights that train: their own, then an adapter's."""
        return (*self.trained_parts, *([self.adapter_part] if self.adapter_part else []))

    @property
    def preset_part(self) -> str | None:
        """The part that the preset LoRA is merged into; None where there is no such LoRA."""
        return (self.lora.preset_lora_model or "dit") if self.lora.preset_lora_path else None
