"""Names that scripts for DiffSynth-Studio import beside its pipelines: its schedules, and those that there is nothing for."""

from __future__ import annotations

import math

from backend.schema.messages import Trouble

LIGHTNING = {"base_shift": math.log(3), "max_shift": math.log(3), "shift_terminal": None}
SCHEDULES = {"Qwen-Image": {}, "Qwen-Image-Lightning": LIGHTNING}
_CONTROL = "ControlNets are not read; pictures are drawn from text, input_image and edit_image"
_TRAINING = "a training loop of one's own is not built from this; `python -m backend.training` and train.py train"
ABSENT = {
    "ControlNetInput": _CONTROL,
    "QwenImageBlockWiseControlNet": _CONTROL,
    "Annotator": "pictures are not annotated (edges, depth); give them ready made",
    "QwenImageUnit_Image2LoRAEncode": "a LoRA is not made from pictures without training",
    "QwenImageUnit_Image2LoRADecode": "a LoRA is not made from pictures without training",
    "merge_lora": "LoRAs are merged by `python -m backend lora merge`",
    "hash_state_dict_keys": "models are recognised by the names and shapes in their headers, not by a hash",
    "UnifiedDataset": _TRAINING,
    "DiffusionTrainingModule": _TRAINING,
    "FlowMatchSFTLoss": _TRAINING,
    "ModelLogger": _TRAINING,
    "launch_training_task": _TRAINING,
}


class FlowMatchScheduler:
    """The noise schedule of a template, for `pipe.scheduler = ...`: "Qwen-Image" is the model's own (its scheduler_config.json),
    "Qwen-Image-Lightning" shifts all sizes by log 3 and does not stretch the end (lightx2v's distilled models).

    `changes`: of the scheduler's configuration. Raises Trouble for another template.
    """

    def __init__(self, template: str = "Qwen-Image"):
        if template not in SCHEDULES:
            raise Trouble(
                "bad_value",
                f"FlowMatchScheduler({template!r:.60}) is no schedule here.",
                hint=f"There are {', '.join(SCHEDULES)}; every model has its own from its scheduler_config.json.",
            )
        self.template, self.changes = template, dict(SCHEDULES[template])


def absent(name: str) -> None:
    """Raises Trouble for a name of DiffSynth-Studio's that there is nothing for; AttributeError for any other."""
    if name in ABSENT:
        raise Trouble("not_supported", f"{name} is not there: {ABSENT[name]}.")
    raise AttributeError(f"backend.pipelines has no {name}")


def shifted(configuration: dict, mu: float | None) -> dict:
    """Changes of a scheduler's `configuration` by which every size is shifted by `mu` (None: as it says). Raises Trouble."""
    if mu is None:
        return {}
    if isinstance(mu, bool) or not isinstance(mu, int | float) or not math.isfinite(mu):
        raise Trouble("bad_value", f"exponential_shift_mu is {mu!r:.40}, which is no number.")
    if not configuration.get("use_dynamic_shifting"):
        raise Trouble(
            "not_supported",
            "exponential_shift_mu shifts schedules that depend on the picture's size, and this model's does not.",
            hint="Leave exponential_shift_mu out.",
        )
    return {"base_shift": float(mu), "max_shift": float(mu)}
