"""One worker process: commands go in as lines, events come out as lines, everything else goes to its log."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from backend.host.process import processes
from backend.host.process.event_log import log_tail
from backend.schema.messages import Event, Trouble, from_line, trouble_from_values
from backend.schema.paths import Places
from backend.system import process_record

LOG_BYTES = 8 * 1024 * 1024
PROGRESS = ("loading", "step", "preview", "memory", "alive")  # events that answer nothing yet
MEMORY_HINT = "Most often the system's memory ran out: a smaller picture, or closing other programs, helps."


@dataclass(eq=False)
class Worker:
    """A worker that was started.

    `decided` is set once it is ready or gone; `wanted_end` says why we ended it, if we did.
    """

    process: process_record.Process
    child: subprocess.Popen[bytes]
    stdin: IO[bytes]
    stdout: IO[bytes]
    decided: threading.Event = field(default_factory=threading.Event)
    ready: bool = False
    wanted_end: str = ""  # "cancel", "stop"
    trouble: Trouble | None = None  # what it said before it was ready


def log_of(places: Places) -> Path:
    return places.user / "engine.log"


def mark_of(places: Places) -> str:
    return f"engine:{places.root.resolve()}"


def start(argv: Sequence[str], places: Places) -> Worker:
    """Starts a worker on the data folder of `places`. Raises Trouble("not_started") or OSError."""
    log = log_of(places)
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # not while another still writes to it
        if log.stat().st_size > LOG_BYTES:
            log.replace(log.with_suffix(".old.log"))
    env = processes.child_environment(places.root)
    process, child = processes.start_piped(argv, log=log, cwd=places.root, env=env, mark=mark_of(places))
    with contextlib.suppress(OSError):  # only for the next studio; a full disk must not cost the picture
        process_record.write_record(places.user / "worker.json", process)
    assert child.stdin is not None and child.stdout is not None  # `start_piped` opens both
    return Worker(process, child, child.stdin, child.stdout)


def follow(worker: Worker, on_event: Callable[[Event], None], on_end: Callable[[int], None]) -> None:
    """Reads the worker's events in a thread of its own: `on_event` for each, then `on_end` with the exit status."""

    def read() -> None:
        for line in worker.stdout:
            event = from_line(line.decode("utf-8", errors="replace"))
            if event is not None:
                on_event(event)
        code = worker.child.wait()
        for pipe in (worker.stdout, worker.stdin):
            with contextlib.suppress(OSError, ValueError):
                pipe.close()
        on_end(code)

    threading.Thread(target=read, name=f"engine-{worker.process.pid}", daemon=True).start()


def send(worker: Worker, values: dict) -> None:
    """One command. A worker that is gone or going takes none: its end is told by `follow`."""
    with contextlib.suppress(OSError, ValueError):
        worker.stdin.write((json.dumps(values, ensure_ascii=False) + "\n").encode("utf-8"))
        worker.stdin.flush()


def answered(events: Sequence[Event]) -> bool:
    """Whether the last of a command's events is its answer."""
    return bool(events) and events[-1].event not in PROGRESS


def checked(events: list[Event], command: str, *, gone: bool, timeout_seconds: float) -> list[Event]:
    """`events` of `command`, if they end with an answer.

    Raises the Trouble they end with, or Trouble("worker_died" | "timeout").
    """
    if answered(events):
        if events[-1].event == "trouble":
            raise trouble_from_values(events[-1].values)
        return events
    if gone:
        raise Trouble("worker_died", f"The engine ended while it was asked to {command}.", hint="Try again.")
    raise Trouble("timeout", f"The engine did not answer to {command} within {timeout_seconds:.0f} s.")


def end(worker: Worker, places: Places, *, patience_seconds: float) -> bool:
    """The end of stdin asks the worker to end; after the patience its tree is ended.

    Returns whether all of it is gone.
    """
    with contextlib.suppress(OSError, ValueError):
        worker.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.child.wait(timeout=patience_seconds)
    return processes.end_tree(worker.process, grace_seconds=2.0, mark=mark_of(places))


def end_left_behind(places: Places) -> None:
    """Ends a worker that a studio which was killed has left on this data folder."""
    known = process_record.read_record(places.user / "worker.json")
    if known and (worker := processes.child(known[0], mark=mark_of(places))) is not process_record.NOBODY:
        processes.end_tree(worker, grace_seconds=1.0, mark=mark_of(places))


def death(worker: Worker, code: int, places: Places, *, working: bool) -> Trouble:
    """What to say of a worker that ended by itself with exit status `code` (negative: minus the signal)."""
    how, detail = cause(code), log_tail(log_of(places), lines=40)
    if not worker.ready:
        return worker.trouble or Trouble(
            "worker_died",
            f"The engine could not start: its process {how}.",
            hint="Its last words are in the details.",
            detail=detail,
        )
    doing = "while it made the picture" if working else "while it was idle"
    hint = "The next request starts a new one."
    if code == -9:
        hint = f"{MEMORY_HINT} {hint}"
    return Trouble("worker_died", f"The engine's process {how} {doing}.", hint=hint, detail=detail)


def cause(code: int) -> str:
    """How a process with exit status `code` ended, as the rest of a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by the signal {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
