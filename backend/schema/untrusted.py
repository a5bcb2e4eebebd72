"""Reads what others may have written: files, JSON and paths that nobody vouches for, in bounded time and memory.

Downloads, run folders, pictures and what a crash or an editor left may hold anything. What cannot be read is one `Trouble` or a
plain "no"; never an error of the system's, a process that hangs on a pipe, or a page that cannot be sent.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from backend.schema.messages import Trouble

MOST_BYTES = 16 * 2**20
MOST_DEPTH = 64  # levels of lists and objects inside each other
MOST_SHOWN = 80  # characters of a stranger's name in a sentence
EXACT = 2**53 - 1  # the largest whole number that every reader of JSON keeps exact
_SURROGATES = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")

FileName = str | os.PathLike


# Paths


def is_file(path: FileName) -> bool:
    """Whether `path` is a regular file (links followed). False for devices, pipes and sockets, and for a name that no file can have."""
    return _is(path, stat.S_ISREG)


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
    """The regular file called `path`, if it lies in one of `folders` or below, links followed; a relative name is looked for in each of them.

    What lies elsewhere is not asked for at all: neither opened nor resolved nor stat-ed. So a network share, a device or a pipe
    is never touched because a stranger wrote its name down.
    """
    return next((found for found in _inside(path, folders) if is_file(found)), None)


def known_entry(path: FileName, folders: Iterable[FileName]) -> Path | None:
    """As `known_file`, for anything that lies there, a folder too."""
    return next((found for found in _inside(path, folders) if exists(found)), None)


def is_inside(path: FileName, folders: Iterable[FileName]) -> bool:
    """Whether `path` lies in one of `folders` or below, or is one, links followed. Paths elsewhere are not looked at."""
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


# Text and files


def printable(text: object) -> str:
    """`text` with what UTF-8 cannot hold (half a character, a file name in another encoding) replaced: it can be sent to a page and written."""
    return _SURROGATES.sub("\ufffd", str(text))


def is_printable(text: str) -> bool:
    """Whether `text` can be sent to a page as it is and comes back the same."""
    return not _SURROGATES.search(text)


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file. Raises Trouble("unreadable") for anything else, and for one with more than `most` bytes."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Trouble("unreadable", f"{name_of(path)} is no file that can be read.")
        # It may have become a pipe since: opened so, that does not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(most + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except FileNotFoundError:
        raise Trouble("missing_file", f"There is no {name_of(path)}.") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or str(error)
        raise Trouble("unreadable", f"{name_of(path)} cannot be read: {printable(why)}.") from None
    if len(data) > most:
        raise Trouble("unreadable", f"{name_of(path)} has more than {most / 2**20:g} MiB, too many for what it is.")
    return data


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


def parse_json(text: str | bytes) -> object:
    """The value in JSON `text`, every string of it printable. Raises ValueError for what is no JSON, or nested deeper than `MOST_DEPTH`.

    Numbers may be infinite or no number (`finite`, `whole`); of repeated keys the last counts.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig", errors="replace")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _check_depth(value)
    if _ESCAPED.search(text) or _SURROGATES.search(text):
        value = _cleaned(value)
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels")


def _cleaned(value: object) -> object:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_cleaned(inner) for inner in value]
    if isinstance(value, dict):
        return {printable(key): _cleaned(inner) for key, inner in value.items()}
    return value


# Values


def finite(value: object, *, low: float = -math.inf, high: float = math.inf) -> float | None:
    """`value` as a finite number from `low` to `high`; None for everything else, yes and no too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and low <= number <= high else None


def whole(value: object, *, low: int = 0, high: int = EXACT) -> int | None:
    """`value` as a whole number from `low` to `high`; None for everything else."""
    number = finite(value)
    if number is None or not low <= value <= high:
        return None
    return int(value)


def text(value: object, *, most: int = 10_000) -> str:
    """`value` if it is a text, cut to `most` characters, else ""."""
    return printable(value[:most]) if isinstance(value, str) else ""


def dicts(value: object, *, most: int = 1000) -> list[dict]:
    """The objects among the first `most` entries of a list; of anything else none."""
    return [one for one in value[:most] if isinstance(one, dict)] if isinstance(value, list | tuple) else []


def texts(value: object, *, most: int = 1000) -> list[str]:
    """The texts among the first `most` entries of a list; of anything else none."""
    return [text(one) for one in value[:most] if isinstance(one, str)] if isinstance(value, list | tuple) else []
