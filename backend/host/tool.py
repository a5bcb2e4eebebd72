"""One LoRA tool at a time as a process of its own: started, watched through its log, cancelled. It survives a reload of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backend.host import processes
from backend.host.files import write_text
from backend.host.journal import log_tail
from backend.schema.messages import Trouble
from backend.schema.places import Places

MODULE = "backend.engine.lora_tools"
MARK = "tool"


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


def start(arguments: Sequence[str], *, out: Path | None, places: Places) -> None:
    """Starts `lora_tools` with `arguments` (the tool's name first) and returns. Raises Trouble("already_running")."""
    if (now := read(places)) is not None and now.live:
        raise Trouble("already_running", f"The tool {now.tool} is at work.", hint="Wait for it, or cancel it.")
    folder = _folder(places)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.txt").unlink(missing_ok=True)
    process = processes.start(
        [*processes.PYTHON, "-m", MODULE, *arguments],
        log=folder / "log.txt",
        cwd=places.root,
        env=processes.child_environment(places.root),
        mark=_mark(places),
    )
    write_text(folder / "process.json", processes.to_text(process, tool=arguments[0], out=str(out or "")))


def read(places: Places) -> ToolRun | None:
    """How the newest use of a tool stands; None if there was none."""
    known = processes.from_file(_folder(places) / "process.json")
    if known is None:
        return None
    process, more = known
    live = processes.alive(process)
    out = Path(more["out"]) if more.get("out") else None
    lines = [line for line in log_tail(_folder(places) / "log.txt", lines=20).splitlines() if line.strip()]
    # The times of files may be coarser than those of processes.
    done = not live and out is not None and out.is_file() and out.stat().st_mtime >= process.created - 2
    return ToolRun(str(more.get("tool", "")), out, live, done, lines[-1] if lines else "")


def cancel(places: Places) -> None:
    """Ends the tool that is at work; tools write their files whole or not at all."""
    known = processes.from_file(_folder(places) / "process.json")
    if known is not None:
        processes.end_tree(known[0], grace_seconds=2.0, mark=_mark(places))
        _clear_partial(known[1].get("out"))


def _clear_partial(out: str | None) -> None:
    """Where a process cannot be asked to tidy up (Windows), what it was writing is cleared away after it."""
    for left in Path(out).parent.glob(f".{Path(out).name}.*.tmp") if out else ():
        left.unlink(missing_ok=True)


def _mark(places: Places) -> str:
    return f"{MARK}:{places.root.resolve()}"
