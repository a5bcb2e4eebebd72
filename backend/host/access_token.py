"""The secret that opens the page: 32 random bytes as text in `user/token`, for the owner's eyes alone."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sys
import time
from pathlib import Path

from backend.schema.messages import Trouble
from backend.schema.paths import Places
from backend.system.atomic_files import not_written, write_text

RANDOM_BYTES = 32
TICKET_SECONDS = 600
TICKET = re.compile(r"once-([0-9]{1,12})-([0-9a-f]{32})-([0-9a-f]{64})")
WRITTEN = re.compile(r"[A-Za-z0-9_-]{43}")  # 32 bytes in URL-safe base64


def token_file(places: Places) -> Path:
    return places.user / "token"


def token(places: Places) -> str:
    """The data folder's token; made at the first call, and anew where the file holds something else.

    The file is readable by its owner alone (mode 0600; Windows keeps the folder's rights). Raises
    Trouble("not_written").
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


def ticket(token: str, *, now: float | None = None) -> str:
    """What opens the page once, within ten minutes, in the token's place.

    For the address that a browser is started with: other users of the machine can see arguments.
    """
    until = int((time.time() if now is None else now) + TICKET_SECONDS)
    nonce = secrets.token_hex(16)
    return f"once-{until}-{nonce}-{_signature(token, until, nonce)}"


def ticket_number(token: str, text: str, *, now: float | None = None) -> str:
    """What tells this ticket from every other; "" where it is none of this token's, or too old."""
    found = TICKET.fullmatch(text)
    if not found:
        return ""
    right = hmac.compare_digest(_signature(token, int(found[1]), found[2]), found[3])
    return found[2] if right and int(found[1]) >= (time.time() if now is None else now) else ""


def _signature(token: str, until: int, nonce: str) -> str:
    return hmac.new(token.encode(), f"ticket {until} {nonce}".encode(), hashlib.sha256).hexdigest()
