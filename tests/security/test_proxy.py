"""Behind a reverse proxy: the page works under a path and another name; what a proxy says counts only where the proxy is trusted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.browser.conftest import Site, wait_ready
from tests.security.requests_by_hand import ask
from tests.security.reverse_proxy import ADDRESS, reverse_proxy

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other addresses of loopback have to be set up elsewhere"
)
FORWARDED = {"X_Forwarded_Host": "loft.example", "X_Forwarded_Proto": "https", "X_Forwarded_For": "192.0.2.7"}


@pytest.fixture(scope="module")
def behind(tmp_path_factory) -> Iterator[Site]:
    """A studio for a proxy at `ADDRESS`, under /loft."""
    made = Site(tmp_path_factory.mktemp("behind"), "--fake", "--root-path", "/loft", "--trusted-proxy", ADDRESS)
    yield made
    made.stop()


STREAM = """
(where) => new Promise((done, fail) => {
  const source = new EventSource(where);
  source.onopen = () => { source.close(); done("open"); };
  source.onerror = () => { source.close(); fail(new Error("no stream")); };
})
"""


@pytest.mark.browser
@pytest.mark.parametrize("keeps_prefix", [False, True], ids=["strips the path", "keeps the path"])
def test_the_page_works_under_a_path(anywhere, behind, keeps_prefix):
    with reverse_proxy(behind.port, prefix="/loft", keeps_prefix=keeps_prefix) as port:
        assert ask(port, "/loft/", Host=f"loft.localhost:{port}").status == 403, "a name that nobody gave it"
        base = f"http://localhost:{port}/loft/"
        context = anywhere.new_context()
        context.set_default_timeout(60_000)
        page, wrong = context.new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console", lambda said: wrong.append(said.text) if said.type == "error" and _is_below(said, base) else None
        )
        page.on("response", lambda answer: wrong.append(answer.url) if answer.status >= 400 else None)
        page.goto(f"{base}?token={behind.token}")
        wait_ready(page)
        assert page.url == base
        (cookie,) = context.cookies()
        assert (cookie["path"], cookie["httpOnly"], cookie["sameSite"]) == ("/loft", True, "Strict")
        assert page.evaluate(STREAM, f"{base}gradio_api/heartbeat/abc") == "open"
        page.fill("#set-prompt textarea", f"a red cat, {keeps_prefix}")
        page.click("#generate")
        page.wait_for_selector("#stage img[src*='/loft/gradio_api/file=']")
        page.wait_for_function("document.querySelector('#stage img[src*=file]')?.naturalWidth > 0")
        page.reload()
        wait_ready(page)
        context.close()
        assert not wrong, wrong


def _is_below(said, base: str) -> bool:
    """Whether the console speaks of the page, and not of the icon that a browser looks for at the root, where others live."""
    return said.location.get("url", "").startswith(base)


def post(site: Site, **headers: str) -> int:
    mine = {"Authorization": f"Bearer {site.token}", "Content_Type": "application/json"}
    return ask(site.port, "/gradio_api/reset", method="POST", body=b'{"event_id": "1"}', **mine, **headers).status


def test_what_a_stranger_says_in_a_proxys_name_is_ignored(behind):
    """From 127.0.0.1, which is not the trusted one."""
    mine = {"Authorization": f"Bearer {behind.token}"}
    assert post(behind, **FORWARDED) == 200, "thrown away: the request is as good as without"
    assert post(behind, Origin="https://loft.example", **FORWARDED) == 403
    assert ask(behind.port, "/config", Host="loft.example", **mine, **FORWARDED).status == 403
    root = json.loads(ask(behind.port, "/config", **mine, **FORWARDED).body)["root"]
    assert "loft.example" not in root and not root.startswith("https"), root
    entry = ask(behind.port, f"/?token={behind.token}", **FORWARDED)
    assert entry.status == 303 and entry.headers["location"] == "/loft/" and "Secure" not in entry.headers["set-cookie"]
    ask(behind.port, "/?token=" + "b" * 43, **FORWARDED)
    assert "came from 127.0.0.1" in (behind.places.user / "access.log").read_text()
    assert "192.0.2.7" not in (behind.places.user / "access.log").read_text()


def test_a_proxy_that_says_nothing_or_is_not_trusted_lets_nothing_through_that_it_should_not(behind, locked):
    """One that hands requests on without a word makes its users the studio's own; their pages have another name, and may not ask."""
    for site, prefix in ((behind, "/loft"), (locked, "")):
        with reverse_proxy(site.port, prefix=prefix, keeps_prefix=False, forwards=site is locked) as port:
            here = f"http://127.0.0.1:{port}"
            assert ask(port, f"{prefix}/config").status == 401
            mine = {"Authorization": f"Bearer {site.token}", "Origin": here}
            body = b'{"event_id": "1"}'
            assert ask(port, f"{prefix}/gradio_api/reset", method="POST", body=body, **mine).status == 403
