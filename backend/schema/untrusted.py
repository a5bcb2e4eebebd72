"""Reads what others may have written: files, JSON and paths that nobody vouches for, in bounded time and memory.

Downloads, run folders, pictures and what a crash or an editor left may hold anything. What cannot be read is one
`Trouble` or a plain "no"; never an error of the system's, a process that hangs on a pipe, or a page that cannot be
sent.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from backend.schema.json_values import is_printable, parse_json, printable
from backend.schema.messages import Trouble

MOST_BYTES = 16 * 2**20
MOST_SHOWN = 80  # characters of a stranger's name in a sentence

FileName = str | os.PathLike
Kind = TypeVar("Kind")


# Paths


def is_file(path: FileName) -> bool:
    """Whether `path` is a regular file (links followed).

    False for devices, pipes and sockets, and for a name that no file can have.
    """
    return _is(path, stat.S_ISREG)


def expanded(path: FileName) -> Path:
    """`path` with a leading `~` put for a home folder; as it is where no user has that name."""
    return Path(os.path.expanduser(path))  # `Path.expanduser` raises for a name of nobody's


def is_folder(path: FileName) -> bool:
    """Whether `path` is a folder (links followed). False for a name that no folder can have."""
    return _is(path, stat.S_ISDIR)


def exists(path: FileName) -> bool:
    """Whether anything lies at `path`. False for a name that nothing can have."""
    return _is(path, lambda mode: True)


def _is(path: FileName, kind) -> bool:
    if not isinstance(path, FileName):  # a number would be taken for an open file
        return False
    try:
        return kind(os.stat(path).st_mode)
    except (OSError, ValueError):  # too long, a NUL, half a character, a part of it that is no folder
        return False


def known_file(path: FileName, folders: Iterable[FileName]) -> Path | None:
    """The regular file called `path`, if it lies in one of `folders` or below, links followed; a relative name is
    looked for in each of them.

    What lies elsewhere is not asked for at all: neither opened nor resolved nor stat-ed. So a network share, a device
    or a pipe is never touched because a stranger wrote its name down.
    """
    return next((found for found in _inside(path, folders) if is_file(found)), None)


def known_entry(path: FileName, folders: Iterable[FileName]) -> Path | None:
    """As `known_file`, for anything that lies there, a folder too."""
    return next((found for found in _inside(path, folders) if exists(found)), None)


def is_inside(path: FileName, folders: Iterable[FileName]) -> bool:
    """Whether `path` lies in one of `folders` or below, or is one, links followed.

    Paths elsewhere are not looked at.
    """
    return any(True for _ in _inside(path, folders))


def _inside(path: FileName, folders: Iterable[FileName]):
    if not isinstance(path, FileName):
        return
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip() or "\0" in text or text.startswith("~"):
        return
    for folder in folders:
        home = os.path.abspath(folder)
        try:
            real_home = os.path.realpath(home)
            named = os.path.normpath(os.path.join(home, text))
            if not (_is_under(named, home) or _is_under(named, real_home)):
                continue
            if _is_under(os.path.realpath(named), real_home):
                yield Path(named)
        except (OSError, ValueError):
            continue


def _is_under(path: str, folder: str) -> bool:
    path, folder = os.path.normcase(path), os.path.normcase(folder)
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def name_of(path: object) -> str:
    """The last part of a stranger's path, of this system or another, fit to be shown."""
    text = str(path).replace("\\", "/").rstrip("/")
    return printable(text.rsplit("/", 1)[-1])[:MOST_SHOWN]


def unnamed(names: Iterable[FileName]) -> list[str]:
    """Those of the names that are not in UTF-8, fit to be shown: no page and no JSON file could give one of them back
    as it is."""
    return [name_of(name) for name in names if not is_printable(os.fspath(name))]


def left_out_words(names: Iterable[str], where: object = "") -> str:
    """A sentence about entries of a folder that are left out because of their names, as `unnamed` gives them; "" where
    there are none."""
    found = sorted(names)
    if not found:
        return ""
    place = f" in {name_of(where)}" if where else ""
    one = len(found) == 1
    some = f"{found[0]}{place} is" if one else f"{len(found)} entries{place} ({found[0]} is one) are"
    return (
        f"{some} left out: {'its name is' if one else 'their names are'} not in UTF-8. Rename "
        f"{'it' if one else 'them'}."
    )


# Files


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file.

    Raises Trouble("unreadable") for anything else, and for one with more than `most` bytes.
    """
    try:
        seen = os.stat(path)
        if not stat.S_ISREG(seen.st_mode):
            raise Trouble("unreadable", f"{name_of(path)} is no file that can be read.")
        if seen.st_size > most:
            raise _too_long(path, most)
        # It may have become a pipe since: opened so, that does not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(most + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except FileNotFoundError:
        raise Trouble("missing_file", f"There is no {name_of(path)}.") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or str(error)
        raise Trouble("unreadable", f"{name_of(path)} cannot be read: {printable(why)}.") from None
    if len(data) > most:  # it has grown, or its size is not told
        raise _too_long(path, most)
    return data


def _too_long(path: Path, most: int) -> Trouble:
    return Trouble("unreadable", f"{name_of(path)} has more than {most / 2**20:g} MiB, too many for what it is.")


def parsed(text: str | bytes, kind: type[Kind], *, where: FileName) -> Kind:
    """The JSON value in `text`, which lies at `where` and is a `kind`. Raises Trouble("unreadable")."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise Trouble("unreadable", f"{name_of(where)} cannot be read: {printable(error)[:200]}.") from None
    if not isinstance(value, kind):
        raise Trouble("unreadable", f"{name_of(where)} is {type(value).__name__}, not {kind.__name__}.")
    return value


def read_json(path: Path, *, most: int = MOST_BYTES) -> object:
    """The value in a JSON file. Raises Trouble("missing_file" | "unreadable")."""
    data = read_bytes(path, most=most)
    try:
        return parse_json(data)
    except ValueError as error:
        raise Trouble("unreadable", f"{name_of(path)} cannot be read: {printable(error)[:200]}.") from None


def read_object(path: Path, *, most: int = MOST_BYTES) -> dict:
    """The JSON object in a file. Raises Trouble("missing_file" | "unreadable")."""
    value = read_json(path, most=most)
    if not isinstance(value, dict):
        raise Trouble("unreadable", f"{name_of(path)} does not hold a JSON object.")
    return value


def read_object_or_empty(path: Path, *, most: int = MOST_BYTES) -> dict:
    """As `read_object`; empty where there is none: for what is only remembered."""
    try:
        return read_object(path, most=most)
    except Trouble:
        return {}
