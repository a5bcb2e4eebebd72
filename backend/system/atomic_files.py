"""Atomic writes: a file or folder is whole under its name or not there; written to a temporary name, synced, renamed.

Every module that writes a file which somebody may read, or which may be there already, writes it here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backend.schema.messages import Trouble

RENAME_TRIES, RENAME_WAIT_SECONDS = 25, 0.02  # on Windows


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False, durable: bool = True, synced: bool = True) -> Iterator[Path]:
    """A temporary path beside `path` to write to; at the end it is synced and renamed to `path`.

    On any error it is removed.

    Makes the folder. A `private` file is readable by its owner alone (mode 0600) from its first byte on. `durable`: the
    folder's list of names is synced too, so that the new name outlives a power cut. `synced` False: neither is, for a
    cache that may be torn then. Raises OSError as writing does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    try:
        if private:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        yield temporary
        if synced:
            sync(temporary)
        rename_over(temporary, path)
        if durable and synced:
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def temporary_of(path: Path) -> Path:
    """The name that `path` is written under: hidden, of this thread alone, ".PID.tmp" at its end.

    `training/checkpoint/state.py` clears away those of processes that are gone.
    """
    return path.with_name(f".{path.name}.{threading.get_native_id()}.{os.getpid()}.tmp")


def rename_over(temporary: Path, path: Path) -> None:
    """Gives a file, or a folder, its final name, over an older file of that name.

    Windows refuses (PermissionError) for as long as another program reads the old file, which is a moment.
    """
    for _ in range(RENAME_TRIES if sys.platform == "win32" else 0):
        try:
            temporary.replace(path)
            return
        except PermissionError:
            time.sleep(RENAME_WAIT_SECONDS)
    temporary.replace(path)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """As `replacing`, for a folder with plain files in it. An older folder of that name is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _sync_all([*temporary.iterdir(), temporary])
        discard_folder(folder)
        rename_over(temporary, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def discard_folder(folder: Path) -> None:
    """Deletes a folder after renaming it, so that a process killed in between leaves no half of it under its name."""
    gone = folder.with_name(f".{folder.name}.{os.getpid()}.gone.tmp")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def sync(path: Path) -> None:
    """fsync: has the system write a file (or a folder's list of names) to disk now."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_all(paths: list[Path]) -> None:
    """`sync` of all at once: a disk does that for several in hardly more time than for one."""
    try:
        with ThreadPoolExecutor(len(paths)) as pool:
            list(pool.map(sync, paths))
    except RuntimeError:  # no memory for another thread, which is no reason to lose what was written
        for path in paths:
            sync(path)


def write_bytes(path: Path, data: bytes, *, private: bool = False, durable: bool = False, synced: bool = True) -> None:
    """Puts `data` under `path`: a reader sees the old content or the new, never a part. Makes the folder.

    Options as for `replacing`. Raises OSError as writing does (`not_written` and `disk_full` are its sentences).
    """
    with replacing(path, private=private, durable=durable, synced=synced) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str, *, private: bool = False, durable: bool = False) -> None:
    """`write_bytes` of `text` in UTF-8, with its line ends as they are."""
    write_bytes(path, text.encode("utf-8"), private=private, durable=durable)


def write_json(path: Path, value: object, *, indent: int | None = None) -> None:
    """`write_text` of `value` as JSON, compact unless `indent` is given. Raises ValueError too, for what is no JSON."""
    separators = (",", ":") if indent is None else None
    write_text(path, json.dumps(value, ensure_ascii=False, indent=indent, separators=separators))


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error (or what it came from) says that the disk, or the user's share of it, is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error) or "os error 28" in str(error):
            return True
        if "PytorchStreamWriter failed" in str(error) or "unexpected pos" in str(error):
            return True  # what torch.save says when a write came back short
        error = error.__cause__ or error.__context__
    return False


def disk_full(folder: Path, what: str) -> Trouble:
    """Trouble("disk_full"): `what` could not be saved in `folder`."""
    free = shutil.disk_usage(folder).free
    return Trouble(
        "disk_full",
        f"{what} could not be saved: the disk of {folder} is full ({free / 2**20:.0f} MiB are free).",
        hint="Free some space; everything saved before is untouched.",
    )


def not_written(what: str, error: OSError) -> Trouble:
    """Trouble("not_written"): why `what` could not be written, in a sentence."""
    hint = "Free some space and try again." if is_disk_full(error) else "See whether the folder may be written."
    return Trouble("not_written", f"{what} could not be written: {error.strerror or error}.", hint=hint)
