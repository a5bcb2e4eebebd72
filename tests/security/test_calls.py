"""What is no call of the page is told so and never an error of the studio's; what Gradio serves beside the page is not there."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from studio.serving.api_calls import cleaned
from studio.serving.server import SERVED
from tests.security.page_by_hand import PageCalls
from tests.security.requests_by_hand import ask, form_of
from tests.security.test_access import routes_of

JUNK = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"data":' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"data": []}',
    b'{"data": [], "fn_index": 99999}',
    b'{"data": [], "fn_index": -1}',
    b'{"data": [], "fn_index": true}',
    b'{"data": "x", "fn_index": "y"}',
    b'{"data": [], "fn_index": 1e400}',
    b'{"data": [NaN], "fn_index": 3}',
    b'{"data": [' + b"9" * 5000 + b'], "fn_index": 3}',
    b'{"data": [1, 2], "fn_index": 9, "session_hash": "a"}',
    b'{"data": [], "fn_index": 9, "session_hash": 5, "trigger_id": "x"}',
    b'{"event_id": 5, "session_hash": "\\ud800"}',
)


def test_no_route_answers_junk_with_an_error_of_its_own(locked, data):
    mine = {"Authorization": f"Bearer {locked.token}"}
    asked = 0
    for method, route in sorted(set(routes_of(data))):
        if method == "HEAD" or "heartbeat" in route or "login" in route:
            continue
        paths = {
            route,
            *(route.replace("1", odd) for odd in ("%00", "%ff%ed%a0%80", "a" * 3000, "..%2f..%2fetc%2fpasswd")),
        }
        paths |= {
            f"{route}?{query}"
            for query in ("session_hash=%00", "page=x&deep_link=../a&upload_id=1&event_id=1", "%ff=&&=")
        }
        for path in paths:
            for body in JUNK if method == "POST" and path == route else (None,):
                for kind in ("application/json", "multipart/form-data; boundary=x") if body else ("text/plain",):
                    reply = ask(locked.port, path, method=method, body=body, Content_Type=kind, **mine)
                    assert reply.status < 500, (method, path, body and body[:60], reply.status, reply.body[:200])
                    asked += 1
    assert asked > 500


def test_what_the_page_does_not_use_is_not_served(locked, data):
    mine = {"Authorization": f"Bearer {locked.token}"}
    others = {route for _, route in routes_of(data) if not SERVED.fullmatch(route)}
    assert any("proxy" in route for route in others) and any("monitoring" in route for route in others)
    for method in ("GET", "POST"):
        for path in others - {"/gradio_api/upload", "/gradio_api/upload/", "/gradio_api/file=1", "/gradio_api/file/1"}:
            if path.rstrip("/") in ("/login", "/logout"):  # the studio's own
                continue
            assert ask(locked.port, path, method=method, body=b"{}", **mine).status in (404, 405), (method, path)


def test_a_call_of_the_page_is_answered(locked):
    mine = {"Authorization": f"Bearer {locked.token}", "Content_Type": "application/json"}
    config = json.loads(ask(locked.port, "/config", **mine).body)
    values = {part["id"]: part["props"].get("value") for part in config["components"]}
    tick = next(event for event in config["dependencies"] if any(on[1] == "tick" for on in event["targets"]))
    call = {
        "fn_index": tick["id"],
        "data": [values[i] for i in tick["inputs"]],
        "session_hash": "a",
        "event_data": None,
    }
    reply = ask(locked.port, "/gradio_api/run/predict", method="POST", body=json.dumps(call).encode(), **mine)
    assert reply.status == 200 and "strip" in reply.body.decode()


def test_texts_lose_what_nothing_can_keep():
    assert cleaned({"a\0": ["x\ud83d", "\ud83d\ude00", 1, 2.5, None, True]}) == {
        "a\ufffd": ["x\ufffd", "\ufffd\ufffd", 1, 2.5, None, True]
    }
    assert cleaned(json.loads('"\\ud83d\\ude00"')) == "😀", "a whole character that was sent as two halves stays"
    for odd in (float("inf"), float("nan"), [[float("-inf")]]):
        with pytest.raises(ValueError, match="not finite"):
            cleaned(odd)


FILE = {"meta": {"_type": "gradio.FileData"}}
ODD = (
    None, True, -1, 10**30, 1e300, "", "y" * 300, "a\0b\ud83d", "/dev/zero", "//server/share/x", "[" * 2000, [], [None], [[1]], {}, {"a": 1},
    {"path": "/etc/passwd", **FILE}, [{"path": "/dev/zero", **FILE}],
)  # fmt: skip


def test_values_of_the_wrong_type_are_the_callers_mistake(locked):
    """Every function with the same odd value everywhere; then one odd value at a time among those that a browser sends, another choice of them
    each day."""
    page = PageCalls(locked)
    page.open()
    started = page.function("train-start", "click")

    def tried(function: dict, data: list) -> None:
        event = draw.choice(({"do": "x", "what": "y"}, {"do": 5}, {"index": 0, "value": "x"}, [], None))
        reply = page.post(function, data, event=event)
        assert reply.status in (200, 400, 422), (function["api_name"], data, event, reply.body[:200])

    today = time.strftime("%Y-%m-%d")
    draw = random.Random(today)
    for function in page.functions:
        for value in draw.sample(ODD, 4):
            tried(function, [value] * len(function["inputs"]))
    chosen = draw.sample([one for one in page.functions if one is not started and one["inputs"]], 12)
    for function in (*chosen, started):
        # A run that nothing is wrong with would be started.
        sent = page.sent(function, **({"set_dataset_base_path": ""} if function is started else {}))
        for at in draw.sample(range(len(sent)), min(len(sent), 15)):
            tried(function, [*sent[:at], draw.choice(ODD), *sent[at + 1 :]])
    assert not locked.faults(), f"drawn by {today}: {locked.faults()}"


def test_only_files_that_were_sent_may_be_named(locked, tmp_path):
    """Gradio would copy the file to where it is served from, read `/dev/zero` for ever, and fetch what an address names."""
    page = PageCalls(locked)
    page.open()
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    uploads = locked.places.cache / "uploads"
    (uploads / "link").mkdir(parents=True)
    (uploads / "link" / "a.png").symlink_to(secret)
    before = set(uploads.rglob("*"))
    outside = (secret, "/etc/passwd", "/dev/zero", "http://127.0.0.1:9/x.png", "a.png", "//server/share/x.png", uploads / ".." / "..", uploads,
               uploads / "link" / "a.png", f"{uploads}/../../user/token", "", 5, "a\0b")  # fmt: skip
    function = page.function("picture-1", "click")
    for path in outside:
        named = {"path": path if isinstance(path, int) else str(path), "url": "http://127.0.0.1:9/y.png", **FILE}
        for value in (
            named,
            [named],
            {"deep": [{"deeper": named}]},
            {**named, "is_stream": True},
            {"path": named["path"], "meta": 5},
        ):
            began = time.monotonic()
            reply = page.post(function, [value])
            assert reply.status == 422 and b"no file that was sent" in reply.body, (value, reply.body[:200])
            assert time.monotonic() - began < 10
    assert set(uploads.rglob("*")) == before
    sent = ask(
        locked.port,
        "/gradio_api/upload",
        method="POST",
        body=form_of(("a.png", b"1"))[0],
        Content_Type=form_of()[1],
        **page.headers,
    )
    (kept,) = json.loads(sent.body)
    assert page.post(function, [{"path": kept, **FILE}]).status == 200
    Path(kept).unlink()
    assert page.post(function, [{"path": kept, **FILE}]).status == 200, (
        "it may have been cleaned away: the handler says so"
    )
