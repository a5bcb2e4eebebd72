"""Small files written whole or not at all."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from pathlib import Path

from backend.schema.messages import Trouble


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Puts `text` (UTF-8) under `path`: a reader sees the old content or the new, never a part. Makes the folder.

    A `private` file is readable by its owner alone from its first byte on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        mode = 0o600 if private else 0o666
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _replace(partial: Path, path: Path) -> None:
    """Windows refuses for as long as somebody reads the old file, which is a moment."""
    for _ in range(25 if sys.platform == "win32" else 0):
        try:
            partial.replace(path)
            return
        except PermissionError:
            time.sleep(0.02)
    partial.replace(path)


def not_written(what: str, error: OSError) -> Trouble:
    """Why `what` could not be written, in a sentence."""
    hint = "Free some space and try again." if error.errno == errno.ENOSPC else "See whether the folder may be written."
    return Trouble("not_written", f"{what} could not be written: {error.strerror or error}.", hint=hint)
