"""Pages that are not the studio's, in a browser that has the studio's cookie: another site, another port, no origin at all, a name that was rebound."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

import pytest

from tests.browser.conftest import wait_ready, wait_until
from tests.security.test_files import picture

pytestmark = pytest.mark.browser

# Everything that a page can send without being allowed to: what was answered and could be read is written into `window.found`.
ATTACK = """
async (target) => {
  const found = [];
  const note = (what) => (value) => found.push([what, value]);
  const tell = (what, promise) => promise.then(note(what), () => note(what)("refused"));
  const form = () => { const data = new FormData(); data.append("files", new Blob(["1"]), "csrf.png"); return data; };
  const call = JSON.stringify({fn_index: 0, data: [], session_hash: "abc"});
  await Promise.all([
    tell("read config", fetch(target + "config", {credentials: "include"}).then((a) => a.status)),
    tell("read page", fetch(target, {credentials: "include"}).then((a) => a.status)),
    tell("post json", fetch(target + "gradio_api/run/predict", {method: "POST", body: call, credentials: "include", headers: {"Content-Type": "application/json"}}).then((a) => a.status)),
    tell("post text", fetch(target + "gradio_api/queue/join", {method: "POST", body: call, mode: "no-cors", credentials: "include"}).then((a) => a.type)),
    tell("upload", fetch(target + "gradio_api/upload", {method: "POST", body: form(), mode: "no-cors", credentials: "include"}).then((a) => a.type)),
    tell("logout", fetch(target + "logout", {mode: "no-cors", credentials: "include"}).then((a) => a.type)),
    tell("picture", new Promise((done, fail) => { const image = new Image(); image.onload = () => done("shown"); image.onerror = fail; image.src = target + "gradio_api/file=" + PICTURE; document.body.append(image); })),
    tell("script", new Promise((done, fail) => { const script = document.createElement("script"); script.onload = () => done("ran"); script.onerror = fail; script.src = target + "gradio_api/app_id"; document.body.append(script); })),
    tell("events", new Promise((done, fail) => { const source = new EventSource(target + "gradio_api/heartbeat/abc", {withCredentials: true}); source.onopen = () => done("open"); source.onerror = fail; })),
    tell("form", new Promise((done) => {
      const frame = document.createElement("iframe"); frame.name = "out"; document.body.append(frame);
      const form = document.createElement("form"); form.method = "post"; form.target = "out"; form.action = target + "gradio_api/reset";
      document.body.append(form); form.submit(); setTimeout(() => done("sent"), 500);
    })),
    tell("frame", new Promise((done) => { const frame = document.createElement("iframe"); frame.src = target; document.body.append(frame); setTimeout(() => done("asked"), 500); })),
  ]);
  return found;
}
"""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    """The port of a page of somebody else's."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b"<!doctype html><title>elsewhere</title><body>"
            if self.path.startswith("/null"):
                body = b'<!doctype html><body><iframe sandbox="allow-scripts allow-forms" src="/inside"></iframe>'
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def visitor(anywhere, locked) -> Iterator:
    """A browser in which the studio is open, and that is now elsewhere too."""
    context = anywhere.new_context()
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.goto(locked.address)
    wait_ready(page)
    yield context
    assert page.evaluate("fetch('config').then((answer) => answer.status)") == 200, "the studio's own page goes on"
    context.close()


@pytest.mark.parametrize("kind", ["another site", "another port", "no origin"])
def test_another_page_neither_reads_nor_changes_anything(kind, visitor, locked, elsewhere):
    seen = locked.places.outputs / "seen.png"
    seen.parent.mkdir(exist_ok=True)
    seen.write_bytes(picture("PNG"))
    before = set((locked.places.cache / "uploads").rglob("*"))
    page, answers = visitor.new_page(), []
    page.on("response", lambda answer: answers.append((answer.url, answer.request.method, answer.status)))
    host = "evil.example" if kind == "another site" else "127.0.0.1"
    page.goto(f"http://{host}:{elsewhere}/{'null' if kind == 'no origin' else ''}")
    where = page.frames[1] if kind == "no origin" else page
    for target in (locked.base, locked.base.replace("127.0.0.1", "localhost")):
        found = dict(where.evaluate(ATTACK.replace("PICTURE", repr(quote(str(seen)))), target))
        for what in ("read config", "read page", "post json", "picture", "script", "events"):
            assert found[what] == "refused", (what, found)
    mine = [(url, method, status) for url, method, status in answers if f":{locked.port}/" in url]
    assert mine and all(status == 403 for _, _, status in mine), mine
    assert set((locked.places.cache / "uploads").rglob("*")) == before
    assert all(
        frame.url == "about:blank"
        or str(locked.port) not in frame.url
        or "403" in _text(frame)
        or not _text(frame)
        or "page asked" in _text(frame)
        for frame in page.frames
    )


def _text(frame) -> str:
    return frame.evaluate("document.body?.innerText || ''")


def test_a_name_that_was_rebound_is_not_answered(anywhere, locked):
    page = anywhere.new_page()
    for path in ("", f"?token={locked.token}", "config", "gradio_api/app_id"):
        answer = page.goto(f"http://evil.example:{locked.port}/{path}")
        assert answer.status == 403 and "--allow-host evil.example" in page.inner_text("body")
    # The page that came from the name before it was rebound goes on asking: for its browser that is the same origin.
    start = f"http://evil.example:{locked.port}/start"
    page.route(start, lambda route: route.fulfill(body="<!doctype html><body>", content_type="text/html"))
    page.goto(start)
    calls = {
        "config": {},
        "gradio_api/app_id": {},
        f"?token={locked.token}": {},
        "gradio_api/run/predict": {"method": "POST", "body": "{}"},
    }
    for path, more in calls.items():
        assert page.evaluate("([path, more]) => fetch(path, more).then((a) => a.status)", [f"/{path}", more]) == 403, (
            path
        )
    page.close()


def test_a_link_from_another_site_opens_the_page(visitor, locked, elsewhere):
    page = visitor.new_page()
    page.goto(f"http://evil.example:{elsewhere}/")
    page.evaluate("(target) => { location.href = target; }", locked.base)
    wait_ready(page)
    assert page.url == locked.base


def test_nothing_in_a_file_runs(visitor, locked):
    home = locked.places.root / "user" / "inputs"
    home.mkdir(parents=True, exist_ok=True)
    (home / "0123.html").write_bytes(picture("PNG"))
    (home / "0123.svg").write_bytes(
        b"<svg xmlns='http://www.w3.org/2000/svg'><script>document.title = 'ran'</script></svg>"
    )
    page = visitor.new_page()
    answer = page.goto(f"{locked.base}gradio_api/file={quote(str(home / '0123.html'))}")
    assert answer.headers["content-type"] == "image/png" and page.title() != "ran"
    studio = visitor.pages[0]
    with studio.expect_download(timeout=20_000) as saved:
        studio.evaluate(
            "(to) => { location.href = to; }", f"{locked.base}gradio_api/file={quote(str(home / '0123.svg'))}"
        )
    assert saved.value.suggested_filename == "0123.svg" and studio.title() != "ran"


def test_what_gets_into_the_page_does_not_run(visitor, locked):
    """The page's policy has no `unsafe-inline` for scripts: neither a handler nor a script that was written into it runs."""
    page = visitor.new_page()
    said = []
    page.on("console", lambda line: said.append(line.text))
    answer = page.goto(locked.base)
    wait_ready(page)
    scripts = next(
        part for part in answer.headers["content-security-policy"].split("; ") if part.startswith("script-src")
    )
    assert "unsafe-inline" not in scripts and "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert not [line for line in said if "Content Security Policy" in line], "Gradio's own page runs under it"
    page.evaluate("""() => {
      document.body.insertAdjacentHTML("beforeend", "<img src='data:x' onerror='window.ran = 1'><a id='odd' href='javascript:window.ran = 2'>x</a>");
      const script = document.createElement("script"); script.textContent = "window.ran = 3"; document.body.append(script);
      document.getElementById("odd").click();
    }""")
    wait_until(
        lambda: page.wait_for_timeout(50) or len([line for line in said if "Content Security Policy" in line]) >= 3
    )
    assert page.evaluate("window.ran") is None


# Who has no token


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_somebody_without_the_token_is_asked_for_it_and_let_in_with_it(anywhere, locked, width, dark):
    context = anywhere.new_context(viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light")
    page = context.new_page()
    said = []
    asked = ("status of 401", "status of 429")  # 429: others have tried wrong tokens from here before
    page.on(
        "console",
        lambda line: (
            said.append(line.text) if line.type == "error" and not any(part in line.text for part in asked) else None
        ),
    )
    answer = page.goto(locked.base)
    assert answer.status == 401 and page.inner_text("h1") == "Loft is locked"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(19, 19, 22)" if dark else "rgb(247, 247, 248)")
    page.fill("input[name=token]", "not-the-token")
    page.click("button")
    page.wait_for_selector(".wrong")
    page.fill("input[name=token]", f"http://127.0.0.1:{locked.port}/?token={locked.token}")
    page.click("button")
    wait_ready(page)
    assert page.url == locked.base and not said
    (cookie,) = context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    assert page.evaluate("document.cookie") == ""
    context.close()


def test_an_open_page_asks_again_once_its_cookie_is_gone(anywhere, locked):
    context = anywhere.new_context()
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.goto(locked.address)
    wait_ready(page)
    context.clear_cookies()
    page.wait_for_selector("text=Loft is locked")
    context.close()


def test_signing_out_ends_this_browsers_access_alone(anywhere, locked):
    contexts = [anywhere.new_context() for _ in range(2)]
    pages = [context.new_page() for context in contexts]
    for page in pages:
        page.goto(locked.address)
        wait_ready(page)
    pages[0].get_by_role("tab", name="Preferences", exact=True).click()
    pages[0].click("text=Sign out")
    pages[0].wait_for_selector("text=Loft is locked")
    assert contexts[0].cookies() == [] and pages[1].reload().status == 200
    for context in contexts:
        context.close()


def test_a_name_in_a_header_is_text(anywhere, locked):
    """What a request says of itself stands in the refusal, and is not HTML there."""
    page = anywhere.new_page()
    page.goto(f"http://x-{base64.b32encode(b'<b>').decode().strip('=').lower()}.example:{locked.port}/")
    assert page.locator("b").count() == 0
    page.close()
