"""The reading of a run's folder: what it is, how far, and how it stands; derived each time, never stored."""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from backend.host.process import processes
from backend.host.process.event_log import KEPT_FILES, KEPT_NOTES, Journal, LossSeries, Phase, Sample, log_tail
from backend.schema.json_values import LAST_TIME, finite, printable, whole
from backend.schema.messages import Trouble
from backend.schema.paths import Places
from backend.schema.settings import from_file_text
from backend.schema.training.config import TrainingConfig
from backend.schema.untrusted import exists, is_file, is_folder, known_entry, read_bytes
from backend.system import process_record

LIVE = ("starting", "running", "stopping")
RESUMABLE = ("stopped", "died", "failed")
MARK = "run:"
BY_HAND = ("backend.training", "train.py")  # what trains when a person types the command
MOST_SETTINGS_BYTES = 2**20
MOST_LOOKED_FOR = 200  # of the states and of the results of a run, the newest
PASSED_OVER = "The record of its steps is so long that its middle was passed over: the curve has a gap there."
KEPT_JOURNALS = 1000  # more than a list of runs holds: each reading of the list touches them all
_reading = threading.Lock()
_journals: OrderedDict[Path, Journal] = OrderedDict()  # a memo of what was parsed; the files alone are the truth


@dataclass(frozen=True)
class Run:
    """A reading of a run's folder at one moment. Times are seconds since the epoch, durations seconds."""

    folder: Path
    name: str
    status: str  # queued, starting, running, stopping, complete, stopped, died, failed, unreadable
    sentence: str  # the status for people
    process: process_record.Process | None
    phase: Phase | None
    step: int
    total_steps: int
    epoch: int
    seconds_per_step: float
    seconds_left: float | None
    loss: float | None  # the mean of the last `loss_steps` steps
    learning_rate: float
    samples: tuple[Sample, ...]
    checkpoints: tuple[tuple[int, Path], ...]  # (step, folder) of those that still exist
    saved: tuple[Path, ...]  # results that still exist, the newest last
    memory: dict
    trouble: Trouble | None
    notes: tuple[str, ...]  # sentences that the run has said, the newest last
    resumed: dict  # {"step", "restored", "not_restored"} of the newest resume
    model: str
    started_at: float
    changed_at: float
    revision: tuple  # equal to an earlier reading's: nothing to redraw
    loss_steps: int = 0

    @property
    def live(self) -> bool:
        return self.status in LIVE

    @property
    def can_resume(self) -> bool:
        return self.status in RESUMABLE


def list_runs(places: Places) -> list[Run]:
    """Every run in the data folder, the newest first; also those that a command line wrote under `models/train`.

    One that cannot be read is in the list, "unreadable", with the reason as its sentence.
    """
    found = [folder for folder in _folders(places.runs) if is_file(folder / "config.json")]
    found += [folder for folder in _folders(places.models / "train") if is_file(folder / "events.jsonl")]
    return sorted((read(folder) for folder in found), key=lambda run: (run.started_at, run.name), reverse=True)


def _folders(parent: Path) -> list[Path]:
    try:
        return [folder for folder in parent.iterdir() if not folder.name.startswith(".") and is_folder(folder)]
    except OSError:
        return []


def live_runs(places: Places) -> list[Run]:
    """The runs that hold the card now."""
    candidates = [*_folders(places.runs), *_folders(places.models / "train")]
    return [read(folder) for folder in candidates if process_of(folder)[1]]


def process_of(folder: Path) -> tuple[process_record.Process | None, bool, dict]:
    """The process that the folder's record names, whether it lives and is this run's, and what else the record says.

    It is if it carries the run's mark, which whoever starts it from a page gives it, or if its own command line trains
    in this folder.
    """
    known = process_record.read_record(folder / process_record.RECORD)
    if known is None:
        return None, False, {}
    process, more = known
    ours = processes.child(process, mark=mark(folder)) is process
    return process, ours or processes.names_folder(process, folder, BY_HAND), more


def mark(folder: Path) -> str:
    """What the processes of a run that was started from a page carry in their environment."""
    return f"{MARK}{os.path.realpath(folder)}"


def at_work(places: Places) -> str:
    """Who has the card, as a sentence; "" if no run has it."""
    live = live_runs(places)
    name = printable(live[0].name.split("_", 2)[-1]) if live else ""
    return f"The run {name} is computing; pictures wait until it ends or is stopped." if live else ""


def read(folder: Path) -> Run:
    """The run as its folder and the system's process table tell it now.

    Never fails: of a folder that cannot be read it says why.
    """
    try:
        return _read(folder)
    except Exception as error:  # one folder, whatever somebody has put into it, is no reason to hide the others
        return _unreadable(folder, Trouble("unreadable", f"This run cannot be read: {printable(error)[:300]}."))


def _read(folder: Path) -> Run:
    process, lives, more = process_of(folder)  # asked before the events: a run that ends now has written all
    stopping = exists(folder / "stop")
    with _reading:
        journal = _journal(folder)
        journal.update()
        status = _status(journal, lives, stopping, process, whole(more.get("events_at")) or 0)
        if status == "queued" and (why := _fault_of_settings(folder, journal)):
            return _unreadable(folder, why)
        return _run(folder, journal, status, process)


def _fault_of_settings(folder: Path, journal: Journal) -> Trouble | None:
    """Why a run that was never started cannot be, if its settings cannot be read.

    Looked at once for each time of the file.
    """
    file = folder / "config.json"
    stamp = (file_size(file), _changed(folder))
    if journal.settings[0] != stamp:
        fault = None
        try:
            from_file_text(TrainingConfig, read_bytes(file, most=MOST_SETTINGS_BYTES))
        except Trouble as trouble:
            fault = trouble
        journal.settings = (stamp, fault)
    return journal.settings[1]


def _unreadable(folder: Path, why: Trouble) -> Run:
    changed = _changed(folder)
    return Run(
        folder=folder,
        name=folder.name,
        status="unreadable",
        sentence=str(why),
        process=None,
        phase=None,
        step=0,
        total_steps=0,
        epoch=0,
        seconds_per_step=0.0,
        seconds_left=None,
        loss=None,
        learning_rate=0.0,
        samples=(),
        checkpoints=(),
        saved=(),
        memory={},
        trouble=why,
        notes=(),
        resumed={},
        model="",
        started_at=changed,
        changed_at=changed,
        revision=("unreadable", str(why)),
    )


def _journal(folder: Path) -> Journal:
    journal = _journals.pop(folder, None) or Journal(folder)
    _journals[folder] = journal
    while len(_journals) > KEPT_JOURNALS:
        _journals.popitem(last=False)
    return journal


def _status(
    journal: Journal, lives: bool, stopping: bool, process: process_record.Process | None, events_at: int
) -> str:
    # An event of this process, not of one before it: `events_at` is where the log ended when it was started.
    fresh = journal.last is not None and journal.last_offset >= events_at
    if lives and not fresh:
        return "stopping" if stopping else "starting"
    if fresh and journal.finished is not None:
        return "complete" if journal.finished.get("reason") == "complete" else "stopped"
    if lives:
        if stopping:
            return "stopping"
        return "running"
    if process is None and journal.last is None:
        return "queued"
    if fresh and journal.last is not None and journal.last.event == "trouble":
        return "failed"
    return "stopped" if stopping else "died"


def _run(folder: Path, journal: Journal, status: str, process: process_record.Process | None) -> Run:
    left = None
    if status in LIVE and journal.seconds_per_step and journal.total_steps:
        left = max(0, journal.total_steps - journal.step) * journal.seconds_per_step
    trouble = journal.trouble if status in ("failed", "running", "stopping") else None
    if status == "died":
        trouble = _death(folder, journal)
    return Run(
        folder=folder,
        name=folder.name,
        status=status,
        sentence=_sentence(status, journal, trouble),
        process=process,
        phase=journal.phase if status in LIVE else None,
        step=journal.step,
        total_steps=journal.total_steps,
        epoch=journal.epoch,
        seconds_per_step=journal.seconds_per_step,
        seconds_left=left,
        loss=journal.loss,
        loss_steps=journal.loss_steps,
        learning_rate=journal.learning_rate,
        samples=tuple(journal.samples[-KEPT_FILES:]),
        checkpoints=tuple(item for item in journal.checkpoints[-MOST_LOOKED_FOR:] if _lies_in(item[1], folder)),
        saved=tuple(path for path in [*journal.saved][-MOST_LOOKED_FOR:] if _lies_in(path, folder)),
        memory=dict(journal.memory),
        trouble=trouble,
        notes=(*journal.notes[-KEPT_NOTES:], *([PASSED_OVER] if journal.passed_over else [])),
        resumed=dict(journal.resumed),
        model=journal.started.get("model", ""),
        started_at=process.created if process else journal.first_time or _changed(folder),
        changed_at=journal.last.time if journal.last else _changed(folder),
        revision=(status, journal.offset, file_size(folder / "log.txt"), process.pid if process else 0),
    )


def _death(folder: Path, journal: Journal) -> Trouble:
    at = f"after step {journal.step}" if journal.step else "before its first step"
    return Trouble(
        "died",
        f"The run's process ended {at} without a word.",
        hint=(
            "It was killed, or the machine ran out of memory or was restarted. Resume goes on from the newest "
            "checkpoint."
        ),
        detail=log_tail(folder / "log.txt", lines=30),
    )


def _sentence(status: str, journal: Journal, trouble: Trouble | None) -> str:
    steps = f"step {journal.step} of {journal.total_steps}" if journal.total_steps else f"step {journal.step}"
    if trouble is not None and status in ("failed", "died"):
        return str(trouble)
    return {
        "queued": "Waits to be started.",
        "starting": "Starting: loading the libraries.",
        "running": f"Training, {steps}." if journal.step else "Preparing.",
        "stopping": f"Saving and ending, {steps}.",
        "complete": f"Complete at {steps}.",
        "stopped": f"Stopped at {steps}.",
        "failed": "Failed.",
    }[status]


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether a path inside `folder` is there; of a link, whether it stays inside."""
    try:
        return not stat.S_ISLNK(path.lstat().st_mode) or known_entry(path, (folder,)) is not None
    except (OSError, ValueError):  # too long a name, or one that no file can have
        return False


def forget(folder: Path) -> None:
    """Drops what was parsed of a folder that is gone."""
    with _reading:
        _journals.pop(folder, None)


def loss_series(folder: Path, *, points: int = 400) -> LossSeries:
    """The loss curve of a run, thinned to at most `points` for plotting."""
    with _reading:
        journal = _journal(folder)
        journal.update()
        return journal.loss_series(points)


def log(folder: Path, *, lines: int = 200) -> str:
    """The end of the run's log, bounded, as a terminal would show it."""
    return log_tail(folder / "log.txt", lines=lines)


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def _changed(folder: Path) -> float:
    try:
        return finite((folder / "config.json").stat().st_mtime, low=0, high=LAST_TIME) or 0.0
    except (OSError, ValueError):
        return 0.0
