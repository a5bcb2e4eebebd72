"""PNG files that carry their settings, each written whole or not at all. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from PIL import Image, PngImagePlugin

from backend.schema.messages import Trouble
from backend.schema.paths import places
from backend.schema.request import GenerationRequest, request_to_values

CHUNK = "loft"  # name of the text chunk
_SEEDS = ("seed", "seeds")  # written as text: programs that read every number as a double would round them


def free_path(folder: Path, seed: int) -> Path:
    """A name for a picture in `folder` that no file has yet: the time of day and the seed."""
    stem = f"{time.strftime('%H-%M-%S')}_{seed}"
    path, number = folder / f"{stem}.png", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}_{number}.png"
    return path


def save_png(picture: Image.Image, path: Path, settings: dict) -> None:
    """Writes `picture` with `settings` as JSON in its text chunk. Raises Trouble("cannot_write")."""
    chunk = PngImagePlugin.PngInfo()
    chunk.add_itxt(CHUNK, _as_json(settings))
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            picture.save(file, format="PNG", pnginfo=chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise Trouble(
            "cannot_write",
            f"The picture {path.name} could not be written to {path.parent}: {error.strerror or error}.",
            hint="Is the disk full, or the folder write-protected?",
        ) from None


def by_name(request: GenerationRequest) -> dict:
    """A request's values as a picture tells them: files by their names, pictures made here by their folder's too.

    Where files lie on this machine, and so who its user is, is nobody's business. LoRAs are found again by their hash, pictures that
    were given to the form by a name that is made of their content.
    """
    made = places().outputs

    def name(path: str) -> str:
        return Path(path).relative_to(made).as_posix() if Path(path).is_relative_to(made) else Path(path).name

    values = request_to_values(request)
    return {
        **values,
        "model": Path(request.model).name if Path(request.model).is_absolute() else request.model,
        "loras": [{**use, "path": Path(use["path"]).name} for use in values["loras"]],
        "input_image": name(request.input_image) if request.input_image else None,
        "edit_images": [name(path) for path in request.edit_images],
    }


class Previews:
    """Preview files of one job: each under a new name, so that no browser shows an old one; only the last two are kept."""

    def __init__(self, folder: Path, id: str):
        self.folder = folder
        self.stem = "".join(letter for letter in id if letter.isalnum() or letter in "-_")[:60] or "job"
        self.written: list[Path] = []

    def write(self, picture: Image.Image) -> Path | None:
        """The file of `picture`, or None where the disk does not take it: a preview is no reason to stop."""
        path = self.folder / f"{self.stem}-{time.time_ns() // 1_000_000}.webp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            picture.save(path, format="WEBP", quality=80)
            self.written.append(path)
            while len(self.written) > 2:
                self.written.pop(0).unlink(missing_ok=True)
        except OSError:
            return None
        return path


def _as_json(settings: dict) -> str:
    text = json.dumps(_seeds_as_text(settings), ensure_ascii=False)
    try:
        text.encode()
    except (
        UnicodeEncodeError
    ):  # half a character, in a file's name that is not UTF-8 or a prompt that was cut inside one
        return json.dumps(_seeds_as_text(settings))
    return text


def _seeds_as_text(values):
    if isinstance(values, dict):
        return {name: _as_text(value) if name in _SEEDS else _seeds_as_text(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_seeds_as_text(value) for value in values]
    return values


def _as_text(value):
    return [str(item) for item in value] if isinstance(value, list | tuple) else str(value)
