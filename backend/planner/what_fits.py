"""Answers about a model, a job and a machine: the largest picture, batch and rank, the smallest machine, seconds, disk,
and what more free memory would do. Each is tried on the plan, so what is told fits; some tens of plans, so nothing asks
for it at a keystroke. No torch.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.planner import suggestions
from backend.planner.costs.layout import Work
from backend.planner.costs.model_sizes import ModelSizes
from backend.planner.suggestions import Fits, State
from backend.schema.memory_plan import GIB, Card, Remedy, VramPlan
from backend.schema.request import GenerationRequest
from backend.schema.settings import knobs_of, to_values
from backend.schema.training.config import TrainingConfig
from backend.schema.untrusted import exists

LARGEST_SIDE = 8192
MOST_BATCH = 256


@dataclass(frozen=True)
class Answer:
    """`settings`: what it says, as settings of the job."""

    about: str  # "picture", "batch", "rank", "machine", "seconds", "disk", "more"
    words: str
    settings: dict


def answers(
    sizes: ModelSizes,
    state: State,
    found: VramPlan,
    fits: Fits,
    *,
    plan_of: Callable[[State], VramPlan],
    more_gib: float | None = None,
    disk_free: tuple[int, str] | None = None,
    num_steps: int | None = None,
) -> tuple[Answer, ...]:
    """What is worth knowing about the plan `found` of `state`.

    `fits` as for `remedy.find`; `plan_of` plans another state.

    `more_gib`: of memory that would be free besides; `disk_free`: bytes, and where; `num_steps`: of a run, where its
    dataset was read.
    """
    job, told = state.job, [_largest_picture(state, fits)]
    if not isinstance(job, Work | GenerationRequest):
        told += [_largest_batch(state, fits), _largest_rank(state, fits)]
    told += [_smallest_machine(state, fits), _seconds(found, job, num_steps), _disk(found, job, disk_free)]
    told += [] if more_gib is None else [_more(state, found, plan_of, more_gib)]
    return tuple(filter(None, told))


def _most(values: Sequence[Any], state: State, change: Callable[[Any], dict], fits: Fits) -> Any:
    """The last of ascending `values` with which the job fits; None where even the first does not."""
    low, high = -1, len(values) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(suggestions.applied(state, Remedy((), change(values[middle])))):
            low = middle
        else:
            high = middle - 1
    return values[low] if low >= 0 else None


def _largest_picture(state: State, fits: Fits) -> Answer:
    """In the job's own proportions."""
    job, step = state.job, 16
    if isinstance(job, Work | GenerationRequest):
        width, height = job.width, job.height

        def change(size: tuple[int, int]) -> dict:
            return {"width": size[0], "height": size[1]}
    else:
        values, step = to_values(job), 32
        side = math.isqrt(values["max_pixels"])
        width, height = values.get("width") or side, values.get("height") or side
        said = [name for name in ("width", "height") if values.get(name)]

        def change(size: tuple[int, int]) -> dict:
            sides: dict[str, int] = {"width": size[0], "height": size[1]}
            return {"max_pixels": size[0] * size[1]} | {name: sides[name] for name in said}

    long = max(width, height)
    sizes = [
        (max(step, round(side * width / long / step) * step), max(step, round(side * height / long / step) * step))
        for side in range(64, LARGEST_SIDE + 1, step)
    ]
    size = _most(sizes, state, change, fits)
    if size is None:
        return Answer("picture", "No picture fits, not even a very small one.", {})
    more = " and more" if max(size) == LARGEST_SIDE else ""
    return Answer("picture", f"Largest picture in these proportions: {size[0]} × {size[1]}{more}.", change(size))


def _largest_batch(state: State, fits: Fits) -> Answer:
    most = _most(range(1, MOST_BATCH + 1), state, lambda count: {"batch_size": count}, fits)
    if most is None:
        return Answer("batch", "No batch fits, not even a single picture.", {})
    return Answer("batch", f"Largest batch: {most}{' or more' if most == MOST_BATCH else ''}.", {"batch_size": most})


def _largest_rank(state: State, fits: Fits) -> Answer | None:
    if not isinstance(state.job, TrainingConfig) or state.job.adapter_part is None:
        return None
    limit = next(int(one.high or 1) for one in knobs_of(type(state.job)) if one.name == "lora_rank")
    most = _most(range(1, limit + 1), state, lambda rank: {"lora_rank": rank}, fits)
    if most is None:
        return Answer("rank", "No rank fits, not even 1.", {})
    return Answer("rank", f"Largest rank: {most}{' or more' if most == limit else ''}.", {"lora_rank": most})


def _smallest_machine(state: State, fits: Fits) -> Answer:
    gib = suggestions.smallest(state, fits)
    if state.card.device == "cpu":
        words = f"Least RAM on which this runs: {gib} GiB." if gib else "No usual amount of RAM holds this."
    else:
        words = f"Smallest card on which this runs: {gib} GiB." if gib else "No single card holds this."
    return Answer("machine", words, {"gib": gib})


def _seconds(found: VramPlan, job, num_steps: int | None) -> Answer:
    low, high = (_time(seconds) for seconds in found.seconds)
    if isinstance(job, Work | GenerationRequest):
        count = getattr(job, "count", 1)
        return Answer(
            "seconds", f"{f'These {count} pictures take' if count > 1 else 'This takes'} {low} to {high}.", {}
        )
    values = to_values(job)
    steps = values.get("max_steps") or num_steps
    if steps is None:
        return Answer("seconds", f"A thousand steps take {low} to {high}; how many there are, the dataset tells.", {})
    epochs = "" if values.get("max_steps") else f" of {values['num_epochs']} epoch{'s' * (values['num_epochs'] != 1)}"
    words = f"The whole run{epochs}, {steps} step{'s' * (steps != 1)}, takes {low} to {high}."
    return Answer("seconds", words, {"steps": steps})


def _time(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _disk(found: VramPlan, job, disk_free: tuple[int, str] | None) -> Answer:
    """The model's files, and what a run writes: one result, the states that it keeps, encodings of a hundred
    pictures."""
    needed, words = found.disk_bytes, f"{_size(found.disk_bytes)} of model files"
    if "state" in found.disk:
        keeps = int(to_values(job).get("keep_checkpoints") or 0) if not isinstance(job, Work) else job.keeps_states
        written = found.disk["result"] + keeps * found.disk["state"] + 100 * found.disk["picture"]
        needed += written
        words += f" and {_size(written)} that the run writes (with 100 pictures)"
    if disk_free is None:
        return Answer("disk", f"Disk: {words}.", {"bytes": needed})
    enough = (
        "" if disk_free[0] >= needed else f"; {_size(needed - disk_free[0])} are missing if none of it is there yet"
    )
    return Answer(
        "disk", f"Disk: {words}; {_size(disk_free[0])} are free in {disk_free[1]}{enough}.", {"bytes": needed}
    )


def _more(state: State, found: VramPlan, plan_of: Callable[[State], VramPlan], gib: float) -> Answer:
    """The same job with so much more memory free, whoever held it."""
    card = with_more(state.card, gib)
    after = plan_of(replace(state, card=card))
    was, now = (_words(one.verdict) for one in (found, after))
    low, high = after.seconds
    gained = found.seconds[1] - high
    pace = f", {_time(low)} to {_time(high)}" + (" as before" if abs(gained) < 0.01 * max(high, 1e-9) else "")
    change = f"it {now}" if was == now else f"it {now} (without them it {was})"
    where = "of RAM " if state.card.device == "cpu" else ""
    return Answer("more", f"With {gib:g} GiB {where}more free {change}{pace}.", {"verdict": after.verdict})


def with_more(card: Card, gib: float) -> Card:
    """`card` with so much more that is free: of what others hold as far as that goes, then of a larger one."""
    nbytes = int(gib * GIB)
    others = min(card.used_by_others_bytes, nbytes)
    card = replace(
        card,
        used_by_others_bytes=card.used_by_others_bytes - others,
        free_bytes=card.free_bytes + nbytes,
        total_bytes=card.total_bytes + nbytes - others,
    )
    return replace(card, ram_free_bytes=card.free_bytes) if card.device == "cpu" else card


def free_of(folder: Path) -> tuple[int, str] | None:
    """(bytes free, name) of the disk that `folder` lies on, or will."""
    there = next((one for one in (folder, *folder.parents) if exists(one)), None)
    try:
        return (shutil.disk_usage(there).free, str(folder)) if there else None
    except OSError:
        return None


def _words(verdict: str) -> str:
    return {"green": "fits", "amber": "may just fit", "red": "does not fit"}[verdict]


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"
