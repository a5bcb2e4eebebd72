"""Generated pictures: what lies in the outputs folder, the settings inside a PNG, thumbnails, the trash."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from backend.catalog.photo import in_rgb
from backend.schema.messages import Trouble
from backend.schema.places import Places

CHUNK = "loft"  # name of the PNG text chunk with the settings, as the engine writes it
THUMB_PIXELS = 256
KINDS = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class Settings:
    """What a picture says about itself: the request's values, and what happened."""

    request: dict
    seed: int | None = None
    seconds: float = 0.0
    loras: tuple[dict, ...] = ()
    notes: tuple[str, ...] = ()
    predicted_peak_bytes: int = 0
    measured_peak_bytes: int = 0


def newest(outputs: Path, *, most: int) -> list[Path]:
    """The `most` newest pictures, newest first. Day folders sort by name, so older ones are not even listed."""
    found: list[Path] = []
    folders = sorted((f for f in _entries(outputs) if f.is_dir()), key=lambda f: f.name, reverse=True)
    for folder in [*folders, outputs]:
        here = [
            f for f in _entries(folder) if f.suffix.lower() == ".png" and f.is_file() and not f.name.startswith(".")
        ]
        found += sorted(here, key=lambda f: (_modified(f), f.name), reverse=True)
        if len(found) >= most:
            break
    return found[:most]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def stamp(outputs: Path) -> tuple:
    """Changes when a picture comes or goes: the times of the folders that hold them."""
    return tuple(sorted((f.name, _modified(f)) for f in [outputs, *_entries(outputs)] if f.is_dir()))


def read_settings(path: Path) -> Settings:
    """The settings inside a PNG. Raises Trouble where the file is no picture or holds none."""
    try:
        with Image.open(path) as picture:
            text = picture.info.get(CHUNK)
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise Trouble("damaged", f"{path.name} is not a picture that can be read.") from None
    if not isinstance(text, str):
        raise Trouble(
            "no_settings",
            f"{path.name} holds no settings.",
            hint="Only PNG files made here carry them; programs that re-save a picture often drop them.",
        )
    try:
        return _settings_of(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Trouble("bad_file", f"The settings inside {path.name} cannot be read.") from None


def _settings_of(values: dict) -> Settings:
    """The settings in what a file says. Raises one of many errors where that is something else: it may come from a stranger."""
    request, seed = dict(values["request"]), values.get("seed")
    request["loras"] = [
        {"path": str(use["path"]), "strength": float(use.get("strength", 1.0))} for use in request.get("loras") or ()
    ]
    request["edit_images"] = [str(path) for path in request.get("edit_images") or ()]
    return Settings(
        request=request,
        seed=seed if isinstance(seed, int) else _as_int(seed),
        seconds=float(values.get("seconds") or 0.0),
        loras=tuple(use for use in values.get("loras") or () if isinstance(use, dict)),
        notes=tuple(str(note) for note in values.get("notes") or ()),
        predicted_peak_bytes=int(values.get("predicted_peak_bytes") or 0),
        measured_peak_bytes=int(values.get("measured_peak_bytes") or 0),
    )


def _as_int(value: object) -> int | None:
    # Seeds above 2**53 travel as text, so that no program rounds them.
    return int(value) if isinstance(value, str) and value.isdecimal() else None


def thumbnail(path: Path, cache: Path, *, pixels: int = THUMB_PIXELS) -> Path:
    """A small WebP of a picture, made once per content time; the picture itself where it cannot be read."""
    try:
        seen = path.stat()
    except OSError:
        return path
    key = hashlib.sha256(f"{path}|{seen.st_mtime_ns}|{seen.st_size}|{pixels}".encode()).hexdigest()[:24]
    thumb = cache / "thumbnails" / f"{key}.webp"
    if thumb.exists():
        return thumb
    try:
        thumb.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as picture:
            small = in_rgb(picture)
        small.thumbnail((pixels, pixels), Image.Resampling.LANCZOS)
        handle, draft = tempfile.mkstemp(dir=thumb.parent, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            small.save(file, "WEBP", quality=86)
        Path(draft).replace(thumb)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return path
    return thumb


def is_inside(path: Path, folders: tuple[Path, ...]) -> bool:
    """Whether `path`, links followed, lies under one of `folders`."""
    real = path.resolve()
    return any(real.is_relative_to(folder.resolve()) for folder in folders)


def is_ours(path: Path | str, places: Places) -> bool:
    """Whether a picture is here, among those that were made here or given to the form. Others are not opened because a file names them."""
    try:
        return is_inside(Path(path), (places.user / "inputs", places.outputs)) and Path(path).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def to_trash(path: Path, places: Places) -> Path:
    """Moves a file into the trash folder and says where it is now; a name that is taken gets a number."""
    places.trash.mkdir(parents=True, exist_ok=True)
    target = places.trash / path.name
    number = 1
    while target.exists():
        number += 1
        target = places.trash / f"{path.stem}-{number}{path.suffix}"
    try:
        path.replace(target)
    except OSError:
        # Another drive: copy, then remove.
        import shutil

        shutil.move(path, target)
    return target


def keep_input(path: Path, places: Places) -> Path:
    """A copy of an uploaded picture under a name made of its content, so that it is still there after a restart."""
    data = path.read_bytes()
    kept = places.user / "inputs" / f"{hashlib.sha256(data).hexdigest()[:16]}{path.suffix.lower() or '.png'}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=kept.parent, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(draft).replace(kept)
    return kept
