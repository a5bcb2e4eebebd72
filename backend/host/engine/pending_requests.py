"""Requests that wait, as files: `user/queue/<id>.json`.

After a restart they come back, held until a person releases them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path

from backend.schema.json_values import LAST_TIME, finite, printable
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, request_from_values, request_to_values
from backend.schema.untrusted import is_folder, read_object
from backend.system.atomic_files import not_written, write_text


@dataclass(frozen=True)
class Waiting:
    """A request that has not been answered yet. `held`: not begun before a person says so."""

    id: str
    request: GenerationRequest
    held: bool = False
    submitted_at: float = 0.0


def new(request: GenerationRequest) -> Waiting:
    """`request` under a new id; ids sort by time."""
    now = time.time()
    return Waiting(f"{int(now * 1e6):016d}-{secrets.token_hex(3)}", request, submitted_at=now)


def save(waiting: Waiting, folder: Path) -> None:
    """Writes the file of a waiting request. Raises Trouble("not_written")."""
    values = {"id": waiting.id, "submitted_at": waiting.submitted_at, "request": request_to_values(waiting.request)}
    try:
        write_text(folder / f"{waiting.id}.json", json.dumps(values, ensure_ascii=False, indent=2) + "\n")
    except OSError as error:
        raise not_written("The request", error) from None


def remove(id: str, folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / f"{id}.json").unlink(missing_ok=True)


def load(folder: Path) -> list[Waiting]:
    """All requests in `folder`, the oldest first, each held.

    Files that hold none are renamed to `.bad` and left out.
    """
    found = []
    for path in sorted(folder.glob("*.json")) if is_folder(folder) else ():
        try:
            values = read_object(path)
            request = request_from_values(dict(values["request"]))
            at = finite(values.get("submitted_at"), low=0, high=LAST_TIME) or 0.0
            found.append(Waiting(printable(path.stem), request, held=True, submitted_at=at))
        except (ValueError, KeyError, TypeError, Trouble):
            with contextlib.suppress(OSError):
                path.replace(path.with_suffix(".bad"))
    return found


def held(items: tuple[Waiting, ...]) -> tuple[Waiting, ...]:
    return tuple(replace(item, held=True) for item in items)


def released(items: tuple[Waiting, ...], id: str | None) -> tuple[Waiting, ...]:
    """`items` with the one called `id`, or all of them, no longer held."""
    return tuple(replace(item, held=item.held and id not in (None, item.id)) for item in items)


def without(items: tuple[Waiting, ...], id: str) -> tuple[Waiting, ...]:
    return tuple(item for item in items if item.id != id)
