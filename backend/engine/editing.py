"""Pictures that a model edits: may they be given (`catalog.edits`), and their hash for what is remembered of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from backend.catalog.edits import check, edits
from backend.engine import pictures

__all__ = ["check", "digest", "edits", "opened"]


def opened(paths: Sequence[str | Path]) -> tuple[Image.Image, ...]:
    """The pictures in these files. Raises Trouble for the first that is none."""
    return tuple(pictures.open_picture(path) for path in paths)


def digest(picture: Image.Image) -> str:
    """A hash of a picture's pixels."""
    return hashlib.sha256(repr((picture.mode, picture.size)).encode() + picture.tobytes()).hexdigest()
