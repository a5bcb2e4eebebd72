"""The secret that opens the page: 32 random bytes as text in `user/token`, for the owner's eyes alone."""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path

from backend.host.files import not_written, write_text
from backend.schema.messages import Trouble
from backend.schema.places import Places

RANDOM_BYTES = 32
WRITTEN = re.compile(r"[A-Za-z0-9_-]{43}")  # 32 bytes in URL-safe base64


def token_file(places: Places) -> Path:
    return places.user / "token"


def token(places: Places) -> str:
    """The data folder's token; made at the first call, and anew where the file holds something else.

    The file is readable by its owner alone (mode 0600; Windows keeps the folder's rights). Raises Trouble("not_written").
    """
    path = token_file(places)
    try:
        known = _known(path)
        if not known:
            known = secrets.token_urlsafe(RANDOM_BYTES)
            write_text(path, known + "\n", private=True)
    except OSError as error:
        raise not_written(f"The token {path}", error) from None
    return known


def _known(path: Path) -> str:
    """What the file holds, if it is a token."""
    if not path.exists():
        return ""
    if not path.is_file():
        raise Trouble("bad_file", f"{path} is no file.", hint="Remove it: Loft keeps the page's token there.")
    with path.open("rb") as file:
        text = file.read(200).decode("ascii", "replace").strip()
    if not WRITTEN.fullmatch(text):
        return ""
    if sys.platform != "win32" and path.stat().st_mode & 0o077:
        os.chmod(path, 0o600)  # noqa: PTH101  # whoever could read it before may know it; the document says what to do
    return text
