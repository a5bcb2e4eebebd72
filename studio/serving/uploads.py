"""Takes the files that the page sends: within limits, under names that are names, and not for ever."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import gradio as gr
from gradio.route_utils import GradioMultiPartParser
from gradio.routes import file_upload_statuses
from python_multipart.multipart import parse_options_header
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from backend.schema.memory_plan import GIB, MIB
from backend.schema.preferences import Preferences
from backend.system.atomic_files import not_written, rename_over

MODEL_ENDINGS = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin")
MOST_FILES = 1000  # in one request
MOST_FIELDS, MOST_FIELD_BYTES = 20, 64 * 1024
MOST_NAME_BYTES = 200
KEPT_SECONDS = 24 * 3600  # what the page needs longer than that, it has copied
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]")
RESERVED = re.compile(r'[<>:"/\\|?*]')  # not in a name on Windows
DEVICES = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])(\..*)?", re.IGNORECASE
)  # on Windows, whatever ending follows
# The parser has a line of its own for every body that is no form; the sender is told.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class TooLarge(MultiPartException):
    """A file is over its limit."""


class _Parser(GradioMultiPartParser):
    """Gradio's parser, with a limit for each file by its kind and a look at its name before anything is written."""

    def __init__(self, request: Request, folder: Path, preferences: Preferences, upload_id: str | None):
        super().__init__(
            request.headers,
            request.stream(),
            max_files=MOST_FILES,
            max_fields=MOST_FIELDS,
            upload_dir=folder,
            max_file_size=float("inf"),
            upload_id=upload_id,
            upload_progress=file_upload_statuses if upload_id else None,
        )
        self._preferences = preferences
        self._size = 0  # of the part that is arriving

    def on_part_begin(self) -> None:
        super().on_part_begin()
        self._size = 0

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if self._current_part.file is not None:
            name_of(self._current_part.file.filename)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._current_part
        self._size += end - start
        if part.file is None:
            if self._size > MOST_FIELD_BYTES:
                raise TooLarge(f"A field of the form is over {MOST_FIELD_BYTES} bytes.")
        else:
            most = limit_bytes(part.file.filename, self._preferences)
            if self._size > most:
                raise TooLarge(
                    f"{name_of(part.file.filename)} is larger than {_size(most)}, the most that may be sent "
                    "(Preferences: largest upload)."
                )
        if part.file is None:  # Gradio's own counts progress of files here, whatever the part is
            part.data += data[start:end]
        else:
            super().on_part_data(data, start, end)

    def discard(self) -> None:
        """Removes what was written of a request that came to nothing."""
        for file in self._files_to_close_on_error:
            with contextlib.suppress(OSError):
                file.close()
                Path(file.name).unlink(missing_ok=True)


def limit_bytes(name: str, preferences: Preferences) -> int:
    """The most bytes that a file of that name may have."""
    if name.lower().endswith(MODEL_ENDINGS):
        return int(preferences.largest_model_upload_gib * GIB)
    return int(preferences.largest_picture_upload_mib * MIB)


def name_of(text: str | None) -> str:
    """The name under which a sent file is kept: its last part, readable on every system. Raises MultiPartException where there is none."""
    said = UNPRINTABLE.sub("", (text or "").replace("\\", "/").rpartition("/")[2])
    stem, dot, ending = RESERVED.sub("_", said).strip(" .").rpartition(".")
    stem, ending = (stem, dot + ending) if stem else (ending, "")
    if len(ending.encode()) > 32:
        stem, ending = stem + ending, ""
    stem = stem.encode()[: MOST_NAME_BYTES - len(ending.encode())].decode("utf-8", "ignore").strip(" .")
    if not stem or "\0" in (text or ""):
        raise MultiPartException(f"A file that is called {ascii(text or '')[:80]} cannot be kept: give it a name.")
    return "_" * bool(DEVICES.fullmatch(stem + ending)) + stem + ending


def upload_answer(blocks: gr.Blocks, folder: Path, preferences: Callable[[], Preferences]) -> Callable:
    """The handler of uploads into `folder`. It answers with the paths, as Gradio's page wants them."""

    async def handler(request: Request) -> Response:
        kind, _ = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data":
            return PlainTextResponse("Send the files as multipart/form-data.", status_code=400)
        upload_id = request.query_params.get("upload_id")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if upload_id:
                file_upload_statuses.track(upload_id)
            parser = _Parser(request, folder, preferences(), upload_id)
        except OSError as error:
            return PlainTextResponse(str(not_written("What was sent", error)), status_code=507)
        whole = False
        try:
            form = await parser.parse()
            found = [item for item in form.getlist("files") if not isinstance(item, str)]
            paths = [await anyio.to_thread.run_sync(_keep, item, folder) for item in found]
            whole = len(paths) == len(parser._files_to_close_on_error)
        except TooLarge as error:
            return PlainTextResponse(error.message, status_code=413)
        except MultiPartException as error:
            return PlainTextResponse(error.message, status_code=400)
        except ClientDisconnect:
            return PlainTextResponse("The browser went away.", status_code=400)
        except OSError as error:
            return PlainTextResponse(str(not_written("What was sent", error)), status_code=507)
        except (ValueError, TypeError, LookupError):  # bytes that are no form; the parser raises many kinds
            return PlainTextResponse("What was sent is no form with files.", status_code=400)
        finally:
            if upload_id:
                file_upload_statuses.set_done(upload_id)
            if not whole:
                parser.discard()
        blocks.upload_file_set.update(paths)
        return JSONResponse(paths)

    return handler


def _keep(item, folder: Path) -> str:
    """Moves a file that has arrived to its place: a folder named by its content, so that names never meet."""
    home = folder / item.sha.hexdigest()
    home.mkdir(parents=True, exist_ok=True)
    kept = home / name_of(item.filename)
    item.file.close()
    rename_over(Path(item.file.name), kept)
    return str(kept)


def clean(folder: Path, *, older_than_seconds: float = KEPT_SECONDS) -> int:
    """Removes what was sent before a day and is not in use, and folders that are empty then. Returns how many files went."""
    gone, now = 0, time.time()
    for home, folders, names in os.walk(folder, topdown=False, followlinks=False):
        for name in names:
            path = Path(home, name)
            with contextlib.suppress(OSError):  # another process has removed it, or has it open
                if now - path.lstat().st_mtime > older_than_seconds:
                    path.unlink()
                    gone += 1
        for name in folders:
            with contextlib.suppress(OSError):  # not empty
                Path(home, name).rmdir()
    return gone


def _size(count: int) -> str:
    return f"{count / GIB:.4g} GiB" if count >= GIB else f"{count / MIB:.3g} MiB"
