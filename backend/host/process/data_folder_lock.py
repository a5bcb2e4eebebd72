"""One studio for a data folder: two would end each other's worker and answer each other's queue.

The claim is a lock of the system's on a file in the data folder itself, so that it ends with its holder however that
ends, two that start at once cannot both have it, and it is not lost with `user/`, where `studio.json` only says who the
holder is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from backend.schema.json_values import whole
from backend.schema.messages import Trouble
from backend.schema.paths import Places
from backend.system import process_record
from backend.system.atomic_files import write_text

LOCK = ".loft.lock"
_held: dict[str, FileLock] = {}  # by data folder: a lock is the process's, and ends with it


def holder(places: Places) -> tuple[process_record.Process, int] | None:
    """The studio that has the data folder, if it lives and is not this process, and its port; `NOBODY` and 0 where it
    has not said who it is."""
    if _key(places) in _held:
        return None
    lock = _taken(places)
    if lock is not None:
        lock.release()
        return None
    known = process_record.read_record(places.user / "studio.json")
    if known is None or not process_record.alive(known[0]):
        return process_record.NOBODY, 0
    return known[0], whole(known[1].get("port"), high=65535) or 0


def claim(places: Places, *, port: int) -> None:
    """Takes the data folder for this process.

    Raises Trouble("in_use") while another studio has it, Trouble("not_writable").
    """
    if _key(places) not in _held:
        lock = _taken(places)
        if lock is None:
            raise _in_use(places)
        _held[_key(places)] = lock
    try:
        text = process_record.record_text(process_record.this_process(), port=port)
        write_text(places.user / "studio.json", text, private=True)
    except OSError as error:
        release(places)
        raise _not_writable(places, error) from None


def release(places: Places) -> None:
    """Gives the data folder back."""
    lock = _held.pop(_key(places), None)
    if lock is None:
        return
    with contextlib.suppress(OSError):
        (places.user / "studio.json").unlink(missing_ok=True)
    lock.release()


def _in_use(places: Places) -> Trouble:
    process, port = holder(places) or (process_record.NOBODY, 0)
    who = f" (process {process.pid}, port {port})" if process is not process_record.NOBODY else ""
    return Trouble(
        "in_use",
        f"Loft is open already on {places.root}{who}.",
        hint="Use that page, or end it first, or give another folder with --data.",
    )


def _not_writable(places: Places, error: OSError) -> Trouble:
    return Trouble(
        "not_writable",
        f"The data folder {places.root} cannot be written: {error.strerror or error}.",
        hint="Give another folder with --data.",
    )


def _key(places: Places) -> str:
    return os.path.realpath(places.root)


def _taken(places: Places) -> FileLock | None:
    """The lock, taken; None where another process has it. Raises Trouble("not_writable")."""
    try:
        places.root.mkdir(parents=True, exist_ok=True)
        return _acquired(places.root / LOCK)
    except NotImplementedError:  # a file system without locks, as of some network drives: this machine's own has them
        digest = hashlib.sha256(_key(places).encode("utf-8", "surrogateescape")).hexdigest()[:24]
        return _acquired(Path(tempfile.gettempdir()) / f"loft-{digest}.lock")
    except OSError as error:
        raise _not_writable(places, error) from None


def _acquired(path: Path) -> FileLock | None:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock
