"""Sizes of picture files as they are shown, read from their headers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from PIL import Image

from backend.images.orientation import shown_size

MOST_SLENDER = 100  # times as long as wide: nothing is left of a narrower picture once it is brought to its area


def sizes_of_files(paths: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(width, height) of the pictures in these files; a square for one that cannot be read, or is too narrow to be
    worked from."""
    return tuple(_size(path, _stamp(path)) for path in paths)


def _stamp(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except (OSError, ValueError):
        return 0


@lru_cache(maxsize=64)
def _size(path: str, stamp: int) -> tuple[int, int]:
    try:
        with Image.open(path) as picture:
            size = shown_size(picture)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return (1, 1)
    return size if max(size) <= MOST_SLENDER * min(size) else (1, 1)
