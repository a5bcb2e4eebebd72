"""Back up an earlier run's files where a new run begins: checkpoints, events, samples, tables and exported weights.

A result that the new run itself begins from stays in its place and gets a second name, which it keeps when the first is
written over. No torch.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from backend.schema.messages import from_line
from backend.schema.training.config import TrainingConfig
from backend.system.atomic_files import sync

PIECES = ("checkpoints", "events.jsonl", "loss.csv", "samples", "tensorboard", "encodings.json", "config.json")
RESULTS = ("epoch-*.safetensors", "step-*.safetensors")

Aside = dict[Path, Path]  # where it lay -> where it is now


def starts_fresh(config: TrainingConfig, folder: Path) -> bool:
    """Whether a run in `folder` goes on from none of the states there: a result's weights, or another run's state, only
    begin one."""
    wanted = config.output.resume_from_checkpoint
    if wanted == "latest":
        return False
    return (
        not wanted
        or wanted.endswith(".safetensors")
        or Path(wanted).resolve().parent != (folder / "checkpoints").resolve()
    )


def files_named(config: TrainingConfig) -> set[Path]:
    """Files that the run itself is told to begin from."""
    said = [config.output.resume_from_checkpoint, config.lora.lora_checkpoint, config.lora.preset_lora_path]
    said += [path.strip() for path in (config.model.model_paths or "").replace('"', ",").strip("[]").split(",")]
    return {Path(text).absolute() for text in said if text and text.endswith((".safetensors", ".pt", ".bin"))}


def made_something(folder: Path) -> bool:
    """Whether a run in `folder` made a step or saved anything."""
    if (folder / "checkpoints").exists() or not (folder / "events.jsonl").exists():
        return True  # what is not of a run is not to be judged
    with (folder / "events.jsonl").open(encoding="utf-8", errors="replace") as lines:
        return any(
            event is not None and event.event in ("step", "saved", "checkpoint") for event in map(from_line, lines)
        )


def set_aside(folder: Path, *, named: Iterable[Path] = ()) -> Aside:
    """Gives what an older run left in `folder` other names, so that nothing of it is lost or mixed in. Of one that made
    and saved nothing, nothing is kept."""
    if not made_something(folder):
        for name in ("events.jsonl", "loss.csv"):
            (folder / name).unlink(missing_ok=True)
        return {}
    stamp = _stamp()
    aside = {folder / name: folder / f"{name}.before-{stamp}" for name in PIECES if (folder / name).exists()}
    for place, where in aside.items():
        place.rename(where)
    return aside | set_results_aside(folder, named=named, stamp=stamp)


def set_results_aside(folder: Path, *, named: Iterable[Path] = (), stamp: str = "") -> Aside:
    """The results in `folder`, which another run wrote: they go to `results.before-…` there."""
    named = set(named)
    found = sorted({path for pattern in RESULTS for path in folder.glob(pattern) if path.is_file()})
    home = folder / f"results.before-{stamp or _stamp()}"
    aside = {place: home / place.name for place in found}
    for place, where in aside.items():
        home.mkdir(exist_ok=True)
        if place.absolute() in named:
            _second_name(place, where)
        else:
            place.rename(where)
    if aside:
        sync(folder)
    return aside


def _second_name(place: Path, where: Path) -> None:
    try:
        os.link(place, where)
    except OSError:  # a file system without links
        shutil.copy2(place, where)


def _stamp() -> str:
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def put_back(aside: Aside, *, unless: bool) -> None:
    """After a start that came to nothing: the older run can be gone on with as before."""
    if unless:
        return
    for place, where in aside.items():
        if not place.exists():
            where.rename(place)
        elif where.is_file() and where.parent.name.startswith("results.before-"):
            where.unlink()  # the second name of a file that is still in its place
        if where.parent != place.parent and not any(where.parent.iterdir()):
            where.parent.rmdir()


def told(aside: Aside) -> str:
    """A sentence about what was set aside."""
    names = sorted(
        {where.parent.name if where.parent != place.parent else where.name for place, where in aside.items()}
    )
    return f"What an earlier run left in {next(iter(aside)).parent} is kept there: {', '.join(names)}."
