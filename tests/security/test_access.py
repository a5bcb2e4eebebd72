"""Nobody gets in without the token or a login: every route of a real studio, and every way to show a key."""

from __future__ import annotations

import json
import os
import re
import sys
import time

import pytest

from backend.families import FAMILIES
from backend.host.access_token import ticket, token
from backend.host.engine.client import Engine
from backend.schema.messages import Trouble
from backend.schema.paths import Places
from studio import app
from studio.serving import server
from studio.serving.allowed_hosts import Hosts, from_elsewhere
from studio.serving.credentials import Keys
from studio.serving.login_throttle import FREE_TRIES, Throttle
from studio.serving.request_origin import asked
from studio.state.context import Studio
from tests.browser.conftest import Site
from tests.security.requests_by_hand import ask, send_raw

BEYOND = (
    "/",
    "/no/such/route",
    "//",
    "/config/",
    "/openapi.json",
    "/docs",
    "/gradio_api/mcp/sse",
    "/%2e%2e/etc/passwd",
    "/login/../config",
)


def routes_of(data: Places) -> list[tuple[str, str]]:
    """(method, path) of everything that the studio's application serves, with something in place of every parameter."""
    engine = Engine(data, fake=True)
    studio = Studio(data, engine, FAMILIES)
    found: list[tuple[str, str]] = []

    def walk(routes) -> None:
        for route in routes:
            if hasattr(route, "app") and hasattr(route.app, "routes"):
                walk(route.app.routes)
            elif hasattr(route, "original_router"):  # what a FastAPI application included
                walk(route.original_router.routes)
            elif hasattr(route, "path") and hasattr(route, "methods"):
                path = re.sub(r"\{[^}]*\}", "1", route.path)
                found.extend((method, path) for method in route.methods or ("GET",))

    walk(server.application(studio, app.build(studio), keys=Keys("x"), hosts=Hosts()).app.app.routes)
    engine.stop()
    return found


def test_every_route_asks_for_the_token(locked, data):
    routes = routes_of(data)
    named = {path for _, path in routes}
    for path in (
        "/",
        "/config",
        "/gradio_api/queue/join",
        "/gradio_api/queue/data",
        "/gradio_api/upload",
        "/gradio_api/file=1",
    ):
        assert path in named
    for path in (
        "/gradio_api/heartbeat/1",
        "/gradio_api/app_id",
        "/gradio_api/openapi.json",
        "/gradio_api/cancel",
        "/gradio_api/reset",
    ):
        assert path in named
    asked = sorted({*routes, *((method, path) for path in BEYOND for method in ("GET", "POST", "OPTIONS", "PUT"))})
    assert len(asked) > 60
    for method, path in asked:
        if (method, path.rstrip("/")) == ("POST", "/login"):  # where the token is sent
            continue
        reply = ask(locked.port, path, method=method, body=b"{}" if method == "POST" else None)
        assert reply.status == 401, (method, path)
        assert method == "HEAD" or b"This page needs a token" in reply.body, (method, path)
        assert "set-cookie" not in reply.headers and reply.headers["cache-control"] == "no-store"


def test_gradios_own_login_and_what_asks_other_hosts_is_not_there(locked):
    mine = {"Authorization": f"Bearer {locked.token}"}
    for path in (
        "proxy=https://example.hf.space/x",
        "deep_link?session_hash=1",
        "token",
        "runs",
        "file=https://example.org/x.png",
        "filexyz",
    ):
        assert ask(locked.port, f"/gradio_api/{path}", **mine).status in (403, 404), path


def test_the_token_is_the_owners_alone_and_is_kept(tmp_path):
    places = Places(tmp_path)
    made = token(places)
    file = places.user / "token"
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", made) and token(places) == made
    if sys.platform != "win32":
        assert file.stat().st_mode & 0o777 == 0o600
        file.chmod(0o644)
        assert token(places) == made and file.stat().st_mode & 0o777 == 0o600
    for broken in (b"", b"short", b"\xff" * 43, b"a" * 500):
        file.write_bytes(broken)
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", token(places))
    file.unlink()
    file.mkdir()
    with pytest.raises(Trouble, match="is no file"):
        token(places)


def test_the_address_with_the_token_leaves_a_cookie_and_no_token(locked):
    reply = ask(locked.port, f"/?token={locked.token}&view=1")
    assert reply.status == 303 and reply.headers["location"] == "/?view=1"
    assert reply.headers["referrer-policy"] == "no-referrer"
    words = reply.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(words) and locked.token not in words[0]
    assert int(next(word for word in words if word.startswith("Max-Age=")).partition("=")[2]) > 30 * 24 * 3600
    page = ask(locked.port, "/", Cookie=f"other=1; odd; {reply.cookie}; {{}}=2")
    assert page.status == 200 and b"gradio_config" in page.body and locked.token.encode() not in page.body
    again = ask(locked.port, f"/?token={locked.token}", Cookie=reply.cookie)
    assert again.status == 303 and again.headers["location"] == "/"
    for cookie in (
        reply.cookie[:-1],
        reply.cookie + "0",
        f"{reply.cookie.partition('=')[0]}={locked.token}",
        "loft=",
        "=" * 500,
    ):
        assert ask(locked.port, "/", Cookie=cookie).status == 401


def test_the_address_that_a_browser_is_started_with_opens_the_page_once(locked):
    made = ticket(locked.token)
    assert locked.token not in made and ask(locked.port, f"/?token={made}", method="HEAD").status in (401, 429)
    reply = ask(locked.port, f"/?token={made}")
    assert reply.status == 303 and ask(locked.port, "/", Cookie=reply.cookie).status == 200
    assert ask(locked.port, f"/?token={made}").status in (401, 429), "once"
    assert ask(locked.port, f"/?token={made}", Cookie=reply.cookie).status == 303, (
        "a browser that reloads it is in already"
    )
    others = (
        ticket("x" * 43),
        ticket(locked.token, now=time.time() - 601),
        ticket(locked.token)[:-1] + "g",
        "once-1-2-3",
    )
    for other in others:
        assert ask(locked.port, f"/?token={other}").status in (401, 429)
    assert ask(locked.port, "/", Authorization=f"Bearer {ticket(locked.token)}").status in (401, 429)


def test_what_was_pasted_into_the_page_opens_it(locked):
    for pasted in (locked.token, f"%20{locked.token}%0A", f"http%3A%2F%2F127.0.0.1%3A7860%2F%3Ftoken%3D{locked.token}"):
        reply = ask(locked.port, "/login", method="POST", body=f"token={pasted}".encode(), Accept="text/html")
        assert reply.status == 303 and reply.headers["location"] == "/" and reply.cookie
    wrong = ask(locked.port, "/login", method="POST", body=b"token=abc", Accept="text/html")
    assert wrong.status in (401, 429) and "set-cookie" not in wrong.headers
    large = ask(locked.port, "/login", method="POST", body=b"token=" + b"a" * 100_000)
    assert large.status == 413


def test_the_right_token_opens_while_wrong_ones_are_refused(locked):
    for _ in range(FREE_TRIES + 1):
        last = ask(locked.port, "/?token=" + "a" * 43)
        assert last.status in (401, 429) and "set-cookie" not in last.headers
    assert last.status == 429 and int(last.headers["retry-after"]) >= 1
    assert ask(locked.port, f"/?token={locked.token}").status == 303
    assert ask(locked.port, "/config", Authorization=f"Bearer {locked.token}").status == 200
    assert ask(locked.port, "/config", Authorization=f"bearer {locked.token[:-1]}").status == 429
    said = (locked.places.user / "access.log").read_text()
    assert "A wrong token came from 127.0.0.1" in said and "a" * 43 not in said


def test_a_bookmark_works_after_a_restart_and_no_secret_is_left_about(tmp_path):
    site = Site(tmp_path / "data", "--fake", "--auth", "anna:hidden-pw")
    try:
        cookie = ask(site.port, f"/?token={site.token}").cookie
        file = site.places.user / "studio.json"
        assert "hidden-pw" not in file.read_text() and "--auth" in file.read_text()
        assert sys.platform == "win32" or file.stat().st_mode & 0o777 == 0o600
        site.kill()
        for path in site.places.root.rglob("*"):
            found = path.read_bytes() if path.is_file() else b""
            assert b"hidden-pw" not in found and (site.token.encode() not in found or path.name == "token"), path
        site.start()
        assert ask(site.port, "/config", Cookie=cookie).status == 200
    finally:
        site.stop()


def test_without_a_token_where_that_is_asked_for(tmp_path):
    site = Site(tmp_path / "data", "--fake", "--no-token")
    try:
        assert ask(site.port, "/config").status == 200
        assert ask(site.port, "/config", Host="evil.example").status == 403
        assert ask(site.port, "/gradio_api/reset", method="POST", body=b"{}", Origin="http://127.0.0.1:1").status == 403
    finally:
        site.stop()


# Logins


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A studio with two logins, behind a proxy."""
    folder = tmp_path_factory.mktemp("guarded")
    logins = folder / "logins"
    logins.write_text("anna:s3cret-pw\nben:ot:her\n")
    made = Site(
        folder / "data",
        "--fake",
        *(
            "--auth",
            str(logins),
            "--trusted-proxy",
            "127.0.0.1",
            "--allow-host",
            "loft.example",
            "--root-path",
            "/loft",
        ),
    )
    yield made
    made.stop()


def log_in(site: Site, user: str, password: str, *, come_from: str, **headers: str):
    body = f"username={user}&password={password}".encode()
    return ask(site.port, "/login", method="POST", body=body, X_Forwarded_For=come_from, **headers)


def test_a_login_opens_everything_and_ends_alone(guarded):
    assert ask(guarded.port, "/config").status == 401
    assert b"Log in to Loft" in ask(guarded.port, "/").body
    first, second = (log_in(guarded, "anna", "s3cret-pw", come_from="192.0.2.1") for _ in range(2))
    assert first.status == 200 and json.loads(first.body) == {"success": True} and first.cookie != second.cookie
    assert {"HttpOnly", "SameSite=Strict", "Path=/loft"} <= set(first.headers["set-cookie"].split("; "))
    assert log_in(guarded, "ben", "ot%3Aher", come_from="192.0.2.1", Accept="text/html").headers["location"] == "/loft/"
    assert ask(guarded.port, "/config", Cookie=first.cookie).status == 200
    assert ask(guarded.port, "/logout", Cookie=first.cookie).status == 405, "a link or a picture ends nothing"
    assert ask(guarded.port, "/logout", method="POST", Cookie=first.cookie, Origin="http://evil.example").status == 403
    assert ask(guarded.port, "/config", Cookie=first.cookie).status == 200
    assert ask(guarded.port, "/logout", method="POST", Cookie=first.cookie).status == 303
    assert ask(guarded.port, "/config", Cookie=first.cookie).status == 401
    assert ask(guarded.port, "/config", Cookie=second.cookie).status == 200
    assert ask(guarded.port, "/config", Authorization=f"Bearer {guarded.token}").status == 200


def test_wrong_passwords_are_slowed_down_refused_and_logged(guarded):
    began = time.monotonic()
    statuses = [log_in(guarded, "anna", f"guess-{n}", come_from="192.0.2.9").status for n in range(FREE_TRIES + 5)]
    assert statuses[:FREE_TRIES] == [401] * FREE_TRIES and time.monotonic() - began > 1.5
    assert set(statuses[FREE_TRIES:]) == {429}
    assert log_in(guarded, "anna", "s3cret-pw", come_from="192.0.2.9").status == 429, "not looked at while it waits"
    assert log_in(guarded, "anna", "s3cret-pw", come_from="192.0.2.10").status == 200, "others are not kept out"
    log_in(guarded, "s3cret-pw", "anna", come_from="192.0.2.11")
    said = (guarded.places.user / "access.log").read_text()
    assert "A wrong password for 'anna' came from 192.0.2.9" in said and "A wrong name came from 192.0.2.11" in said
    assert "guess" not in said and "s3cret" not in said
    if sys.platform != "win32":
        assert (guarded.places.user / "access.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
def test_whatever_lies_in_the_place_of_the_log_holds_nothing_up(data, capsys):
    path = data.user / "access.log"
    studio = Studio(data, Engine(data, fake=True), FAMILIES)
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/full")):
        data.user.mkdir(parents=True, exist_ok=True)
        make(path)
        server.keep_log(studio, "access")
        server.logging.getLogger("loft.access").warning("A wrong token came from nowhere.")
        said = capsys.readouterr().err
        assert said.count("A wrong token came from nowhere.") == 1 and "Traceback" not in said
        path.rmdir() if path.is_dir() else path.unlink()
    path.write_text("older\n")
    path.chmod(0o644)
    server.keep_log(studio, "access")
    server.logging.getLogger("loft.access").warning("one more")
    assert path.read_text().count("\n") == 2 and path.stat().st_mode & 0o777 == 0o600
    for handler in server.logging.getLogger("loft.access").handlers:
        handler.close()
    studio.engine.stop()


def test_no_password_is_on_the_disk(guarded):
    for path in guarded.places.root.rglob("*"):
        assert not path.is_file() or not re.search(rb"s3cret-pw|ot:her", path.read_bytes()), path


# The names of the studio, and pages of others


GOOD_HOSTS = ("127.0.0.1", "127.0.0.1:1", "localhost:7860", "LOCALHOST", "[::1]:80", "[0:0:0:0:0:0:0:1]")
BAD_HOSTS = (
    "evil.example",
    "evil.example:7860",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example@127.0.0.1",
    "127.0.0.1@evil.example",
    "127.0.0.1, evil.example",
    "2130706433",
    "0.0.0.0",
    "192.168.0.1",
    "[::2]",
    "[::1",
    "localhost:99999",
    "localhost:x",
    "127.0.0.1/evil",
    "",
)


def test_only_names_of_this_machine_are_answered(locked):
    mine = {"Authorization": f"Bearer {locked.token}"}
    for host in GOOD_HOSTS:
        assert ask(locked.port, "/gradio_api/app_id", Host=host, **mine).status == 200, host
    for host in BAD_HOSTS:
        for path in ("/", "/gradio_api/app_id", f"/?token={locked.token}", "/login"):
            assert ask(locked.port, path, Host=host, **mine).status in (400, 403), host
    twice = f"GET / HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\nHost: evil.example\r\nAuthorization: Bearer {locked.token}\r\n\r\n"
    none = f"GET / HTTP/1.0\r\nAuthorization: Bearer {locked.token}\r\n\r\n"
    for request in (twice, none):
        assert send_raw(locked.port, request.encode()).split()[1] in (b"400", b"403")


def asked_of(headers: list[tuple[bytes, bytes]]):
    return asked({"type": "http", "method": "GET", "path": "/config", "scheme": "http", "headers": headers})


def test_only_the_studios_own_page_may_ask(locked):
    here = f"127.0.0.1:{locked.port}"
    mine = {"Authorization": f"Bearer {locked.token}", "Host": here}

    def post(**headers: str) -> int:
        return ask(locked.port, "/gradio_api/reset", method="POST", body=b'{"event_id": "1"}', **mine, **headers).status

    kind = {"Content_Type": "application/json"}
    assert post(**kind) == post(**kind, Origin=f"http://{here}", Sec_Fetch_Site="same-origin") == 200
    for origin in (
        "http://evil.example",
        "http://127.0.0.1:7899",
        f"http://localhost:{locked.port}",
        f"https://{here}",
        "null",
        "",
        "file://",
        f"http://{here}.evil.example",
        f"http://{here}/",
        f"http://{here} http://evil.example",
    ):
        assert post(**kind, Origin=origin) == 403, origin
    for site in ("cross-site", "same-site", "none", "anything"):
        assert post(**kind, Sec_Fetch_Site=site) == 403, site
        assert post(**kind, Sec_Fetch_Site=site, Origin=f"http://{here}") == 403, site
    twice = asked_of(
        [(b"host", here.encode()), (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-site", b"same-origin")]
    )
    assert from_elsewhere(twice), "one of the two is somebody else's"
    for site in ("cross-site", "same-site"):
        read = ask(locked.port, "/config", **mine, Sec_Fetch_Site=site)
        assert read.status == 403, "nor is anything read"
        link = {"Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
        assert ask(locked.port, "/", **mine, Sec_Fetch_Site=site, **link).status == 200, "a link to the page"
        framed = {"Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"}
        assert ask(locked.port, "/", **mine, Sec_Fetch_Site=site, **framed).status == 403


def test_no_other_origin_is_ever_allowed_to_read(locked):
    mine = {"Authorization": f"Bearer {locked.token}"}
    for origin in ("http://127.0.0.1:7899", "http://localhost:3000", "null", f"http://127.0.0.1:{locked.port}"):
        for method in ("GET", "OPTIONS", "POST"):
            for headers in ({}, mine):
                more = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
                reply = ask(locked.port, "/config", method=method, Origin=origin, **headers, **more)
                assert not [name for name in reply.headers if name.startswith("access-control-")], (origin, method)
                assert reply.headers["cross-origin-resource-policy"] == "same-origin"


def test_forwarded_headers_count_from_a_trusted_proxy_alone(locked, guarded):
    said = {"X_Forwarded_Host": "loft.example", "X_Forwarded_Proto": "https", "X_Gradio_Server": "http://evil.example"}
    mine = {"Authorization": f"Bearer {locked.token}"}
    root = json.loads(ask(locked.port, "/config", **mine, **said).body)["root"]
    assert root == f"http://127.0.0.1:{locked.port}"
    assert ask(locked.port, "/config", **mine, **said, Origin="https://loft.example").status == 403

    theirs = {"Authorization": f"Bearer {guarded.token}"}
    for path in ("/config", "/loft/config"):  # whether the proxy takes its own path away or not
        reply = ask(guarded.port, path, **theirs, **said, Origin="https://loft.example")
        assert reply.status == 200 and json.loads(reply.body)["root"] == "https://loft.example/loft"
    assert ask(guarded.port, "/config", **theirs, X_Forwarded_Host="evil.example").status == 403
    cookie = ask(guarded.port, f"/loft/?token={guarded.token}", **said).headers
    assert "Secure" in cookie["set-cookie"] and cookie["location"] == "/loft/"


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs an address of this machine besides loopback's")  # noqa: PTH110
def test_where_every_address_is_listened_to_the_one_that_was_asked_counts():
    from studio.serving.request_origin import asked

    scope = {"method": "GET", "path": "/", "type": "http", "server": ("192.0.2.7", 7860), "client": ("192.0.2.8", 1)}
    for host, known in (
        (b"192.0.2.7:7860", True),
        (b"192.0.2.9:7860", False),
        (b"box:7860", False),
        (b"localhost", True),
    ):
        question = asked({**scope, "headers": [(b"host", host)]})
        assert Hosts("0.0.0.0").is_known(question) is known
        assert Hosts("127.0.0.1").is_known(question) is (host == b"localhost")
    assert Hosts("0.0.0.0", ("box",)).is_known(asked({**scope, "headers": [(b"host", b"BOX:7860")]}))


def test_whatever_stands_in_headers_there_is_an_answer(locked):
    odd = (
        b"\xff\xfe",
        b"=;=;;",
        b"Bearer",
        b"Bearer \xe9",
        b"a" * 5000,
        b"%ff%00",
        b"{}",
        b",,,",
        b"bytes=9-1",
        b"bytes=abc",
    )
    for name in (
        b"Cookie",
        b"Authorization",
        b"Origin",
        b"Sec-Fetch-Site",
        b"X-Forwarded-For",
        b"Range",
        b"Accept-Encoding",
    ):
        for value in odd:
            head = (
                b"GET /%ff%00?token=%ff&%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + name + b": " + value
            )
            status = int(send_raw(locked.port, head + b"\r\n\r\n").split()[1])
            assert 400 <= status < 500, (name, value, status)


# How guessing is slowed down


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_address_waits_longer_after_each_wrong_try():
    clock = Clock()
    throttle = Throttle(clock)
    assert [throttle.wait("192.0.2.1") for _ in range(FREE_TRIES)] == [0] * FREE_TRIES
    waits = []
    for _ in range(10):
        waits.append(throttle.wait("192.0.2.1"))
        clock.now += waits[-1]
        assert throttle.wait("192.0.2.1") == 0
    assert waits[0] == 5 and waits == sorted(waits) and waits[-1] == 300
    clock.now += 2 * 3600
    assert throttle.wait("192.0.2.1") == 0
    throttle.succeeded("192.0.2.1")
    assert throttle.wrong("192.0.2.1") == 0


def test_many_addresses_together_have_one_allowance_and_loopback_its_own():
    clock = Clock()
    throttle = Throttle(clock)
    tried = sum(throttle.wait(f"192.0.{n // 200}.{n % 200}") == 0 for n in range(1000))
    assert tried == 40 and throttle.wait("127.0.0.1") == 0
    clock.now += 60
    assert sum(throttle.wait(f"198.51.100.{n}") == 0 for n in range(200)) == 30 - 1
    here = Throttle(clock)
    assert sum(here.wait(f"127.{n // 250}.0.{n % 250 + 1}") == 0 for n in range(1000)) == FREE_TRIES, "a program's own"
    assert here.wait("::1") > 0 and here.wait("::ffff:127.9.9.9") > 0
    one_network = Throttle(clock)
    assert sum(one_network.wait(f"2001:db8::{n:x}") == 0 for n in range(100)) == FREE_TRIES
    for n in range(20_000):
        throttle.wait(f"10.{n // 65536}.{n // 256 % 256}.{n % 256}")
    assert len(throttle._known) <= 10_000
