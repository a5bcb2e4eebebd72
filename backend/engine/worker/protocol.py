"""The worker's side of the wire: commands come in on stdin, events go out on a private copy of stdout.

Taken before any library is imported, so that whatever a library prints goes to the log (stderr) and never between two
events.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading

from backend.schema.messages import Trouble, to_line

LONGEST_LINE_BYTES = 4 * 2**20
BEAT_SECONDS = 5.0
PATIENCE_SECONDS = 5.0  # after the end of stdin, for work that does not look up


class Wire:
    """One reader thread fills `commands`; `say` may be called from any thread."""

    def __init__(self):
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._known: set[str] = set()  # ids at work or waiting
        self._cancelled: set[str] = set()
        self.ended = threading.Event()
        self.commands: queue.Queue[dict | None] = queue.Queue()  # None: stdin has ended
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def say(self, event: str, *, id: str = "", **values) -> None:
        """Writes one event. Where nobody listens any more the process ends."""
        line = to_line(event, id=id, **values).encode("utf-8", errors="replace")
        try:
            with self._lock:
                while line:
                    line = line[self._out.write(line) :]
        except (BrokenPipeError, OSError):
            os._exit(0)

    def beat(self) -> None:
        """From now on says "alive" every `BEAT_SECONDS`, whatever the work does: silence then means that the process
        stands still."""

        def tell() -> None:
            while not self.ended.wait(BEAT_SECONDS):
                self.say("alive")

        threading.Thread(target=tell, name="beat", daemon=True).start()

    def say_trouble(self, trouble: Trouble, *, id: str = "") -> None:
        self.say("trouble", id=id, **trouble.to_values())

    def should_stop(self, id: str) -> bool:
        """Whether the work with this id is no longer wanted."""
        return self.ended.is_set() or id in self._cancelled

    def done(self, id: str) -> None:
        """Forgets an id that was answered."""
        with self._lock:
            self._known.discard(id)
            self._cancelled.discard(id)

    def _read(self) -> None:
        while line := sys.stdin.buffer.readline(LONGEST_LINE_BYTES):
            if line.strip():
                self._take(line)
        self.ended.set()
        self.commands.put(None)
        threading.Timer(PATIENCE_SECONDS, os._exit, (0,)).start()

    def _take(self, line: bytes) -> None:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not isinstance(values.get("command"), str):
            self.say_trouble(Trouble("bad_command", f"This line is no command: {line[:80]!r}."))
            return
        values["id"] = str(values.get("id", ""))
        if values["command"] == "cancel":
            with self._lock:
                if values["id"] in self._known:
                    self._cancelled.add(values["id"])
            return
        with self._lock:
            self._known.add(values["id"])
        self.commands.put(values)
