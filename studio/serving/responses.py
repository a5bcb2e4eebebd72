"""Answers of the guard itself, and the headers that every answer carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Pairs = Sequence[tuple[bytes, bytes]]

# Gradio answers some questions of other origins with these; no other origin is ever allowed to read an answer.
CROSS_ORIGIN = (b"access-control-", b"timing-allow-origin")
SAFE = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def with_headers(found: Iterable[tuple[bytes, bytes]], added: Pairs) -> list[tuple[bytes, bytes]]:
    """`found` without cross-origin permissions and without what `added` and `SAFE` say anew."""
    new = [*SAFE, *added]
    names = {name for name, _ in new}
    kept = [
        (name, value)
        for name, value in ((name.lower(), value) for name, value in found)
        if name not in names and not name.startswith(CROSS_ORIGIN)
    ]
    return kept + new


async def answer(
    send, method: str, status: int, body: str = "", *, kind: str = "text/html", headers: Pairs = ()
) -> None:
    """A whole answer, which no cache keeps."""
    data = body.encode("utf-8", "replace")
    said = [
        (b"content-type", f"{kind}; charset=utf-8".encode()),
        (b"content-length", str(len(data)).encode()),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": with_headers(said, headers)})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else data})
