"""Reads what a run has written: `events.jsonl` as it grows, and the end of `log.txt`."""

from __future__ import annotations

import itertools
import os
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from backend.schema.json_values import finite, text, texts, whole
from backend.schema.messages import Event, Trouble, from_line, trouble_from_values
from backend.schema.untrusted import is_file

LOG_TAIL_BYTES = 64 * 1024
LOG_LINE_CHARACTERS = 2000
RECENT_STEPS = 20
KEPT_NOTES = 20
KEPT_VALIDATIONS = 1000
KEPT_STEPS = 40_000  # an even number
KEPT_FILES = 2000  # samples, states and results that a run is asked for, the newest of each
BLOCK_BYTES, MOST_LINE_BYTES = 2**20, 2**20
MOST_PATH = 4096
LARGEST = 1e30  # of a loss; sums of them stay numbers
MOST_FIGURES = 40  # of memory
WHOLE_BYTES, BEGINNING_BYTES, END_BYTES = 24 * 2**20, 2**20, 8 * 2**20
_RARE = re.compile(  # of a line that `to_line` wrote
    rb'^\{"event": "(?:started|resumed|sample|validation|checkpoint|saved|note|trouble|finished)".{0,65536}$',
    re.MULTILINE,
)
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Sample:
    """A picture drawn while training, after `step` steps."""

    step: int
    prompt: str
    path: Path


@dataclass(frozen=True)
class Phase:
    """What the run does now ("loading", "caching", "training", "sampling", "saving") and how far it is; total 0 is
    unknown."""

    name: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class LossSeries:
    """Steps, each with the mean loss of the steps since the one before, and with the run's loss as it was then
    (`averaged`). The three tuples are equally long. `validation`: (step, loss on pictures that are not trained on)."""

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
    too_long: bool = False  # it is the rest of a line that is passed over
    settings: tuple = ((), None)  # (stamp of the run's settings, why they cannot be read)
    passed_over: bool = False  # of so many events only the first, the last and the rare ones were read
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
    saved: dict[Path, None] = field(default_factory=dict)
    steps: array = field(default_factory=lambda: array("q"))
    losses: array = field(default_factory=lambda: array("d"))
    seconds: array = field(default_factory=lambda: array("d"))
    validation: list[tuple[int, float]] = field(default_factory=list)

    def update(self) -> None:
        """Reads on to the end of `events.jsonl`; a torn last line waits for its rest. A file that shrank is read anew.

        Memory and time are bounded whatever the file is: it is read in blocks, no line may be longer than
        `MOST_LINE_BYTES`, and of more than `WHOLE_BYTES` at once only the beginning and the end are read in full, of
        the rest the events that are rare.
        """
        path = self.folder / "events.jsonl"
        if not is_file(path):
            size = 0
        else:
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
            if size - self.offset > WHOLE_BYTES:
                self._read(file, self.offset + BEGINNING_BYTES, rare=False)
                self._read(file, size - END_BYTES, rare=True)
                self.passed_over = True
            self._read(file, size, rare=False)

    def _read(self, file: BinaryIO, until: int, *, rare: bool) -> None:
        """Takes the lines up to the byte `until`; `rare`: only those whose events are rare, as Loft writes them."""
        while self.offset < until:
            data = file.read(min(BLOCK_BYTES, until - self.offset))
            if not data:
                return
            begin = self.offset - len(self.partial)
            self.offset += len(data)
            data = self.partial + data
            if self.too_long:  # the rest of a line that is passed over
                head, newline, data = data.partition(b"\n")
                begin += len(head) + len(newline)
                self.too_long = not newline
            end = data.rfind(b"\n") + 1
            self.partial = data[end:]
            if len(self.partial) > MOST_LINE_BYTES:
                self.partial, self.too_long = b"", True
            if rare:
                for found in _RARE.finditer(data, 0, end):
                    self._take(found.group(), begin + found.start())
            else:
                self._take_all(data[:end], begin)

    def _take_all(self, data: bytes, begin: int) -> None:
        for line in data.split(b"\n"):
            self._take(line, begin)
            begin += len(line) + 1

    def _take(self, line: bytes, begin: int) -> None:
        event = from_line(line.decode("utf-8", errors="replace")) if 2 < len(line) <= MOST_LINE_BYTES else None
        if event is None:
            return
        self.last, self.last_offset = event, begin
        self.first_time = self.first_time or event.time
        self.count += 1
        take = _TAKE.get(event.event)
        if take is not None:
            take(self, event.values)

    @property
    def seconds_per_step(self) -> float:
        """Median of the last steps; 0 before the first."""
        recent = sorted(self.seconds[-RECENT_STEPS:])
        return recent[len(recent) // 2] if recent else 0.0

    @property
    def loss(self) -> float | None:
        """Mean of the last `loss_steps` steps: the one number that a run's loss is called, in its head and below its
        curve."""
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
    """Over how many of the last steps a loss is averaged: single steps tell little, for each is at another noise
    level."""
    return max(RECENT_STEPS, num_steps // 12)


def _take_started(journal: Journal, values: dict) -> None:
    journal.started = {"model": text(values.get("model", ""), most=500)}
    journal.finished, journal.trouble = None, None
    journal.total_steps = _whole(values.get("total_steps")) or journal.total_steps
    journal.phase = None


def _take_resumed(journal: Journal, values: dict) -> None:
    """Steps after the checkpoint are made again: what was noted of them no longer counts."""
    journal.step = _whole(values.get("step"))
    lists = {name: texts(values.get(name), most=100) for name in ("restored", "not_restored")}
    journal.resumed, journal.finished, journal.trouble = {"step": journal.step, **lists}, None, None
    while journal.steps and journal.steps[-1] > journal.step:
        for series in (journal.steps, journal.losses, journal.seconds):
            series.pop()
    journal.samples = [sample for sample in journal.samples if sample.step <= journal.step]
    journal.validation = [item for item in journal.validation if item[0] <= journal.step]


def _take_phase(journal: Journal, values: dict) -> None:
    journal.finished = None  # it goes on
    name = text(values.get("name", ""), most=100)
    journal.phase = Phase(name, _whole(values.get("done")), _whole(values.get("total")))


def _take_step(journal: Journal, values: dict) -> None:
    journal.finished = None
    journal.step = _whole(values.get("step"))
    journal.total_steps = _whole(values.get("total_steps")) or journal.total_steps
    journal.epoch = _whole(values.get("epoch")) or journal.epoch
    journal.learning_rate = finite(values.get("learning_rate")) or journal.learning_rate
    loss, seconds = (
        finite(values.get("loss"), low=-LARGEST, high=LARGEST),
        finite(values.get("seconds"), low=0, high=1e9),
    )
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
    if path is not None:
        _keep(journal.samples, Sample(_whole(values.get("step")), text(values.get("prompt", ""), most=2000), path))


def _take_validation(journal: Journal, values: dict) -> None:
    loss = finite(values.get("loss"), low=-LARGEST, high=LARGEST)
    if loss is not None:
        _keep(journal.validation, (_whole(values.get("step")), loss), most=KEPT_VALIDATIONS)


def _take_checkpoint(journal: Journal, values: dict) -> None:
    path = _path(journal, values)
    if path is not None:
        _keep(journal.checkpoints, (_whole(values.get("step")), path))


def _take_saved(journal: Journal, values: dict) -> None:
    path = _path(journal, values)
    if path is not None and path not in journal.saved:
        journal.saved[path] = None
        while len(journal.saved) > KEPT_FILES:
            del journal.saved[next(iter(journal.saved))]


def _take_memory(journal: Journal, values: dict) -> None:
    told = {name: finite(value, low=0, high=2**60) for name, value in values.items() if name.endswith("_bytes")}
    known = {name: int(value) for name, value in told.items() if value is not None}
    journal.memory = dict([*(journal.memory | known).items()][:MOST_FIGURES])


def _take_note(journal: Journal, values: dict) -> None:
    _keep(journal.notes, text(values.get("message", ""), most=2000), most=KEPT_NOTES)


def _take_trouble(journal: Journal, values: dict) -> None:
    journal.trouble = trouble_from_values(values)


def _take_finished(journal: Journal, values: dict) -> None:
    journal.finished = {"reason": text(values.get("reason", ""), most=100)}
    journal.step = _whole(values.get("step")) or journal.step


def _keep(kept: list, one: object, *, most: int = KEPT_FILES) -> None:
    """Adds to a list of the newest; now and then what is too much goes, so that a long list costs no more than a short
    one."""
    kept.append(one)
    if len(kept) >= 2 * most:
        del kept[:-most]


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


def _path(journal: Journal, values: dict) -> Path | None:
    """The path in an event, sought in the run's folder where that lies now, even if it lay elsewhere when it was
    written.

    None for one that leads out of the folder: nothing is looked for where only a stranger's file says that there is
    something.
    """
    said = values.get("path")
    if not isinstance(said, str) or not said or "\0" in said or len(said) > MOST_PATH:
        return None
    path, home = Path(said), str(journal.folder)
    if journal.folder not in path.parents and journal.folder.name in path.parts:
        at = len(path.parts) - 1 - path.parts[::-1].index(journal.folder.name)
        path = Path(*path.parts[at + 1 :])
    named = os.path.normpath(journal.folder / path)
    return Path(named) if named.startswith(home + os.sep) else None


def _whole(value) -> int:
    return whole(int(value) if finite(value) is not None else None) or 0


def log_tail(path: Path, *, lines: int = 200) -> str:
    """The last `lines` lines of a log as a terminal would show them: carriage returns folded, colours taken out.

    At most the last 64 KiB are read, however long the log is. A log that is not there is empty.
    """
    if not is_file(path):
        return ""
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
