"""How the studio learns that it shall end, and how it ends what it started."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from backend.host import runs, tracing, worker
from backend.host.claim import holder
from backend.host.processes import SUPERVISED
from backend.schema.places import Places

RUN_GRACE_SECONDS = 20.0


class Ending:
    """`asked` is set once somebody wants the studio to end, `hurry` when it is asked for again.

    Somebody: Ctrl-C, SIGTERM, a closed terminal, or, under `launch.py`, the end of stdin, which also comes when the launcher is
    killed. To be made in the main thread, before anything slow.
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


def end_all(engine, places: Places, ending: Ending) -> None:
    """Ends the worker, the helpers and every run that a page started; says so on stdout where there is something to wait for."""
    engine.stop()
    tracing.end(places)
    live = [run for run in runs.live_runs(places) if run.live]
    if live:
        print(
            f"Asking {len(live)} training run{'s' if len(live) > 1 else ''} to save and end "
            f"(up to {RUN_GRACE_SECONDS:.0f} s; Ctrl-C again ends at once).",
            flush=True,
        )
    runs.stop_all(places, grace_seconds=RUN_GRACE_SECONDS, hurry=ending.hurry)


def sweep(places: Places) -> None:
    """Ends at once what a studio that could not end it has left: its worker and the runs that were started from its page.

    Nothing where another studio that lives has the data folder.
    """
    if holder(places):
        return
    worker.end_left_behind(places)
    tracing.end(places)
    runs.stop_all(places, grace_seconds=0)


if __name__ == "__main__":
    sweep(Places(Path(sys.argv[1])))
