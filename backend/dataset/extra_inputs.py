"""Flags and columns that only some models or tasks can take: what is taken, and a sentence for everything that is not.

No torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from backend.schema.messages import Trouble
from backend.schema.training.config import TrainingConfig


def check_processes(config: TrainingConfig) -> None:
    """Raises Trouble where other than as many processes were started as devices are to train."""
    devices, processes = config.training.devices, int(os.environ.get("WORLD_SIZE", "1"))
    if devices not in (1, processes):
        raise Trouble(
            "bad_value",
            f"{devices} devices are to train (--devices), but {processes} "
            f"{'process was' if processes == 1 else 'processes were'} started.",
            hint=f"accelerate launch --multi_gpu --num_processes {devices} -m backend.training …",
            setting="devices",
        )


def check_steps(steps: Iterable[int | None], batch_size: int) -> None:
    """Raises Trouble where pictures that may come into one batch are to be drawn in different numbers of steps."""
    asked = sorted({count for count in steps if count is not None})
    if batch_size > 1 and len(asked) > 1:
        raise Trouble(
            "bad_metadata",
            f"Pictures of one batch would be drawn in {', '.join(map(str, asked))} steps (num_inference_steps).",
            hint="Use --batch_size 1, or the same number in every row.",
        )


def read_steps(row: dict, wanted: tuple[str, ...], number: int, name: str) -> int | None:
    """The number of steps in which a student is to draw the picture (direct distillation), from row `number` of the
    metadata file `name`; None where `wanted`, the columns of --extra_inputs, does not name `num_inference_steps`.

    The other columns are checked. Raises Trouble("bad_metadata") for one that is missing or that Loft does not do.
    """
    for column in wanted:
        if row.get(column) in (None, ""):
            raise Trouble(
                "bad_metadata",
                f"Row {number} of {name} has no {column}, which --extra_inputs asks for.",
                hint="Add the column, or leave it out of --extra_inputs.",
            )
    if "rand_device" in wanted and str(row["rand_device"]).strip() != "cpu":
        raise Trouble(
            "bad_metadata",
            f"Row {number} of {name} has the rand_device {row['rand_device']!r}; noise is drawn on the CPU here.",
            hint="Make the pictures with rand_device=cpu.",
        )
    if "cfg_scale" in wanted and _number(row["cfg_scale"]) != 1.0:
        raise Trouble(
            "bad_metadata",
            f"Row {number} of {name} has the cfg_scale {row['cfg_scale']!r}; a student draws without guidance, at 1.",
        )
    if "num_inference_steps" not in wanted:
        return None
    steps = _number(row["num_inference_steps"])
    if steps is None or not steps.is_integer() or not 1 <= steps <= 100:
        raise Trouble(
            "bad_metadata",
            (
                f"Row {number} of {name} has {row['num_inference_steps']!r} num_inference_steps, not a number from 1 "
                "to 100."
            ),
        )
    return int(steps)


def _number(value) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
