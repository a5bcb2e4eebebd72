"""The one error that users see, and the JSON lines that processes exchange."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from backend.schema.json_values import LAST_TIME, finite, parse_json, text

MOST_SAID, MOST_DETAIL = 4000, 200_000  # characters of what another process says


class Trouble(Exception):
    """Something that a person must hear about, in words that help.

    `kind` is a short stable word for programs ("missing_file", "out_of_memory", ...), `message` one sentence that names
    what is wrong and with which value, `hint` what to do about it, `detail` the technical remainder (may be long),
    `setting` the name of the setting that is to be changed, where it is one: a form says the sentence at its field.
    """

    path: Path | None = None  # the file that it is about, in a listing of files

    def __init__(self, kind: str, message: str, *, hint: str = "", detail: str = "", setting: str = ""):
        super().__init__(message)
        self.kind, self.message, self.hint, self.detail, self.setting = kind, message, hint, detail, setting

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self):
        return (_rebuild_trouble, (self.kind, self.message, self.hint, self.detail, self.setting))

    def to_values(self) -> dict[str, str]:
        return {"kind": self.kind, "message": self.message, "hint": self.hint, "detail": self.detail}


def _rebuild_trouble(kind: str, message: str, hint: str, detail: str, setting: str) -> Trouble:
    return Trouble(kind, message, hint=hint, detail=detail, setting=setting)


def trouble_from_values(values: dict) -> Trouble:
    """The inverse of `Trouble.to_values`; missing fields become empty."""
    kind = text(values.get("kind", "unknown"), most=100) or "unknown"
    message, hint = (text(values.get(name, ""), most=MOST_SAID) for name in ("message", "hint"))
    return Trouble(kind, message, hint=hint, detail=text(values.get("detail", ""), most=MOST_DETAIL))


@dataclass(frozen=True)
class Event:
    """One line of a worker's answer or of a run's `events.jsonl`: a name, the id it belongs to, and its values."""

    event: str
    id: str = ""
    time: float = 0.0
    values: dict = field(default_factory=dict)


def to_line(event: str, *, id: str = "", **values) -> str:
    """One JSON line (with its newline) for `event`; the time (seconds since the epoch) is added here."""
    return json.dumps({"event": event, "id": id, "time": time.time(), **values}, ensure_ascii=False) + "\n"


def from_line(line: str) -> Event | None:
    """The event in `line`, or None for a line that is not one (a torn last line, a stray print)."""
    try:
        values = parse_json(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("event"), str):
        return None
    return Event(
        event=values.pop("event"),
        id=text(values.pop("id", "")),
        time=finite(values.pop("time", 0.0), low=0, high=LAST_TIME) or 0.0,
        values=values,
    )


def to_json(record) -> str:
    """A frozen dataclass as indented JSON text, for files that people may read."""
    return json.dumps(asdict(record), ensure_ascii=False, indent=2) + "\n"


class Cancelled(Exception):
    """The caller asked to stop; nothing was made."""
