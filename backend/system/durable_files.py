"""Files that are either whole under their name or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backend.schema.messages import Trouble


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; at the end it is synced and takes the name.

    On any error it is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """The same for a folder with plain files in it. An older folder of that name is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _sync_all([*temporary.iterdir(), temporary])
        discard_folder(folder)
        temporary.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def discard_folder(folder: Path) -> None:
    """Deletes a folder that loses its name first: whoever is killed in between leaves no half of it under that name."""
    gone = folder.with_name(f".{folder.name}.{os.getpid()}.gone.tmp")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def sync(path: Path) -> None:
    """Have the system write a file (or a folder's list of names) to disk now."""
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


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


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
    """The sentence for a full disk."""
    free = shutil.disk_usage(folder).free
    return Trouble(
        "disk_full",
        f"{what} could not be saved: the disk of {folder} is full ({free / 2**20:.0f} MiB are free).",
        hint="Free some space; everything saved before is untouched.",
    )
