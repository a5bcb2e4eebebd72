"""The page's Content-Security-Policy: nothing is fetched from other hosts, framed by other pages, or run that the studio did not send.

Gradio's page holds a few inline scripts, and its script puts the studio's own (`theme.HEAD`) into the page's head. Each is allowed by the hash of
its text, so that no other inline script or handler runs, whoever wrote it into the page. Gradio makes functions of text
(`js=` of an event, `js_on_load` of a region), so `unsafe-eval` stays.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re

from studio.serving.responses import with_headers
from studio.widgets import theme

INLINE_SCRIPT = re.compile(r"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)
SAME_ORIGIN_REFERRER = (b"referrer-policy", b"same-origin")


def policy(*scripts: str) -> str:
    """The policy under which inline scripts of exactly these texts run."""
    hashes = "".join(f" 'sha256-{_hash(text)}'" for text in scripts)
    return "; ".join(
        (
            "default-src 'self'",
            f"script-src 'self' 'unsafe-eval'{hashes}",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "media-src 'self' data: blob:",
            "font-src 'self' data:",
            "connect-src 'self' data: blob:",
            "worker-src 'self' blob:",
            "frame-ancestors 'none'",
            "form-action 'self'",
            "base-uri 'self'",
            "object-src 'none'",
        )
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


OTHER = policy()


@functools.cache
def _own() -> tuple[str, ...]:
    return tuple(INLINE_SCRIPT.findall(theme.HEAD))


def of_page(send):
    """Holds the page's HTML back until it is whole, and sends it with the policy that its scripts need."""
    start, parts = {}, []

    async def send_page(message):
        if message["type"] == "http.response.start":
            start.update(message)
            return
        parts.append(message.get("body", b""))
        if message.get("more_body"):
            return
        # A browser reads every line end as "\n" before it hashes.
        html = b"".join(parts).decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
        said = policy(*INLINE_SCRIPT.findall(html), *_own())
        added = [SAME_ORIGIN_REFERRER, (b"content-security-policy", said.encode()), (b"cache-control", b"no-store")]
        await send({**start, "headers": with_headers(start["headers"], added)})
        await send({"type": "http.response.body", "body": b"".join(parts)})

    return send_page
