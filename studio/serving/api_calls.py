"""What the page calls the studio with: JSON that is looked at before Gradio does anything with it.

Gradio answers 500 to whatever is no call at all. Here that is told as what it is, and texts lose the two characters that no file, no name and no
encoder takes: NUL, and halves of characters (lone surrogates), which a browser sends where a text was cut inside an emoji.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from studio.serving.field_values import check_event, check_values
from studio.serving.responses import answer

MOST_BYTES = 64 * 2**20
MOST_DEPTH = 60
LARGEST = 2**63 - 1  # whole numbers over that, no answer of Gradio's can hold
UNWRITABLE = re.compile("[\0\ud800-\udfff]")
INSTEAD = "\ufffd"
CALLS = ("/gradio_api/run/", "/gradio_api/api/", "/gradio_api/queue/join")
JSON = (*CALLS, "/gradio_api/cancel", "/gradio_api/reset")


class Calls:
    """ASGI middleware. `functions` are the page's, by number: each has `inputs`, and `fn` where it runs here. `uploads`: where files lie that
    were sent, the only ones that a call may name."""

    def __init__(self, app, functions: Mapping[int, object], uploads: Path):
        self.app, self.functions, self.uploads = app, functions, uploads

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(JSON):
            return await self.app(scope, receive, send)
        data = await _whole(receive)
        if data is None:
            return await _refuse(send, 413, f"A call may have {MOST_BYTES // 2**20} MiB.")
        try:
            body = cleaned(json.loads(data))
            if not isinstance(body, dict):
                raise ValueError("it is no object")
            if scope["path"].startswith(CALLS):
                self._check(body)
        except (ValueError, RecursionError) as error:
            return await _refuse(send, 422, f"This is no call of the page: {error}.")
        data = json.dumps(body).encode("ascii")
        named = (b"content-length", b"content-type", b"transfer-encoding")
        headers = [pair for pair in scope["headers"] if pair[0] not in named]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await self.app({**scope, "headers": headers}, _again(data, receive), _told(send))

    def _check(self, body: dict) -> None:
        """Raises ValueError where the page has no such function, or these values do not go into it."""
        number, values = body.get("fn_index"), body.get("data")
        if not isinstance(number, int) or isinstance(number, bool) or number not in self.functions:
            raise ValueError("fn_index names no function")
        function = self.functions[number]
        if getattr(function, "fn", None) is None:
            raise ValueError("this function runs in the browser alone")
        wanted = len(function.inputs)
        if not isinstance(values, list) or len(values) != wanted:
            raise ValueError(f"data must be a list of {wanted} values")
        check_values(function.inputs, values, self.uploads)
        body["event_data"] = check_event(function.fn, body.get("event_data"))


def cleaned(value, depth: int = 0):
    """The JSON value with texts that can be written. Raises ValueError for what JSON has no way to say."""
    if depth > MOST_DEPTH:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    if isinstance(value, str):
        return UNWRITABLE.sub(INSTEAD, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number in it is not finite")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError("a number in it is too large")
    if isinstance(value, list):
        return [cleaned(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item, depth + 1) for key, item in value.items()}
    return value


async def _whole(receive) -> bytes | None:
    parts, size = [], 0
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BYTES:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


def _again(data: bytes, receive):
    """A `receive` that gives the body once and then what comes after it: that the browser went away."""
    given = False

    async def again():
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return again


def _told(send):
    """Gradio says 500 for a value that a field refuses too, with a sentence; that is the caller's mistake. Without one it is ours, and stays."""
    start = {}

    async def send_told(message):
        if message["type"] == "http.response.start" and message["status"] == 500:
            start.update(message)
            return
        if start:
            try:
                known = isinstance(json.loads(message.get("body", b""))["error"], str)
            except (ValueError, KeyError, TypeError):
                known = False
            await send({**start, "status": 400 if known else 500})
            start.clear()
        await send(message)

    return send_told


async def _refuse(send, status: int, words: str) -> None:
    await answer(send, "POST", status, json.dumps({"detail": words}), kind="application/json")
