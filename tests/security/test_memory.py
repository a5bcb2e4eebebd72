"""Opening the page again and again does not fill the studio's memory."""

from __future__ import annotations

import json
import uuid

import psutil
import pytest

from studio.serving.sessions import MOST_SESSIONS
from tests.security.requests_by_hand import ask

MOST_MIB = 30  # for however many page loads


@pytest.mark.slow
def test_page_loads_are_forgotten(locked):
    mine = {"Authorization": f"Bearer {locked.token}"}
    config = json.loads(ask(locked.port, "/config", **mine).body)
    values = {part["id"]: part["props"].get("value") for part in config["components"]}
    # What fills the forms follows the event of the page's opening, which the browser answers by itself.
    opening = next(event["id"] for event in config["dependencies"] if any(on[1] == "load" for on in event["targets"]))
    fill = next(event for event in config["dependencies"] if event["id"] == opening + 1)
    tick = next(event for event in config["dependencies"] if any(on[1] == "tick" for on in event["targets"]))

    def load() -> None:
        session = uuid.uuid4().hex
        assert ask(locked.port, "/", **mine).status == 200
        for event in (fill, tick):
            body = {"fn_index": event["id"], "data": [values[i] for i in event["inputs"]], "session_hash": session}
            kind = {"Content_Type": "application/json"}
            reply = ask(
                locked.port, "/gradio_api/run/predict", method="POST", body=json.dumps(body).encode(), **kind, **mine
            )
            assert reply.status == 200, reply.body

    def used() -> float:
        return psutil.Process(locked.process.pid).memory_info().rss / 2**20

    load()
    first = used()
    for _ in range(MOST_SESSIONS + 4):
        load()
    full = used()
    assert full - first < MOST_MIB
    for _ in range(20):
        load()
    assert used() - full < 2, "no load after those that are remembered costs anything"
