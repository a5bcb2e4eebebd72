"""One LoRA tool at a time as a process of its own: started, watched through its log, cancelled.

It survives a reload of the page.
"""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backend.host.process import processes
from backend.host.process.event_log import log_tail
from backend.schema.json_values import text
from backend.schema.messages import Trouble
from backend.schema.paths import Places
from backend.schema.untrusted import is_file, name_of
from backend.system import process_record
from backend.system.atomic_files import not_written, write_text

MODULE = "backend.engine.lora.tools"
MARK = "tool"
REQUEST = "request.json"


@dataclass(frozen=True)
class ToolRun:
    """The newest use of a tool: which, what it writes, whether it still runs, and what it has said last."""

    tool: str
    out: Path | None
    live: bool
    done: bool  # it ended and the file is there
    said: str


def _folder(places: Places) -> Path:
    return places.user / "tool"


def start(values: Mapping[str, object], *, out: Path | None, places: Places) -> None:
    """Starts `lora_tools` with the settings `values` ("tool" among them) and returns.

    Raises Trouble("already_running" | "not_written").

    They go by a file, as values: on a command line a field that begins with a dash would be an option.
    """
    if (now := read(places)) is not None and now.live:
        raise Trouble("already_running", f"The tool {now.tool} is at work.", hint="Wait for it, or cancel it.")
    folder = _folder(places)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").unlink(missing_ok=True)
        write_text(folder / REQUEST, json.dumps(dict(values)))
    except OSError as error:
        raise not_written("The tool's request", error) from None
    process = processes.start(
        [*processes.PYTHON, "-m", MODULE, "--request", str(folder / REQUEST)],
        log=folder / "log.txt",
        cwd=places.root,
        env=processes.child_environment(places.root),
        mark=_mark(places),
    )
    try:
        record = _folder(places) / process_record.RECORD
        process_record.write_record(record, process, tool=str(values["tool"]), out=str(out or ""))
    except OSError as error:  # one that nobody could watch or cancel must not go on
        processes.end_tree(process, grace_seconds=0, mark=_mark(places))
        raise not_written("The tool's record", error) from None


def read(places: Places) -> ToolRun | None:
    """How the newest use of a tool stands; None if there was none."""
    known = process_record.read_record(_folder(places) / process_record.RECORD)
    if known is None:
        return None
    process, more = known
    live = processes.child(process, mark=_mark(places)) is process
    out = _written(more, places)
    lines = [line for line in log_tail(_folder(places) / "log.txt", lines=20).splitlines() if line.strip()]
    # The times of files may be coarser than those of processes.
    done = not live and out is not None and is_file(out) and out.stat().st_mtime >= process.created - 2
    return ToolRun(text(more.get("tool", ""), most=100), out, live, done, lines[-1] if lines else "")


def cancel(places: Places) -> None:
    """Ends the tool that is at work; tools write their files whole or not at all."""
    known = process_record.read_record(_folder(places) / process_record.RECORD)
    if known is not None:
        processes.end_tree(processes.child(known[0], mark=_mark(places)), grace_seconds=2.0, mark=_mark(places))
        _clear_partial(_written(known[1], places))


def _written(more: dict, places: Places) -> Path | None:
    """What the record says is written: a file in the folder of LoRAs, where tools of the page write, and nowhere
    else."""
    name = name_of(more.get("out") or "")
    return places.loras / name if name and more["out"] == str(places.loras / name) else None


def _clear_partial(out: Path | None) -> None:
    """Where a process cannot be asked to tidy up (Windows), what it was writing is cleared away after it."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*.tmp") if out else ():
        with contextlib.suppress(OSError):
            left.unlink(missing_ok=True)


def _mark(places: Places) -> str:
    return f"{MARK}:{places.root.resolve()}"
