"""Answers with the files that the browser may read, each as what its content is and not as what its name says.

A file may come from a stranger: a picture with HTML in one of its chunks and a name that ends in .html would otherwise run in the
page's own origin. Pictures, sound and video are shown, everything else is saved, and whatever is opened stays in a sandbox.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import anyio
from PIL import Image, UnidentifiedImageError
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; media-src 'self'; frame-ancestors 'none'; sandbox"
ROUTE = "/gradio_api/file"
PICTURES = {  # Pillow's name of a format: media type, endings
    "PNG": ("image/png", (".png",)),
    "JPEG": ("image/jpeg", (".jpg", ".jpeg")),
    "MPO": ("image/jpeg", (".jpg", ".jpeg")),  # several JPEGs in one file, of a phone
    "WEBP": ("image/webp", (".webp",)),
    "GIF": ("image/gif", (".gif",)),
    "BMP": ("image/bmp", (".bmp",)),
    "AVIF": ("image/avif", (".avif",)),
}
DECODERS = tuple(
    name for name in PICTURES if name != "MPO"
)  # which Pillow reads as JPEG, and does not know by this name
FIRST_BYTES = 64
MOST_HEADER_BYTES = 100_000_000  # of a safetensors file, as its library has it
REFUSED = "This file may not be read from here."


@dataclass(frozen=True)
class Kind:
    """What a file holds. `endings` are those that its name may have; one that is `shown` opens in the browser."""

    media_type: str
    endings: tuple[str, ...] = ()
    shown: bool = True


UNKNOWN = Kind("application/octet-stream", shown=False)
SAFETENSORS = Kind("application/octet-stream", (".safetensors",))


def kind_of(path: Path) -> Kind:
    """What lies in the file, from its content alone. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        head = file.read(FIRST_BYTES)
        size = os.fstat(file.fileno()).st_size
    return _picture(path) or _sound_or_video(head) or (SAFETENSORS if _is_safetensors(head, size) else UNKNOWN)


def _picture(path: Path) -> Kind | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=DECODERS) as picture:
                return Kind(*PICTURES[picture.format])
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError, KeyError, Image.DecompressionBombError):
        return None


def _sound_or_video(head: bytes) -> Kind | None:
    if head[4:8] == b"ftyp":
        if head[8:12] in (b"M4A ", b"M4B "):
            return Kind("audio/mp4", (".m4a", ".m4b"))
        return Kind("video/quicktime", (".mov",)) if head[8:12] == b"qt  " else Kind("video/mp4", (".mp4", ".m4v"))
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return Kind("audio/wav", (".wav",))
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return Kind("video/webm", (".webm", ".mkv"))
    if head[:4] == b"OggS":
        return Kind("audio/ogg", (".ogg", ".opus", ".oga"))
    if head[:4] == b"fLaC":
        return Kind("audio/flac", (".flac",))
    if head[:3] == b"ID3" or head[:2] in (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"):
        return Kind("audio/mpeg", (".mp3",))
    return None


def _is_safetensors(head: bytes, size: int) -> bool:
    length = int.from_bytes(head[:8], "little")
    return len(head) > 9 and 2 <= length <= min(MOST_HEADER_BYTES, size - 8) and head[8:9] == b"{"


def may_be_read(text: str, folders: Sequence[Path]) -> tuple[Path, os.stat_result] | None:
    """The regular file that `text` names, if it lies in one of `folders`, links followed; None for everything else.

    A path that does not even read as one below the folders is not looked for on the disk.
    """
    try:
        if "\0" in text or text.startswith(("//", "\\\\")) or not Path(text).is_absolute():
            return None
        path = Path(os.path.normpath(text))
        roots = [(folder, folder.resolve()) for folder in folders]
        if not any(path.is_relative_to(root) for pair in roots for root in pair):
            return None
        real = path.resolve(strict=True)
        found = real.stat()
        if not stat.S_ISREG(found.st_mode) or not any(real.is_relative_to(root) for _, root in roots):
            return None
    except (OSError, ValueError, RuntimeError):  # not there, no name that a file can have, links in a circle
        return None
    return real, found


def file_answer(folders: Callable[[], Sequence[Path]]) -> Callable:
    """The handler of `…/file=PATH`, for the files in `folders()`."""

    async def handler(request: Request) -> Response:
        return await anyio.to_thread.run_sync(_answer, request.path_params["path"], folders())

    return handler


def _answer(text: str, folders: Sequence[Path]) -> Response:
    found = may_be_read(text, folders)
    try:
        kind = kind_of(found[0]) if found else None
    except OSError:
        kind = None
    if found is None or kind is None:
        return PlainTextResponse(REFUSED, status_code=403, headers={"content-security-policy": POLICY})
    path, seen = found
    how = "inline" if kind.shown else "attachment"
    name = quote(_name(path, kind), safe="", errors="replace")
    headers = {
        "content-security-policy": POLICY,
        "content-disposition": f"{how}; filename*=utf-8''{name}",
        "cache-control": "private",
    }
    answer = FileResponse(path, media_type=kind.media_type, headers=headers, stat_result=seen)
    answer.headers["content-type"] = kind.media_type
    return answer


def _name(path: Path, kind: Kind) -> str:
    """Under which it is saved: with the ending of what it is."""
    if not kind.endings or path.suffix.lower() in kind.endings:
        return path.name
    return path.stem + kind.endings[0]
