"""The picture of a LoRA: the one inside its file, a sample of its run, or one that lies beside it."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path

from PIL import Image

from backend.catalog.formats.safetensors import read_layout
from backend.catalog.lora.metadata import THUMBNAILS
from backend.catalog.spec import LoraSpec
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file
from backend.system.atomic_files import replacing
from studio.state.context import Studio
from studio.state.output_files import NO_PICTURE, is_inside, thumbnail
from studio.widgets.formatting import safe

PIXELS = 256  # of the longer side
MOST_CHARACTERS = 8 * 2**20  # of a picture as text; honest ones are a hundredth of this
MOST_PIXELS = 2**24
BESIDE = (".png", ".preview.png", ".jpg", ".jpeg", ".webp")


def picture_of(spec: LoraSpec, studio: Studio) -> str:
    """The address of a LoRA's picture, "" where it has none."""
    if any(spec.metadata.get(key, "").startswith("data:image/") for key in THUMBNAILS):
        inside = _embedded(spec, studio.places.cache)
        if inside is not None:
            return safe(studio.address(inside))
    beside = [spec.path.with_suffix(ending) for ending in BESIDE]
    found = next((path for path in (*_samples(spec, studio), *beside) if is_file(path)), None)
    if found is None:
        return ""
    small = thumbnail(found, studio.places.cache)
    # One that lies beside a LoRA elsewhere is not served itself.
    return safe(studio.address(small)) if small and small != found else ""


def _embedded(spec: LoraSpec, cache: Path) -> Path | None:
    """The picture in a file's header as a small file, made once; None where it cannot be read."""
    key = hashlib.sha256(f"{spec.path}|{spec.modified}|{spec.nbytes}|inside".encode()).hexdigest()[:24]
    target = cache / "thumbnails" / f"{key}.webp"
    if is_file(target):
        return target
    try:
        metadata = read_layout(spec.path).metadata
        url = next(metadata[name] for name in THUMBNAILS if metadata.get(name, "").startswith("data:image/"))
        data = base64.b64decode(url.partition(",")[2][:MOST_CHARACTERS])
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                return None
            small = picture.convert("RGB")
        small.thumbnail((PIXELS, PIXELS), Image.Resampling.LANCZOS)
        with replacing(target, private=True, synced=False) as draft:
            small.save(draft, "WEBP", quality=86)
    except (Trouble, StopIteration, *NO_PICTURE):
        return None
    return target


def _samples(spec: LoraSpec, studio: Studio) -> list[Path]:
    """Sample pictures of the run that wrote the file: the newest that the file's own step can have drawn, then any."""
    if not is_inside(spec.path, (studio.places.runs,)):
        return []
    step = spec.metadata.get("steps", "")
    newest = sorted((spec.path.parent / "samples").glob("step-*/0.png"), reverse=True)
    if not (step.isascii() and step.isdigit() and len(step) <= 12):
        return newest
    name = f"step-{int(step):06d}"
    return sorted(newest, key=lambda path: path.parent.name > name)  # stable: what is not later comes first
