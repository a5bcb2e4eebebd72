"""How the studio is started, and the headers that keep the page to itself."""

from __future__ import annotations

import asyncio

from studio import app
from studio.shield import Shield


def test_a_public_address_without_a_login_is_refused(data, capsys):
    assert app.main(["--host", "0.0.0.0"]) == 2
    assert "--auth" in capsys.readouterr().err


def test_choices_of_an_older_version_are_completed():
    assert app._whole(None) == app._whole({}) == app.session.CHOICES
    assert app._whole({"run": "x", "gone": 1}) == app.session.CHOICES | {"run": "x"}


def test_every_answer_carries_the_headers():
    sent = []

    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})

    async def send(message):
        sent.append(message)

    asyncio.run(Shield(inner)({"type": "http"}, None, send))
    headers = dict(sent[0]["headers"])
    assert headers[b"a"] == b"b" and b"default-src 'self'" in headers[b"content-security-policy"]
