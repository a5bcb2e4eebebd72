"""Process records: who a process is (pid and start time), whether that very process lives, and `process.json` on disk.

A process is known by its pid *and* its start time, so that a recycled pid is never taken for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from backend.schema.json_values import LAST_TIME, finite, texts, whole
from backend.schema.messages import Trouble
from backend.schema.untrusted import read_object
from backend.system.atomic_files import write_text

RECORD = "process.json"
SAME_START_SECONDS = 2.0  # start times are derived from the boot time, which the kernel rounds to seconds
MOST_RECORD_BYTES = 2**20
LAST_PID = 2**62
SECRET_FLAGS = ("--auth",)  # of Loft's own commands; what follows them is never kept


@dataclass(frozen=True)
class Process:
    """A process that was started at `created` (seconds since the epoch, as psutil reports it)."""

    pid: int
    created: float
    argv: tuple[str, ...] = ()


NOBODY = Process(0, 0.0)


def identify(pid: int, argv: Sequence[str] = ()) -> Process:
    """The running process `pid`; one that is gone already gets start time 0, which no process has."""
    try:
        return Process(pid, psutil.Process(pid).create_time(), tuple(str(word) for word in argv))
    except psutil.Error:
        return Process(pid, 0.0, tuple(str(word) for word in argv))


def this_process() -> Process:
    return identify(os.getpid(), without_secrets(sys.orig_argv))


def without_secrets(argv: Sequence[str]) -> list[str]:
    """The command line with "***" for every password in it."""
    hidden, after = [], False
    for word in argv:
        flag, equals, _ = word.partition("=")
        hidden.append("***" if after else f"{flag}=***" if equals and flag in SECRET_FLAGS else word)
        after = word in SECRET_FLAGS
    return hidden


def alive(process: Process) -> bool:
    """Whether that very process still runs; a zombie does not."""
    return find(process) is not None


def find(process: Process) -> psutil.Process | None:
    """psutil's handle of that very process; None if it is gone, a zombie, or another one under the same pid."""
    if not 0 < process.pid < 2**31:  # in a broken file it may be any number
        return None
    try:
        found = psutil.Process(process.pid)
        if found.status() == psutil.STATUS_ZOMBIE or not _same(found, process):
            return None
        return found
    except psutil.Error:
        return None


def _same(found: psutil.Process, process: Process) -> bool:
    if abs(found.create_time() - process.created) < SAME_START_SECONDS:
        return True
    # A clock that was set shifts every start time; the same command line under the same pid is still that process.
    return process.created > 0 and bool(process.argv) and without_secrets(command_line(found)) == list(process.argv)


def command_line(found: psutil.Process) -> list[str]:
    """Its argv as the system tells it; empty where the system does not."""
    try:
        return found.cmdline()
    except psutil.Error:
        return []


def record_text(process: Process, **more: object) -> str:
    """`process` as the JSON text of a `process.json`."""
    return json.dumps({"pid": process.pid, "created": process.created, "argv": list(process.argv), **more}) + "\n"


def write_record(path: Path, process: Process, **more: object) -> None:
    """Writes `process.json`: pid, start time, command line, and `more` values. Raises OSError as writing does."""
    write_text(path, record_text(process, **more))


def read_record(path: Path) -> tuple[Process, dict] | None:
    """The process and the further values in a `process.json`; None if there is none that can be read.

    The file decides nothing by itself: it may have come with a folder from elsewhere. `processes.child` says whether
    the process is ours.
    """
    try:
        values = read_object(path, most=MOST_RECORD_BYTES)
    except Trouble:
        return None
    pid = whole(values.pop("pid", None), low=-LAST_PID, high=LAST_PID)
    created = finite(values.pop("created", None), low=0, high=LAST_TIME)
    if pid is None or created is None:
        return None
    return Process(pid, created, tuple(texts(values.pop("argv", ())))), values
