"""Names that scripts for DiffSynth-Studio import beside its pipelines: its schedules, and those that there is nothing
for."""

from __future__ import annotations

import math

from backend.families import FAMILIES
from backend.schema.messages import Trouble

SCHEDULES = {name: changes for family in FAMILIES for name, changes in family.DIFFSYNTH_SCHEDULES.items()}
_CONTROL = "ControlNets are not read; pictures are drawn from text, input_image and edit_image"
_TRAINING = "a training loop of one's own is not built from this; `python -m backend.training` and train.py train"
ABSENT = {
    "ControlNetInput": _CONTROL,
    "Annotator": "pictures are not annotated (edges, depth); give them ready made",
    "merge_lora": "LoRAs are merged by `python -m backend lora merge`",
    "hash_state_dict_keys": "models are recognised by the names and shapes in their headers, not by a hash",
    "UnifiedDataset": _TRAINING,
    "DiffusionTrainingModule": _TRAINING,
    "FlowMatchSFTLoss": _TRAINING,
    "ModelLogger": _TRAINING,
    "launch_training_task": _TRAINING,
    **{name: why for family in FAMILIES for name, why in family.DIFFSYNTH_ABSENT.items()},
}


class FlowMatchScheduler:
    """The noise schedule of a template (a family's `DIFFSYNTH_SCHEDULES`), for `pipe.scheduler = ...`; the first is the
    model's own, of its scheduler_config.json, and what is meant where none is named.

    `changes`: of the scheduler's configuration. Raises Trouble for another template.
    """

    def __init__(self, template: str = next(iter(SCHEDULES))):
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
    """Changes of a scheduler's `configuration` by which every size is shifted by `mu` (None: as it says). Raises
    Trouble."""
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
