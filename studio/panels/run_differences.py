"""What tells things of one name apart: the settings in which they differ, in words."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from backend.host.runs import runs
from backend.schema.messages import Trouble
from backend.schema.settings import knobs_of, to_values
from backend.schema.training.config import TrainingConfig
from studio.widgets.formatting import value_words

MOST = 3
# Of a run's settings, those that say where it lies and not what it does.
PLACES = ("name", "output_path", "resume_from_checkpoint", "dataset_metadata_path")


def told_apart(configs: Sequence, *, skip: Sequence[str] = (), most: int = MOST) -> list[str]:
    """For each of `configs` of one class the settings, at most so many, that are not the same in all of them."""
    values = [to_values(config) for config in configs]
    differing = [
        item
        for item in (knobs_of(type(configs[0])) if configs else ())
        if item.name not in skip and any(one[item.name] != values[0][item.name] for one in values)
    ][:most]
    return [", ".join(f"{item.label} {value_words(one[item.name])}" for item in differing) for one in values]


def runs_apart(found: Sequence[runs.Run], titles: Sequence[str]) -> dict[str, str]:
    """By the run's folder name, for runs that share their title with another: which of them it is, and its own
    settings."""
    said = {}
    for title in dict.fromkeys(titles):
        same = [run for run, other in zip(found, titles, strict=True) if other == title]
        if len(same) > 1:
            same = sorted(same, key=lambda run: (run.started_at, run.name))
            settings = _settings_apart(tuple(run.folder for run in same))
            said |= {
                run.name: f"{number} of {len(same)}" + (f", {words}" if words else "")
                for number, (run, words) in enumerate(zip(same, settings, strict=True), 1)
            }
    return said


@functools.lru_cache(maxsize=64)
def _settings_apart(folders: tuple[Path, ...]) -> list[str]:
    """Remembered: a run's settings do not change once it is made, and the list of runs is drawn at every step."""
    return told_apart([_config(folder) for folder in folders], skip=PLACES)


def _config(folder: Path) -> TrainingConfig:
    """The settings of a run, or the defaults where they cannot be read."""
    try:
        return runs.config_of(folder)
    except Trouble:
        return TrainingConfig()
