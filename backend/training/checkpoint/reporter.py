"""Logging of a run: events.jsonl, loss.csv, TensorBoard, Weights & Biases and SwanLab, and lines for the console."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import sys
import threading
import time
from pathlib import Path

from backend.schema.messages import Trouble, from_line, to_line
from backend.system.atomic_files import write_text

MAIN_RANK_SECONDS = 15.0  # how long another rank waits for the main one to say what went wrong


class Reporter:
    """Writes `events.jsonl` (and `loss.csv`) into a run's folder. A silent one, for other ranks, writes only a trouble
    of its own."""

    def __init__(self, folder: Path, *, silent: bool = False, table: bool = True):
        self.folder, self.silent, self.table = folder, silent, table
        self.trackers: list = []
        self.now = ""  # the phase
        self._spoke, self._began = 0.0, time.time()
        self._lock = threading.Lock()

    def event(self, event: str, /, **values) -> None:
        if self.silent:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock:  # what saves beside the steps speaks too
            _append(self.folder / "events.jsonl", to_line(event, **values))

    def say(self, sentence: str) -> None:
        """A line for the log."""
        if not self.silent:
            print(sentence, flush=True)

    def note(self, sentence: str, **values) -> None:
        self.event("note", message=sentence, **values)
        self.say(sentence)

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        self.now = name
        self.event("phase", name=name, done=done, total=total)
        if done == 0:
            self.say(f"{name} …")

    def step(
        self, *, step: int, total_steps: int, epoch: int, loss: float, learning_rate: float, seconds: float, **more
    ) -> None:
        if self.silent:
            return
        self.event(
            "step",
            step=step,
            total_steps=total_steps,
            epoch=epoch,
            loss=loss,
            learning_rate=learning_rate,
            seconds=seconds,
            **more,
        )
        if self.table:
            self._row(step=step, epoch=epoch, loss=loss, learning_rate=learning_rate, seconds=seconds)
        for board in self.trackers:
            board(step, {"loss": loss, "learning_rate": learning_rate})
        if time.monotonic() - self._spoke > 5 or step in (1, total_steps):
            self._spoke = time.monotonic()
            self.say(f"step {step}/{total_steps}  loss {loss:.4f}  rate {learning_rate:.3g}  {seconds:.2f} s")

    def rewind(self, step: int) -> None:
        """Takes the steps after `step` out of the table: a resumed run makes them again. The events tell both."""
        path = self.folder / "loss.csv"
        if self.silent or not path.exists():
            return
        head, *rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [
            row
            for row in rows
            if row.endswith("\n") and row.partition(",")[0].isdigit() and int(row.partition(",")[0]) <= step
        ]
        write_text(path, head + "".join(kept), durable=True)

    def trouble(self, trouble: Trouble) -> None:
        """The first rank that ends takes the others with it: one that is silent lets the main one speak first, if it
        has to."""
        if not self.silent:
            self.event("trouble", **trouble.to_values())
        elif not self._main_rank_spoke():
            Reporter(self.folder).event("trouble", **trouble.to_values())
        print(str(trouble), file=sys.stderr, flush=True)

    def _main_rank_spoke(self) -> bool:
        path, end = self.folder / "events.jsonl", time.monotonic() + MAIN_RANK_SECONDS
        while time.monotonic() < end:
            lines = path.read_text(encoding="utf-8").splitlines()[-20:] if path.exists() else []
            events = [event for event in map(from_line, lines) if event is not None]
            if any(event.event == "trouble" and event.time >= self._began for event in events):
                return True
            time.sleep(0.1)
        return False

    def _row(self, **values) -> None:
        path = self.folder / "loss.csv"
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        if not path.exists():
            writer.writerow(values)
        writer.writerow(values.values())
        _append(path, text.getvalue())


def _append(path: Path, text: str) -> None:
    """A full disk loses lines of the log, not the run."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        print(f"{path.name} could not be written: {error}", file=sys.stderr, flush=True)


def add_trackers(reporter: Reporter, output, *, config: dict) -> None:
    """Connects the loggers that `output` asks for. Raises Trouble where the package of one is not installed."""
    if output.enable_tensorboard_log:
        writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(reporter.folder / "tensorboard"))
        reporter.trackers.append(
            lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()]
        )
    if output.enable_wandb_log:
        run = _package("wandb", "wandb").init(
            project=output.wandb_project, name=output.name, config=config, dir=str(reporter.folder)
        )
        reporter.trackers.append(lambda step, values: run.log(values, step=step))
    if output.enable_swanlab_log:
        run = _package("swanlab", "swanlab").init(
            project=output.swanlab_project, experiment_name=output.name, config=config, logdir=str(reporter.folder)
        )
        reporter.trackers.append(lambda step, values: run.log(values, step=step))


def _package(module: str, package: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        lacking = importlib.util.find_spec(package) is None
        why = "which is not installed" if lacking else f"which cannot be imported ({error})"
        raise Trouble(
            "missing_package",
            f"Logging to {package} needs the package {package}, {why}.",
            hint=f"pip install {package}; or turn that logger off.",
        ) from None
