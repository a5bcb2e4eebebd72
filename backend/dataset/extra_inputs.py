"""Flags and columns that only some models or tasks can take: what is taken, and a sentence for everything that is not.

No torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from backend.catalog.family import Family
from backend.catalog.models.capabilities import edits
from backend.catalog.models.supported import check_trains
from backend.catalog.spec import ModelSpec
from backend.schema.messages import Trouble
from backend.system.text_files import listed

EDIT = "edit_image"  # the column of pictures that a sample is edited from
DISTILL = ("seed", "rand_device", "num_inference_steps", "cfg_scale")


def check_flags(config, family: Family, spec: ModelSpec) -> None:
    """Raises Trouble for a flag whose meaning the model or the task has not, so that none is without effect."""
    title, frames, editing = spec.title, config.dataset.num_frames, edits(spec, family)
    check_trains(family, title=title)
    if frames is not None and frames > 1 and family.sizes(spec.variant).frame_compression == 1:
        raise Trouble(
            "bad_value",
            f"{title} makes single pictures, so there are no {frames} frames to train (--num_frames).",
            hint="Leave --num_frames out.",
        )
    if not editing:
        _check_no_edits(config, spec, family)
    elif config.prior.regularisation_path:
        raise Trouble(
            "bad_value",
            f"The pictures of a plain folder (--regularisation_path) are edited from nothing, and {title} edits.",
            hint="Let the untouched model edit the dataset's with --prior_pictures.",
        )
    if config.model.zero_cond_t and "dit" in spec.parts and not spec.parts["dit"].config.get("zero_cond_t"):
        raise Trouble(
            "bad_value",
            f"{title} does not take pictures to edit as free of noise (--zero_cond_t).",
            hint="Leave --zero_cond_t out: what a model needs is read from its files.",
        )
    devices, processes = config.training.devices, int(os.environ.get("WORLD_SIZE", "1"))
    if devices not in (1, processes):
        raise Trouble(
            "bad_value",
            f"{devices} devices are to train (--devices), but {processes} "
            f"{'process was' if processes == 1 else 'processes were'} "
            "started.",
            hint=f"accelerate launch --multi_gpu --num_processes {devices} -m backend.training …",
        )
    for name in listed(config.dataset.extra_inputs):
        if name == EDIT and editing:
            continue
        _check_extra(name, config.training.task, title)


def _check_no_edits(config, spec: ModelSpec, family: Family) -> None:
    """Raises Trouble for what only a model that edits can take."""
    title = spec.title
    if EDIT in listed(config.dataset.extra_inputs) and "dit" not in spec.parts:
        raise Trouble(
            "missing_part",
            (
                f"How the pictures under {EDIT} are to be encoded is told by the model's transformer, which is not "
                "among the files."
            ),
            hint="Name its files too; the first of two stages does not load them.",
        )
    if config.model.processor_path:
        raise Trouble(
            "bad_value",
            f"{title} is trained on text alone here; it has no processor of pictures (--processor_path).",
            hint="Leave --processor_path out; the tokenizer is --tokenizer_path.",
        )
    if EDIT in listed(config.dataset.extra_inputs):
        raise Trouble(
            "bad_value",
            (
                f"{title} makes pictures of text alone, so it cannot be trained to edit the pictures under {EDIT} "
                "(--extra_inputs)."
            ),
            hint=f"{family.EDIT_HINT} Or leave --extra_inputs out.",
        )
    if config.samples.sample_edit_images.strip():
        raise Trouble(
            "bad_value",
            f"{title} makes pictures of text alone; its samples are drawn from no others (--sample_edit_images).",
            hint="Leave --sample_edit_images out.",
        )


def _check_extra(name: str, task: str, title: str) -> None:
    if name in DISTILL:
        if not task.startswith("direct_distill"):
            raise Trouble(
                "bad_value",
                f"The column {name} (--extra_inputs) says how a picture was drawn, which the task {task} does not use.",
                hint="Set --task direct_distill, or leave it out.",
            )
        return
    raise Trouble(
        "not_supported",
        f"{title} cannot be trained with the input {name} here (--extra_inputs).",
        hint=f"What can be taken: {EDIT} by models that edit, and {', '.join(DISTILL)} with --task direct_distill.",
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
