"""The thumbnail in exported weights: the run's newest sample image, as a data URL in the file's metadata."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

from PIL import Image

PIXELS = 256  # of the longer side
MOST_BYTES = 22_000  # of the JPEG; as base64 text a third more, within 30 KB
STEP = re.compile(r"step-(\d+)")
QUALITIES = (85, 70, 55, 40, 25)


def thumbnail_of(folder: Path, step: int) -> str:
    """A data URL of the newest sample in the run's `folder` that was drawn after training began and no later than
    `step`; "" for none."""
    steps = {int(match[1]): path for path in folder.glob("samples/step-*") if (match := STEP.fullmatch(path.name))}
    for number in sorted((number for number in steps if 0 < number <= step), reverse=True):
        pictures = sorted(
            steps[number].glob("0*.png"), key=lambda path: (path.name not in ("0.png", "0-strength-1.png"), path.name)
        )
        for path in pictures:
            try:
                return data_url(path)
            except (OSError, ValueError, Image.DecompressionBombError):
                continue  # cut off by a crash: the one before it will do
    return ""


def data_url(path: Path) -> str:
    """The picture at `path` as a JPEG of at most PIXELS a side and MOST_BYTES."""
    with Image.open(path) as picture:
        small = picture.convert("RGB")
    small.thumbnail((PIXELS, PIXELS), Image.Resampling.LANCZOS)
    while True:
        for quality in QUALITIES:
            buffer = io.BytesIO()
            small.save(buffer, "JPEG", quality=quality, optimize=True)
            if buffer.tell() <= MOST_BYTES:
                return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
        small.thumbnail((small.width * 2 // 3, small.height * 2 // 3), Image.Resampling.LANCZOS)
