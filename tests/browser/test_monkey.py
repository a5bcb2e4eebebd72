"""Half a minute of a monkey at the page, among odd files; `python -m tests.browser.monkey` lets it loose for longer."""

from __future__ import annotations

import os

import pytest

from tests.browser import monkey
from tests.browser.conftest import Site

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_nothing_goes_wrong_whatever_is_done(browser, chromium, tmp_path_factory):
    root = tmp_path_factory.mktemp("monkey")
    files = monkey.litter(monkey.Places(root))
    site = Site(root, "--fake")
    seconds, seed = float(os.environ.get("LOFT_MONKEY_SECONDS", "30")), int(os.environ.get("LOFT_MONKEY_SEED", "7"))
    try:
        done = monkey.let_loose(browser, site, files, seconds=seconds, seed=seed)
    finally:
        site.stop()  # fails where a fault was logged
    assert not done.wrong, (done.wrong, list(done.done))
    assert done.actions > 10
