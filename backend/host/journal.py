"""Reads what a run has written: `events.jsonl` as it grows, and the end of `log.txt`."""

from __future__ import annotations

import itertools
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from backend.schema.messages import Event, Trouble, from_line, trouble_from_values

LOG_TAIL_BYTES = 64 * 1024
LOG_LINE_CHARACTERS = 2000
RECENT_STEPS = 20
KEPT_NOTES = 20
KEPT_VALIDATIONS = 1000
KEPT_STEPS = 40_000  # an even number
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Sample:
    """A picture drawn while training, after `step` steps."""

    step: int
    prompt: str
    path: Path


@dataclass(frozen=True)
class Phase:
    """What the run does now ("loading", "caching", "training", "sampling", "saving") and how far it is; total 0 is unknown."""

    name: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class LossSeries:
    """Steps, each with the mean loss of the steps since the one before, and with the run's loss as it was then (`averaged`). The
    three tuples are equally long. `validation`: (step, loss on pictures that are not trained on)."""

    steps: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    means: tuple[float, ...] = ()
    validation: tuple[tuple[int, float], ...] = ()


@dataclass
class Journal:
    """The events of one run, read so far. `update` reads only what was added since."""

    folder: Path
    offset: int = 0  # bytes read
    partial: bytes = b""  # a last line without its end
    count: int = 0  # events read
    last: Event | None = None
    last_offset: int = 0  # where the last event began
    first_time: float = 0.0
    started: dict = field(default_factory=dict)  # values of the newest "started"
    resumed: dict = field(default_factory=dict)  # values of the newest "resumed"
    phase: Phase | None = None
    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    learning_rate: float = 0.0
    memory: dict = field(default_factory=dict)
    trouble: Trouble | None = None
    finished: dict | None = None
    notes: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    checkpoints: list[tuple[int, Path]] = field(default_factory=list)
    saved: list[Path] = field(default_factory=list)
    steps: array = field(default_factory=lambda: array("q"))
    losses: array = field(default_factory=lambda: array("d"))
    seconds: array = field(default_factory=lambda: array("d"))
    validation: list[tuple[int, float]] = field(default_factory=list)

    def update(self) -> None:
        """Reads on to the end of `events.jsonl`; a torn last line waits for its rest. A file that shrank is read anew."""
        path = self.folder / "events.jsonl"
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        if size < self.offset:
            self.__init__(self.folder)
        if size <= self.offset:
            return
        with path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        start = self.offset - len(self.partial)
        self.offset += len(data)
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            event = from_line(line.decode("utf-8", errors="replace"))
            if event is not None:
                self.last, self.last_offset = event, start
                self.first_time = self.first_time or event.time
                self.count += 1
                take = _TAKE.get(event.event)
                if take is not None:
                    take(self, event.values)
            start += len(line) + 1

    @property
    def seconds_per_step(self) -> float:
        """Median of the last steps; 0 before the first."""
        recent = sorted(self.seconds[-RECENT_STEPS:])
        return recent[len(recent) // 2] if recent else 0.0

    @property
    def loss(self) -> float | None:
        """Mean of the last `loss_steps` steps: the one number that a run's loss is called, in its head and below its curve."""
        recent = self.losses[-averaged(len(self.losses)) :]
        return sum(recent) / len(recent) if recent else None

    @property
    def loss_steps(self) -> int:
        many = averaged(len(self.steps))
        before = self.steps[-many - 1] if len(self.steps) > many else (self.steps[0] - 1 if self.steps else 0)
        return self.steps[-1] - before if self.steps else 0

    def loss_series(self, points: int = 400) -> LossSeries:
        """The loss curve thinned to at most `points`; its last mean is `loss`."""
        total = len(self.losses)
        width, over = max(1, -(-total // points)), averaged(total)
        ends = [*range(width, total, width), total] if total else []
        sums = [0.0, *itertools.accumulate(self.losses)]

        def means(many: int) -> tuple[float, ...]:
            return tuple((sums[end] - sums[max(0, end - many)]) / min(many, end) for end in ends)

        steps = tuple(self.steps[end - 1] for end in ends)
        return LossSeries(steps, means(width), means(over), tuple(self.validation))


def averaged(num_steps: int) -> int:
    """Over how many of the last steps a loss is averaged: single steps tell little, for each is at another noise level."""
    return max(RECENT_STEPS, num_steps // 12)


def _take_started(journal: Journal, values: dict) -> None:
    journal.started, journal.finished, journal.trouble = values, None, None
    journal.total_steps = _whole(values.get("total_steps")) or journal.total_steps
    journal.phase = None


def _take_resumed(journal: Journal, values: dict) -> None:
    """Steps after the checkpoint are made again: what was noted of them no longer counts."""
    journal.resumed, journal.finished, journal.trouble = values, None, None
    journal.step = _whole(values.get("step"))
    while journal.steps and journal.steps[-1] > journal.step:
        for series in (journal.steps, journal.losses, journal.seconds):
            series.pop()
    journal.samples = [sample for sample in journal.samples if sample.step <= journal.step]
    journal.validation = [item for item in journal.validation if item[0] <= journal.step]


def _take_phase(journal: Journal, values: dict) -> None:
    journal.finished = None  # it goes on
    journal.phase = Phase(str(values.get("name", "")), _whole(values.get("done")), _whole(values.get("total")))


def _take_step(journal: Journal, values: dict) -> None:
    journal.finished = None
    journal.step = _whole(values.get("step"))
    journal.total_steps = _whole(values.get("total_steps")) or journal.total_steps
    journal.epoch = _whole(values.get("epoch")) or journal.epoch
    journal.learning_rate = _number(values.get("learning_rate")) or journal.learning_rate
    loss, seconds = _number(values.get("loss")), _number(values.get("seconds"))
    if loss is not None:
        journal.steps.append(journal.step)
        journal.losses.append(loss)
        journal.seconds.append(seconds or 0.0)
        if len(journal.steps) >= KEPT_STEPS:
            _thin(journal)


def _thin(journal: Journal) -> None:
    """Every two steps become one with their mean loss: a run of a million steps is still a small thing to keep."""
    journal.steps = journal.steps[1::2]
    journal.losses = array("d", (sum(pair) / 2 for pair in zip(journal.losses[::2], journal.losses[1::2])))
    journal.seconds = journal.seconds[1::2]


def _take_sample(journal: Journal, values: dict) -> None:
    path = _path(journal, values)
    journal.samples.append(Sample(_whole(values.get("step")), str(values.get("prompt", "")), path))


def _take_validation(journal: Journal, values: dict) -> None:
    loss = _number(values.get("loss"))
    if loss is not None:
        journal.validation = [*journal.validation, (_whole(values.get("step")), loss)][-KEPT_VALIDATIONS:]


def _take_checkpoint(journal: Journal, values: dict) -> None:
    journal.checkpoints.append((_whole(values.get("step")), _path(journal, values)))


def _take_saved(journal: Journal, values: dict) -> None:
    path = _path(journal, values)
    if path not in journal.saved:
        journal.saved.append(path)


def _take_memory(journal: Journal, values: dict) -> None:
    journal.memory = journal.memory | values


def _take_note(journal: Journal, values: dict) -> None:
    journal.notes = [*journal.notes, str(values.get("message", ""))][-KEPT_NOTES:]


def _take_trouble(journal: Journal, values: dict) -> None:
    journal.trouble = trouble_from_values(values)


def _take_finished(journal: Journal, values: dict) -> None:
    journal.finished = values
    journal.step = _whole(values.get("step")) or journal.step


_TAKE = {
    "started": _take_started,
    "resumed": _take_resumed,
    "phase": _take_phase,
    "step": _take_step,
    "sample": _take_sample,
    "validation": _take_validation,
    "checkpoint": _take_checkpoint,
    "saved": _take_saved,
    "memory": _take_memory,
    "note": _take_note,
    "trouble": _take_trouble,
    "finished": _take_finished,
}


def _path(journal: Journal, values: dict) -> Path:
    """The path in an event, sought in the run's folder where that lies now, even if it lay elsewhere when it was written."""
    path = Path(str(values.get("path", "")))
    if journal.folder not in path.parents and journal.folder.name in path.parts:
        at = len(path.parts) - 1 - path.parts[::-1].index(journal.folder.name)
        return journal.folder.joinpath(*path.parts[at + 1 :])
    return journal.folder / path


def _whole(value) -> int:
    return int(value) if isinstance(value, int | float) and value == value and abs(value) != float("inf") else 0


def _number(value) -> float | None:
    """A finite number, or None: a NaN loss has no place in a curve."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0
    return float(value) if good else None


def log_tail(path: Path, *, lines: int = 200) -> str:
    """The last `lines` lines of a log as a terminal would show them: carriage returns folded, colours taken out.

    At most the last 64 KiB are read, however long the log is. A log that is not there is empty.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(0, size - LOG_TAIL_BYTES))
            data = file.read(LOG_TAIL_BYTES)
    except OSError:
        return ""
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    shown = text.removesuffix("\n").split("\n")
    if size > LOG_TAIL_BYTES and len(shown) > 1:
        shown = shown[1:]  # its beginning was cut off
    return "\n".join(_folded(line) for line in shown[-lines:])


def _folded(line: str) -> str:
    """What is left on the screen of a progress line that was overwritten again and again."""
    pieces = [piece for piece in line.split("\r") if piece.strip()]
    return _COLOURS.sub("", pieces[-1] if pieces else "")[:LOG_LINE_CHARACTERS]
