"""A studio of its own for each test file, and a Chromium that fails a test when the page fails."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from backend.schema.paths import PROJECT, Places
from backend.system import process_record

START_SECONDS = 180
WAIT_SECONDS = 120


class Site:
    """A running studio on a data folder."""

    def __init__(self, root: Path, *flags: str):
        self.places = Places(root)
        self.flags = flags
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}/"
        self.process: subprocess.Popen | None = None
        self.was_killed = False
        self.start()

    def start(self) -> None:
        argv = [
            sys.executable,
            "-m",
            "studio.app",
            "--port",
            str(self.port),
            "--data",
            str(self.places.root),
            *self.flags,
        ]
        self.places.root.mkdir(parents=True, exist_ok=True)
        with (self.places.root / "studio.log").open("ab") as log:
            self.process = subprocess.Popen(argv, cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(self.base, timeout=5):
                    return
            except urllib.error.HTTPError:
                return  # it asks for the token
            except OSError:
                assert self.process.poll() is None, (self.places.root / "studio.log").read_text()
                assert time.monotonic() < end, "the studio did not answer"
                time.sleep(0.1)

    @property
    def token(self) -> str:
        path = self.places.user / "token"
        return path.read_text().strip() if path.exists() else ""

    @property
    def address(self) -> str:
        """The one that the studio prints, with the token."""
        return f"{self.base}?token={self.token}"

    def get(self, path: str):
        """The answer to a script that has the token. Raises HTTPError for a refusal."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return urllib.request.urlopen(urllib.request.Request(self.base + path, headers=headers), timeout=30)

    def kill(self) -> None:
        """As the system does when memory runs out: no chance to tidy up."""
        self.was_killed = True
        self.process.kill()
        self.process.wait(10)

    def faults(self) -> str:
        """Tracebacks of what the studio did not foresee. The page stands all the same, and shows a sentence: a test has to look here."""
        path = self.places.user / "faults.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def stop(self) -> None:
        """Asks it to end, and what it started with it. Fails the test where a fault was logged."""
        self.end()
        assert not self.faults()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.kill()

    def worker_pid(self) -> int:

        known = process_record.read_record(self.places.user / "worker.json")
        return known[0].pid if known else 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator:
    """Ends with the file: while playwright lives, its event loop counts as running in the main thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The page's own server is all that it may ask, so nothing is resolved.
        flags = [
            "--no-sandbox",
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        ]
        found = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield found
        found.close()


@pytest.fixture(scope="session")
def painted(chromium, tmp_path_factory) -> Iterator[Site]:
    """A studio whose engine paints gradients: quick, and without torch."""
    made = Site(tmp_path_factory.mktemp("painted"), "--fake")
    yield made
    made.stop()


class Pages:
    """Opens pages, each in a browser profile of its own, and notes what goes wrong in them: an error, or a question to another host."""

    def __init__(self, browser):
        self._browser, self._contexts, self._complaints, self._sites = browser, [], [], []

    def open(self, site: Site, *, width: int = 1280, height: int = 900, dark: bool = False):
        scheme = "dark" if dark else "light"
        context = self._browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.set_default_timeout(WAIT_SECONDS * 1000)
        self._contexts.append(context)
        if isinstance(site, Site):  # one that the launcher started has its own log
            self._sites.append(site)
        page, complaints = context.new_page(), self._complaints
        page.on("pageerror", lambda error: complaints.append(f"error in the page: {error}"))
        page.on("console", lambda said: complaints.append(said.text) if _is_failure(said, site) else None)
        page.on("request", lambda request: complaints.append(request.url) if _is_foreign(request.url) else None)
        page.goto(site.address)
        wait_ready(page)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        self._contexts.clear()

    def check(self) -> None:
        """Nothing has gone wrong since the last check."""
        said, self._complaints[:] = list(self._complaints), []
        said += [fault for site in self._sites if (fault := site.faults())]
        assert not said


@pytest.fixture
def open_page(browser) -> Iterator:
    """Opens pages for one test."""
    pages = Pages(browser)
    yield pages.open
    pages.close()
    pages.check()


@pytest.fixture(scope="module")
def kept_page(browser) -> Iterator:
    """One page for those tests of a file that do not care what its form holds: `kept_page(site)` opens it once and gives it again."""
    pages, opened = Pages(browser), []

    def page(site: Site):
        if not opened:
            opened.append(pages.open(site))
        return opened[0]

    page.check = pages.check
    yield page
    pages.close()


def _is_failure(said, site: Site) -> bool:
    """Whether the browser's console says an error. That a studio which a test has killed does not answer is none."""
    return said.type == "error" and not (site.was_killed and "net::ERR_" in said.text)


def _is_foreign(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "data:", "blob:"))


def wait_ready(page) -> None:
    """Until the form is filled from what was kept: nothing is drawn before."""
    page.wait_for_selector("#strip .now")


def tab(page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def wait_until(check, seconds: float = WAIT_SECONDS, what: str = ""):
    """The first true answer of `check`."""
    end = time.monotonic() + seconds
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < end, f"waited {seconds} s for {what or check}"
        time.sleep(0.1)


def end_process(pid: int) -> None:
    psutil.Process(pid).kill()


class Held:
    """Holds back the page's questions that hold `words`, to see what a late answer does. `let_go` sends them on."""

    WHERE = "**/gradio_api/run/**"

    def __init__(self, page, words: str):
        self._routes = []
        self._page = page
        page.route(self.WHERE, lambda route: self._take(route, words))

    def _take(self, route, words: str) -> None:
        if words in (route.request.post_data or ""):
            self._routes.append(route)
        else:
            route.continue_()

    def wait(self) -> None:
        """Until a question is held. The browser's events are seen only while something of its own is waited for."""
        wait_until(lambda: self._page.wait_for_timeout(20) or self._routes, what="a question to hold back")

    def let_go(self) -> None:
        """Questions go through without us from now on."""
        for route in self._routes:
            route.continue_()
        self._page.unroute(self.WHERE)


def text_below(page, field: str) -> str:
    """The sentence that is shown at a field whose value cannot be, or ""."""
    said = page.evaluate("(field) => getComputedStyle(document.querySelector(field), '::after').content", field)
    return "" if said in ("none", "normal") else said.strip('"')


def drop(page, target: str, *files: Path) -> None:
    """Lets files fall onto the page, as a hand does."""
    data = [(path.name, base64.b64encode(path.read_bytes()).decode()) for path in files]
    transfer = page.evaluate_handle(
        """(files) => {
            const data = new DataTransfer();
            for (const [name, text] of files)
                data.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, {type: "image/png"}));
            return data;
        }""",
        data,
    )
    for kind in ("dragenter", "dragover", "drop"):
        page.dispatch_event(target, kind, {"dataTransfer": transfer})
