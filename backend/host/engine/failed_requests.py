"""Requests that failed, as files: `user/failed/<id>.json`.

They stay, with what went wrong, until a person has read that.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from backend.host.engine.snapshot import Answer
from backend.schema.json_values import LAST_TIME, finite, printable
from backend.schema.messages import Trouble, trouble_from_values
from backend.schema.request import request_from_values, request_to_values
from backend.schema.untrusted import is_folder, read_object
from backend.system.atomic_files import write_text

KEPT = 20


def save(answer: Answer, folder: Path) -> None:
    """Writes the file of an answer that is a trouble.

    A full disk loses the file; the page tells the trouble all the same.
    """
    assert answer.trouble is not None, "only a failed request is kept"
    values = {
        "ended_at": answer.ended_at,
        "request": request_to_values(answer.request),
        "trouble": answer.trouble.to_values(),
    }
    with contextlib.suppress(OSError):
        write_text(folder / f"{answer.id}.json", json.dumps(values, ensure_ascii=False, indent=2) + "\n")


def remove(id: str, folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / f"{id}.json").unlink(missing_ok=True)


def load(folder: Path) -> tuple[Answer, ...]:
    """The newest `KEPT`, the oldest first. Older files are removed, and those that hold no failure."""
    found = []
    for path in sorted(folder.glob("*.json"), reverse=True) if is_folder(folder) else ():
        answer = _read(path) if len(found) < KEPT else None
        if answer is None:
            remove(path.stem, folder)
        else:
            found.append(answer)
    return tuple(reversed(found))


def _read(path: Path) -> Answer | None:
    try:
        values = read_object(path)
        request, trouble = request_from_values(dict(values["request"])), trouble_from_values(dict(values["trouble"]))
        at = finite(values.get("ended_at"), low=0, high=LAST_TIME) or 0.0
        return Answer(printable(path.stem), request, trouble=trouble, ended_at=at)
    except (ValueError, KeyError, TypeError, Trouble):
        return None
