"""What the end of a process means, in a sentence."""

from __future__ import annotations

import signal
from pathlib import Path

from backend.host.journal import log_tail
from backend.schema.messages import Trouble

MEMORY_HINT = "Most often the system's memory ran out: a smaller picture, or closing other programs, helps."


def death_of_worker(code: int, *, ready: bool, working: bool, log: Path) -> Trouble:
    """A worker that ended by itself with exit status `code` (negative: minus the signal)."""
    how = cause(code)
    detail = log_tail(log, lines=40)
    if not ready:
        return Trouble(
            "worker_died",
            f"The engine could not start: its process {how}.",
            hint="Its last words are below.",
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
