"""A studio for the tests of who may ask for what, and a Chromium for which every name is this machine's."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.browser.conftest import Site

LONGEST_SECONDS = 240  # of one test, on a busy machine too: what hangs on a pipe or a loop of links has failed


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """Fails a test that hangs, where it hangs. pytest's own kind of failure is no Exception, so that nothing tried here takes it for an error."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def over(*_):
        pytest.fail(f"not done after {LONGEST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def locked(tmp_path_factory) -> Iterator[Site]:
    """A studio as it is started by default: with a token."""
    made = Site(tmp_path_factory.mktemp("locked"), "--fake")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def anywhere(chromium: str) -> Iterator:
    """A Chromium that finds this machine under every name, as after a DNS rebinding."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = [
            "--no-sandbox",
            "--disable-background-networking",
            "--host-resolver-rules=MAP * 127.0.0.1",
            # Newer browsers keep some pages away from this machine by themselves; others do not, and that is what is tried.
            "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests,PrivateNetworkAccessSendPreflights",
        ]
        found = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield found
        found.close()
