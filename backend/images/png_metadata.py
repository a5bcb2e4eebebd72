"""PNG metadata: the settings of a picture in its text chunk `loft`, written and read. No torch."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin, UnidentifiedImageError

from backend.schema.json_values import finite, parse_json, whole
from backend.schema.messages import Trouble
from backend.schema.paths import places
from backend.schema.request import GenerationRequest, request_to_values
from backend.schema.settings import knobs_of
from backend.schema.untrusted import name_of
from backend.system.atomic_files import replacing

CHUNK = "loft"  # name of the text chunk
_SEEDS = ("seed", "seeds")  # written as text: programs that read every number as a double would round them


# What Pillow raises for a file that is no picture, by format and way of being broken.
NO_PICTURE = (
    OSError,
    UnidentifiedImageError,
    ValueError,
    SyntaxError,
    EOFError,
    TypeError,
    IndexError,
    KeyError,
    OverflowError,
    MemoryError,
    struct.error,
    Image.DecompressionBombError,
)
MOST_CHARACTERS = 4 * 2**20  # of the settings inside a picture
LARGEST = 2.0**60  # of any number in them
# Settings of a request that are one plain value; the others are lists.
PLAIN = tuple(item.name for item in knobs_of(GenerationRequest) if item.kind is not tuple)


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
    try:
        with replacing(path, durable=False) as temporary:
            picture.save(temporary, format="PNG", pnginfo=chunk)
    except OSError as error:
        raise Trouble(
            "cannot_write",
            f"The picture {path.name} could not be written to {path.parent}: {error.strerror or error}.",
            hint="Is the disk full, or the folder write-protected?",
        ) from None


def read_settings(path: Path) -> Settings:
    """The settings inside a PNG. Raises Trouble where the file is no picture or holds none."""
    try:
        with Image.open(path) as picture:
            said = picture.info.get(CHUNK)
    except NO_PICTURE:
        raise Trouble("damaged", f"{name_of(path)} is not a picture that can be read.") from None
    if not isinstance(said, str):
        raise Trouble(
            "no_settings",
            f"{name_of(path)} holds no settings.",
            hint="Only PNG files made here carry them; programs that re-save a picture often drop them.",
        )
    try:
        if len(said) > MOST_CHARACTERS:
            raise ValueError
        return _settings_of(parse_json(said))
    except ValueError:
        raise Trouble("bad_file", f"The settings inside {name_of(path)} cannot be read.") from None


def _settings_of(values: Any) -> Settings:
    """The settings in what a file says, which may come from a stranger.

    Raises ValueError unless each is of the type it should have.
    """
    values = _of(values, dict)
    said = values.get("request")
    plain = {name: value for name, value in _of(said, dict).items() if name in PLAIN and value is not None}
    request = {name: _of(value, str | int | float) for name, value in plain.items()}
    if not isinstance(request.get("input_image", ""), str):
        raise ValueError
    uses = [
        (_of(use.get("path"), str), _number(use.get("strength"), otherwise=1.0)) for use in _dicts(said.get("loras"))
    ]
    request["loras"] = [{"path": path, "strength": strength} for path, strength in uses]
    request["edit_images"] = _texts(said.get("edit_images"))
    seed = values.get("seed")
    return Settings(
        request=request,
        seed=_as_int(seed) if isinstance(seed, str) else whole(seed),
        seconds=_number(values.get("seconds"), low=0.0),
        loras=tuple(map(_receipt, _dicts(values.get("loras")))),
        notes=tuple(_texts(values.get("notes"))),
        predicted_peak_bytes=int(_number(values.get("predicted_peak_bytes"), low=0.0)),
        measured_peak_bytes=int(_number(values.get("measured_peak_bytes"), low=0.0)),
    )


def _receipt(use: dict) -> dict:
    """What a LoRA did, as a picture tells it."""
    return {
        **{name: _of(use.get(name) or "", str) for name in ("name", "path", "hash", "mode")},
        **{name: int(_number(use.get(name), low=0.0)) for name in ("layers_applied", "layers_found")},
        "strength": _number(use.get("strength"), otherwise=1.0),
        "unused": {key: _of(why, str) for key, why in _of(use.get("unused") or {}, dict).items()},
        "notes": _texts(use.get("notes")),
    }


def _of(value: object, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError
    return value


def _dicts(value: object) -> list[dict]:
    return [_of(one, dict) for one in _of(value or [], list)]


def _texts(value: object) -> list[str]:
    return [_of(one, str) for one in _of(value or [], list)]


def _number(value: object, *, low: float = -LARGEST, otherwise: float = 0.0) -> float:
    number = otherwise if value is None else finite(value, low=low, high=LARGEST)
    if number is None:
        raise ValueError
    return number


def _as_int(value: str) -> int | None:
    # Seeds above 2**53 travel as text, so that no program rounds them.
    return int(value) if value.isdecimal() and len(value) <= 20 else None


def by_name(request: GenerationRequest) -> dict:
    """A request's values as a picture tells them: files by their names, pictures made here by their folder's too.

    Where files lie on this machine, and so who its user is, is nobody's business. LoRAs are found again by their hash,
    pictures that were given to the form by a name that is made of their content.
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
    """Preview files of one job: each under a new name, so that no browser shows an old one; only the last two are
    kept."""

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
