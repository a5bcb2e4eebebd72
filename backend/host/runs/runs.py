"""Training runs as folders: made, started, read, asked to stop, ended, resumed.

Status is derived at every reading, never stored.

A run goes on when the studio or the browser is gone; whoever opens the folder next sees it as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from backend.catalog.hub import download
from backend.host.process import processes
from backend.host.process.event_log import LossSeries, Phase, Sample
from backend.host.runs.status import (
    MARK,
    MOST_SETTINGS_BYTES,
    Run,
    file_size,
    forget,
    list_runs,
    live_runs,
    log,
    loss_series,
    mark,
    process_of,
    read,
)
from backend.schema.json_values import printable
from backend.schema.messages import Trouble
from backend.schema.paths import Places
from backend.schema.settings import from_file_text, to_file_text, to_flags
from backend.schema.training.config import TrainingConfig
from backend.schema.untrusted import read_bytes
from backend.system import process_record
from backend.system.atomic_files import not_written, write_text
from backend.system.gpu_probe import training_environment

__all__ = [
    "LossSeries",
    "Phase",
    "Run",
    "Sample",
    "command",
    "command_of",
    "command_text",
    "config_of",
    "create",
    "discard",
    "kill",
    "list_runs",
    "live_runs",
    "log",
    "loss_series",
    "read",
    "resume",
    "start",
    "stop",
    "stop_all",
]
_starting = threading.Lock()
LAUNCHER = (  # everything that it would otherwise ask a configuration of the user's for; port 0: any that is free
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
)


def create(config: TrainingConfig, places: Places) -> Path:
    """A new folder `runs/<date>_<time>_<name>/` with the run's `config.json`; nothing is started.

    Raises Trouble("not_written").
    """
    making = places.runs / f".new-{secrets.token_hex(4)}"
    try:
        making.mkdir(parents=True)
        write_text(making / "config.json", to_file_text(config))
        stem = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{_slug(config.output.name)}"
        for number in range(1, 1000):
            folder = places.runs / (stem if number == 1 else f"{stem}-{number}")
            if folder.exists():
                continue
            try:
                making.rename(folder)
            except OSError:
                if not folder.exists():  # not a name taken by another at this very moment
                    raise
                continue
            return folder
        raise Trouble("no_name", f"There are already a thousand runs called {stem}.", hint="Choose another name.")
    except OSError as error:
        raise not_written("The run's folder", error) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)  # gone already where it got its name


def _slug(name: str) -> str:
    """`name` as a part of a folder's name on every system."""
    return re.sub(r"[^\w.-]+", "-", name.strip()).strip("-.")[:40] or "run"


def config_of(folder: Path) -> TrainingConfig:
    """The settings of a run. Raises Trouble for a `config.json` that is missing or not right."""
    try:
        text = read_bytes(folder / "config.json", most=MOST_SETTINGS_BYTES)
    except Trouble as trouble:
        raise Trouble(
            "missing_file", f"The settings of the run {printable(folder.name)} cannot be read. {trouble}"
        ) from None
    return from_file_text(TrainingConfig, text)


def command(folder: Path) -> list[str]:
    """The argument list that `start` runs: through the launcher where several devices train together."""
    devices = config_of(folder).training.devices
    launcher = [*LAUNCHER, "--num_processes", str(devices)] if devices > 1 else []
    return [*processes.PYTHON, *launcher, "-m", "backend.training", str(folder)]


def command_of(config: TrainingConfig) -> list[str]:
    """The argument list that trains the same by hand, from the project's folder."""
    devices = config.training.devices
    several = ["--multi_gpu", "--num_processes", str(devices)] if devices > 1 else []
    return ["accelerate", "launch", *several, "-m", "backend.training", *to_flags(config)]


def command_text(argv: Sequence[str], *, windows: bool | None = None) -> str:
    """`argv` as one line to paste into a terminal: of Windows or of the others; by default of this machine."""
    if windows is None:
        windows = sys.platform == "win32"
    return subprocess.list2cmdline(argv) if windows else shlex.join(argv)


def start(folder: Path, *, places: Places, engine=None, argv: Sequence[str] | None = None) -> process_record.Process:
    """Starts the run in `folder`, or goes on with it from its newest checkpoint; returns at once.

    The card has one owner: with `engine` (a `host.engine.Engine`) the worker is ended first. `argv` replaces
    `command(folder)`, for a launcher of several processes. Raises Trouble("already_running").
    """
    with _starting:
        run = read(folder)
        if run.live:
            raise Trouble("already_running", f"The run {run.name} is going on already.", hint="Watch it on the page.")
        config_of(folder)
        with engine.card_given() if engine is not None else contextlib.nullcontext():
            (folder / "stop").unlink(missing_ok=True)
            events_at = file_size(folder / "events.jsonl")
            process = processes.start(
                argv or command(folder),
                log=folder / "log.txt",
                cwd=places.root,
                env=processes.child_environment(places.root, training_environment(download.preferences(places).device)),
                mark=mark(folder),
            )
            try:
                process_record.write_record(folder / process_record.RECORD, process, events_at=events_at, by="studio")
            except OSError as error:  # a run that nobody could find again must not go on
                processes.end_tree(process, grace_seconds=0, mark=mark(folder))
                raise not_written("The run's record", error) from None
        return process


def resume(folder: Path, *, places: Places, engine=None) -> process_record.Process:
    """Goes on with a run that was stopped, died or failed. Raises Trouble for one that lives or is complete."""
    run = read(folder)
    if run.status == "complete":
        raise Trouble(
            "complete",
            f"The run {run.name} is complete at step {run.step}.",
            hint="Raise the number of epochs or steps in a new run that begins from this one's result.",
        )
    return start(folder, places=places, engine=engine)


def stop(folder: Path) -> None:
    """Asks the run to save and end; it does so after the step it is at."""
    (folder / "stop").touch()  # empty: a full disk takes that too


def kill(folder: Path, *, grace_seconds: float = 3.0) -> bool:
    """Ends the run's processes now, all of them; what was not saved is lost. Returns whether all are gone.

    Ended is what was started as this run and no other process, whatever the folder's record says. One that a person
    started by hand is asked to save and end, and Trouble("not_ours") says so.
    """
    with contextlib.suppress(OSError):  # the folder may be gone, or the disk full
        stop(folder)  # so that the reading says "stopped", as was asked, and not "died"
    process, lives, _ = process_of(folder)
    ours = processes.child(process, mark=mark(folder)) if process else process_record.NOBODY
    if process is not None and lives and ours is process_record.NOBODY:
        raise Trouble(
            "not_ours",
            (
                f"The run {printable(folder.name)} was started by hand (process {process.pid}), so this page only asks "
                "it to save and end."
            ),
            hint="To end it at once, press Ctrl-C where it was started.",
        )
    return processes.end_tree(ours, grace_seconds=grace_seconds, mark=mark(folder))


def stop_all(
    places: Places, *, grace_seconds: float = 20.0, hurry: threading.Event | None = None
) -> tuple[list[Path], list[Path]]:
    """Ends every run that was started from a page on this data folder: asked to save first, killed after the grace.

    They are found by what their processes carry as well as by their folders, so nothing that lies in a folder hides
    one. `hurry`, once set, ends the wait. Returns the folders of all, and of those that could not be ended. Runs that
    were started from a command line are left alone.
    """
    mine = ours_at_work(places)
    for folder in mine:
        with contextlib.suppress(OSError):  # a full disk must not keep the others from being ended
            stop(folder)
    end = time.monotonic() + grace_seconds
    while any(map(_works_still, mine)) and time.monotonic() < end and not (hurry and hurry.is_set()):
        time.sleep(0.1)
    return mine, [folder for folder in mine if not _ended(folder)]


def ours_at_work(places: Places) -> list[Path]:
    """The folders of every run that a page on this data folder has started and that lives."""
    home = Path(os.path.realpath(places.runs))
    carried = [Path(found.removeprefix(MARK)) for found in processes.marks(MARK)]
    return [places.runs / folder.name for folder in sorted(set(carried)) if folder.parent == home]


def _works_still(folder: Path) -> bool:
    run = read(folder)
    return run.live or (run.status in ("queued", "unreadable") and bool(processes.marked(mark(folder))))


def _ended(folder: Path) -> bool:
    try:
        return kill(folder)
    except (OSError, ValueError, Trouble):
        return processes.end_tree(process_record.NOBODY, grace_seconds=0, mark=mark(folder))


def discard(folder: Path, *, places: Places) -> Path:
    """Moves a run that does not live into the trash; returns where it lies now."""
    run = read(folder)
    if run.live:
        raise Trouble("already_running", f"The run {run.name} is going on.", hint="Stop it first.")
    places.trash.mkdir(parents=True, exist_ok=True)
    target = places.trash / folder.name
    while target.exists():
        target = places.trash / f"{folder.name}-{secrets.token_hex(2)}"
    try:
        shutil.move(str(folder), str(target))
    except OSError as error:
        raise not_written(f"The run in {target}", error) from None
    forget(folder)
    return target
