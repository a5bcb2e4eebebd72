"""Values that others may have written: JSON in bounded depth, numbers that are numbers, text that can be sent and
written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

MOST_DEPTH = 64  # levels of lists and objects inside each other
EXACT = 2**53 - 1  # the largest whole number that every reader of JSON keeps exact
HOLDERS = frozenset((dict, list))
LAST_TIME = 4102444800.0  # the year 2100 in seconds since the epoch; every calendar still knows it
_SURROGATES = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def printable(text: object) -> str:
    """`text` with what UTF-8 cannot hold (half a character, a file name in another encoding) replaced: it can be sent
    to a page and written."""
    return _SURROGATES.sub("\ufffd", str(text))


def is_printable(text: str) -> bool:
    """Whether `text` can be sent to a page as it is and comes back the same."""
    return not _SURROGATES.search(text)


def parse_json(text: str | bytes, *, pairs: Callable[[list], dict] | None = None) -> object:
    """The value in JSON `text`, every string of it printable.

    Raises ValueError for what is no JSON, or nested deeper than `MOST_DEPTH`.

    Numbers may be infinite or no number (`finite`, `whole`); of repeated keys the last counts, unless `pairs`, which
    makes an object of its keys and values, has it otherwise.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig", errors="replace")
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _check_depth(value)
    # Half a character is an escape, or in a text that is not ASCII: two quick looks spare most texts the slow ones.
    if ("\\u" in text and _ESCAPED.search(text)) or (not text.isascii() and _SURROGATES.search(text)):
        value = _cleaned(value)
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):  # JSON gives no subclasses, and tables of tensors are long
        level = [
            inner
            for outer in level
            if type(outer) in HOLDERS
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in HOLDERS
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
    if finite(value) is None or not isinstance(value, int | float) or not low <= value <= high:
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
