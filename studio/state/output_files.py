"""Generated pictures: what lies in the outputs folder, the settings inside a PNG, thumbnails, the trash."""

from __future__ import annotations

import hashlib
import io
import warnings
from pathlib import Path

from PIL import Image

from backend.images.orientation import in_rgb
from backend.images.png_metadata import NO_PICTURE, Settings, read_settings
from backend.schema.json_values import is_printable
from backend.schema.messages import Trouble
from backend.schema.paths import Places
from backend.schema.untrusted import exists, is_file, is_folder, is_inside, known_file, name_of, read_bytes, unnamed
from backend.system.atomic_files import not_written, replacing, write_bytes

__all__ = [
    "NO_PICTURE",
    "Settings",
    "is_inside",
    "is_ours",
    "keep_input",
    "known_picture",
    "newest",
    "newest_and_unnamed",
    "read_settings",
    "stamp",
    "thumbnail",
    "to_trash",
]
THUMB_PIXELS = 256
KINDS = (".png", ".jpg", ".jpeg", ".webp")
ENDINGS = {  # Pillow's name of a format that is taken, and how a file of it is called
    "PNG": ".png", "JPEG": ".jpg", "MPO": ".jpg", "WEBP": ".webp", "BMP": ".bmp", "GIF": ".gif", "TIFF": ".tif", "AVIF": ".avif",
}  # fmt: skip
DECODERS = tuple(
    name for name in ENDINGS if name != "MPO"
)  # which Pillow reads as JPEG, and does not know by this name
MOST_PICTURE_BYTES = 2**30


def newest(outputs: Path, *, most: int) -> list[Path]:
    """The `most` newest pictures, newest first. Day folders sort by name, so older ones are not even listed."""
    return newest_and_unnamed(outputs, most=most)[0]


def newest_and_unnamed(outputs: Path, *, most: int) -> tuple[list[Path], list[str]]:
    """As `newest`, and what lies in the same folders under names that no page could give back (`untrusted.unnamed`)."""
    found: list[Path] = []
    folders, left = _named(outputs)
    folders = sorted((f for f in folders if is_folder(f)), key=lambda f: f.name, reverse=True)
    for folder in [*folders, outputs]:
        entries, bad = _named(folder) if folder != outputs else (_entries(outputs), [])
        left += bad
        here = [f for f in entries if f.suffix.lower() == ".png" and not f.name.startswith(".") and is_file(f)]
        found += sorted(here, key=lambda f: (_modified(f), f.name), reverse=True)
        if len(found) >= most:
            break
    return found[:most], left


def _named(folder: Path) -> tuple[list[Path], list[str]]:
    """(what lies in a folder, what of it has a name that cannot be told to a browser)"""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return [], []
    return [path for path in entries if is_printable(path.name)], unnamed(path.name for path in entries)


def _entries(folder: Path) -> list[Path]:
    return _named(folder)[0]


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def stamp(outputs: Path) -> tuple:
    """Changes when a picture comes or goes: the times of the folders that hold them."""
    return tuple(sorted((f.name, _modified(f)) for f in [outputs, *_entries(outputs)] if is_folder(f)))


def thumbnail(path: Path, cache: Path, *, pixels: int = THUMB_PIXELS) -> Path | None:
    """A small WebP of a picture, made once per content time. None where the file is no picture that can be read, which
    is then not to be shown as one; the picture itself where there is no room for a smaller one."""
    try:
        seen = path.stat()
    except (OSError, ValueError):
        return None
    key = hashlib.sha256(f"{path}|{seen.st_mtime_ns}|{seen.st_size}|{pixels}".encode()).hexdigest()[:24]
    thumb = cache / "thumbnails" / f"{key}.webp"
    if is_file(thumb):
        return thumb
    try:
        if not is_file(path):
            return None
        with Image.open(path) as picture:
            small = in_rgb(picture)
        small.thumbnail((pixels, pixels), Image.Resampling.LANCZOS)
    except NO_PICTURE:
        return None
    try:
        with replacing(thumb, private=True, synced=False) as draft:
            small.save(draft, "WEBP", quality=86)
    except OSError:
        return path
    return thumb


def is_ours(path: Path | str, places: Places) -> bool:
    """Whether a picture is here, among those that were made here or given to the form. Others are not opened because a
    file names them."""
    return known_picture(path, places) is not None


def known_picture(path: Path | str, places: Places) -> Path | None:
    """The picture called `path`, by its name or in full, among those that were made here or given to the form; others
    are not looked for."""
    return known_file(path, (places.user / "inputs", places.outputs))


def to_trash(path: Path, places: Places) -> Path:
    """Moves a file into the trash folder and says where it is now; a name that is taken gets a number."""
    places.trash.mkdir(parents=True, exist_ok=True)
    target = places.trash / path.name
    number = 1
    while exists(target):
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
    """A copy of an uploaded picture under a name made of its content and of the format that it is decoded as, so that
    it is still there after a restart and is never anything but a picture. Raises Trouble("bad_value") for what is none,
    Trouble("not_written")."""
    data = read_bytes(path, most=MOST_PICTURE_BYTES)
    kept = places.user / "inputs" / f"{hashlib.sha256(data).hexdigest()[:32]}{_ending(data, path)}"
    if is_file(kept):
        return kept
    try:
        write_bytes(kept, data, private=True)
    except OSError as error:
        raise not_written(f"The picture {name_of(path)}", error) from None
    return kept


def check_picture(path: Path) -> None:
    """Raises Trouble for a file that is not a picture that can be read."""
    _ending(read_bytes(path, most=MOST_PICTURE_BYTES), path)


def _ending(data: bytes, path: Path) -> str:
    """The ending that belongs to the format of a picture's content, whatever its file was called."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=DECODERS) as picture:
                picture.verify()
                return ENDINGS[picture.format]
    except NO_PICTURE:
        raise Trouble(
            "bad_value", f"{name_of(path)} is not a picture that can be read.", hint="Choose a PNG, JPEG or WebP file."
        ) from None
