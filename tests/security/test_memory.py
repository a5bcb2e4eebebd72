"""Opening the page again and again, and picture after picture, do not fill the studio's memory. `benchmarks/studio_memory.py` does more of both."""

from __future__ import annotations

import time

import psutil
import pytest

from studio.serving.sessions import MOST_SESSIONS
from tests.security.page_by_hand import PageCalls
from tests.waiting import wait_for

MOST_MIB = 30  # for however many page loads, and for however many pictures


def used(site) -> float:
    return psutil.Process(site.process.pid).memory_info().rss / 2**20


@pytest.mark.slow
def test_page_loads_are_forgotten(locked):
    page = PageCalls(locked)
    page.open()
    first = used(locked)
    for _ in range(MOST_SESSIONS + 4):
        page.open()
    full = used(locked)
    assert full - first < MOST_MIB
    for _ in range(20):
        page.open()
    assert used(locked) - full < 2, "no load after those that are remembered costs anything"


@pytest.mark.slow
def test_pictures_are_forgotten(locked):
    page = PageCalls(locked)
    page.open()
    submit, tick = page.function("generate", "click"), page.tick()

    def drawn() -> int:
        return sum(1 for _ in locked.places.outputs.rglob("*.png"))

    def draw(count: int) -> float:
        """Asks for so many pictures, looks at them as a page does, and gives the memory afterwards."""
        wanted = drawn() + count
        for number in range(count):
            reply = page.post(submit, page.sent(submit, set_prompt=f"a cat {number}", set_num_inference_steps=1))
            assert reply.status == 200 and b"notice bad" not in reply.body
        wait_for(lambda: page.post(tick, page.sent(tick)).status == 200 and drawn() >= wanted)
        time.sleep(0.2)
        return used(locked)

    first, then = draw(10), draw(40)
    assert then - first < 3, "40 pictures more"
