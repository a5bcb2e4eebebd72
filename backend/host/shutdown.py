"""How the studio learns that it shall end, and how it ends what it started."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from backend.host import background_estimates
from backend.host.engine import worker_process
from backend.host.process.data_folder_lock import holder
from backend.host.process.processes import SUPERVISED
from backend.host.runs import runs
from backend.schema.json_values import printable
from backend.schema.paths import Places

RUN_GRACE_SECONDS = 20.0


class Ending:
    """`asked` is set once somebody wants the studio to end, `hurry` when it is asked for again.

    Somebody: Ctrl-C, SIGTERM, a closed terminal, or, under `launch.py`, the end of stdin, which also comes when the
    launcher is killed. To be made in the main thread, before anything slow.
    """

    def __init__(self):
        self.asked = threading.Event()
        self.hurry = threading.Event()
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_: self.ask())
        if os.environ.get(SUPERVISED):
            threading.Thread(target=self._watch_stdin, name="stdin", daemon=True).start()

    def ask(self) -> None:
        (self.hurry if self.asked.is_set() else self.asked).set()

    def _watch_stdin(self) -> None:
        """Every byte asks once; the end asks too, but never hurries."""
        while True:
            try:
                data = os.read(0, 1)
            except OSError:
                data = b""
            if not data:
                return self.asked.set()
            self.ask()

    def wait(self) -> None:
        """Until it is asked for. Wakes now and then, without which Windows delivers no Ctrl-C."""
        while not self.asked.wait(0.5):
            continue


def end_all(engine, places: Places, ending: Ending) -> list[str]:
    """Ends every run that a page started, the worker and the helpers; says so on stdout where there is something to
    wait for.

    What fails with one of them keeps none of the others from being ended. Returns what could not be ended, in words.
    """
    left = []
    if _tried("the engine", engine.stop, left) is False:
        left.append("the engine's worker")
    _tried("the helpers", lambda: background_estimates.end(places), left)
    mine = _tried("training runs", lambda: runs.ours_at_work(places), left) or []
    if mine:
        print(
            f"Asking {len(mine)} training run{'s' if len(mine) > 1 else ''} to save and end "
            f"(up to {RUN_GRACE_SECONDS:.0f} s; Ctrl-C again ends at once).",
            flush=True,
        )
    stop = _tried(
        "training runs", lambda: runs.stop_all(places, grace_seconds=RUN_GRACE_SECONDS, hurry=ending.hurry), left
    )
    left += [f"the run {printable(folder.name)}" for folder in (stop[1] if stop else ())]
    return _told(left)


def _tried(what: str, act: Callable, left: list[str]):
    """What `act` returns; a failure of any kind is noted in `left`, for the others are still to be ended."""
    try:
        return act()
    except Exception as error:
        left.append(f"{what} ({type(error).__name__}: {error})")
        return None


def _told(left: list[str]) -> list[str]:
    if left:
        print(f"Could not be ended: {', '.join(left)}.", file=sys.stderr, flush=True)
    return left


def sweep(places: Places) -> list[str]:
    """Ends at once what a studio that could not end it has left: its worker and the runs that were started from its
    page.

    Nothing where another studio that lives has the data folder. Returns what could not be ended, in words.
    """
    if holder(places):
        return []
    left: list[str] = []
    _tried("the engine's worker", lambda: worker_process.end_left_behind(places), left)
    _tried("the helpers", lambda: background_estimates.end(places), left)
    stop = _tried("training runs", lambda: runs.stop_all(places, grace_seconds=0), left)
    left += [f"the run {printable(folder.name)}" for folder in (stop[1] if stop else ())]
    return _told(left)


if __name__ == "__main__":
    sys.exit(1 if sweep(Places(Path(sys.argv[1]))) else 0)
