"""PEFT's rule for `alpha_pattern` and `rank_pattern`: which entry, if any, holds for a module
(`peft.utils.other.get_pattern_key`).

An entry is a regular expression for the end of a module's name; the first that matches `(.*\\.)?(ENTRY)$` from the
beginning of the name is taken. Entries come from strangers' files, and some expressions never end on some names. What
may be slow by its form is therefore tried in a process of its own that can be ended; one that does not come to an end
is refused by name.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache

from backend.schema.messages import Trouble

LONGEST = 2000  # characters of an entry
MOST = 2000  # entries
SECONDS = 5.0  # for all names together in a process of its own; such expressions take microseconds or for ever
MOST_REPEATS = 3  # of open length one after the other: names of 100 characters are then done in well under a second
_TRY = """
import json, re, sys
entries, names = json.load(sys.stdin)
print("begun", flush=True)
for place, entry in enumerate(entries):
    rule = re.compile(rf"(.*\\.)?({entry})$")
    print(json.dumps([place, [bool(rule.match(name)) for name in names]]), flush=True)
"""


def matching(patterns: Mapping[str, object], names: Iterable[str], source: str) -> dict[str, str | None]:
    """For each of `names` the entry of `patterns` that holds for it, None where none does. `source` is named in errors.

    Raises Trouble("bad_value") for an entry that is no regular expression and for one that does not end in time.
    """
    names, entries = list(dict.fromkeys(names)), list(patterns)
    if len(entries) > MOST or any(len(entry) > LONGEST for entry in entries):
        raise Trouble(
            "bad_value",
            f"{source} has {len(entries)} patterns, or one that is longer than {LONGEST} characters.",
            hint="Such a file is not from PEFT; nothing was changed.",
        )
    slow = [entry for entry in entries if _compiled(entry, source) is not None and _may_be_slow(entry)]
    known = _tried(tuple(slow), tuple(names), source) if slow and names else {}
    found: dict[str, str | None] = {}
    for place, name in enumerate(names):
        found[name] = next(
            (entry for entry in entries if (known[entry][place] if entry in known else _holds(entry, name))), None
        )
    return found


def _holds(entry: str, name: str) -> bool:
    return _pattern(entry).match(name) is not None


@lru_cache(maxsize=4096)
def _pattern(entry: str) -> re.Pattern:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return re.compile(rf"(.*\.)?({entry})$")


def _compiled(entry: str, source: str) -> re.Pattern:
    try:
        return _pattern(entry)
    except (re.error, RecursionError, OverflowError) as error:
        raise Trouble(
            "bad_value",
            f"{source} has the pattern {entry[:200]!r}, which is no regular expression: {error}.",
            hint="PEFT cannot read it either; nothing was changed.",
        ) from None


def _may_be_slow(entry: str) -> bool:
    """Whether an expression has repeats within repeats, a reference to a group, or many repeats of open length."""
    parser = re._parser  # pyright: ignore[reportAttributeAccessIssue]  # Python has no public one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = parser.parse(entry)
    num_open = 0

    def look(node, inside: bool) -> bool:
        nonlocal num_open
        for operation, value in node:
            kind = str(operation)
            if kind in ("GROUPREF", "GROUPREF_EXISTS"):
                return True
            if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
                least, most, inner = value
                repeats = most != least and int(most) > 1
                num_open += repeats
                if inside and (repeats or int(most) > 1):
                    return True
                if look(inner, inside or int(most) > 1):
                    return True
            elif any(look(inner, inside) for inner in _within(value)) or (kind == "BRANCH" and inside):
                return True
        return False

    return look(tree, False) or num_open > MOST_REPEATS


def _within(value) -> Iterable:
    """The expressions inside an operation's value, whatever form it has."""
    if hasattr(value, "data"):  # a sub-expression
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _within(inner)


@lru_cache(maxsize=64)
def _tried(entries: tuple[str, ...], names: tuple[str, ...], source: str) -> dict[str, list[bool]]:
    """Which of `names` each entry matches, found out in a process that is ended after `SECONDS`.

    Raises Trouble for the entry it hung on.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-W", "ignore", "-c", _TRY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,  # so that nothing that was sent is held back here when the rest is read
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([entries, names]).encode())
    process.stdin.close()
    process.stdin = None
    # Until it has begun: what starting took on a busy machine does not count.
    while process.stdout.read(1) not in (b"\n", b""):
        pass
    try:
        said, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    done = dict(json.loads(line) for line in said.decode().splitlines() if line.endswith("]"))
    for place, entry in enumerate(entries):
        if place not in done:
            raise Trouble(
                "bad_value",
                f"{source} has the pattern {entry[:200]!r}, which does not come to an end on its modules' names.",
                hint="Write it without a repeat inside a repeat; nothing was changed.",
            )
    return {entry: done[place] for place, entry in enumerate(entries)}
