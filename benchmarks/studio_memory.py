"""What the studio keeps of pages that were opened and of pictures that were made: its memory before and after, in MiB.

    python benchmarks/studio_memory.py [--loads 1000] [--pictures 300]

Each in a studio of its own with a worker of its own, on the shipped model. A load is the page, what fills its forms and
one tick, each time in a session of its own; a picture is asked for by the page's own call, in one step, while a page
ticks once a second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser.conftest import Site
from tests.security.page_by_hand import PageCalls

WARM_LOADS, WARM_PICTURES = 40, 5  # more than the sessions that are kept; the first pictures start the worker


def mib(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def loads(count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="loft-memory-") as root:
        site = Site(Path(root), "--fake")
        try:
            page = PageCalls(site)
            page.open()
            rows = [(0, mib(site.process.pid))]
            for number in range(1, count + 1):
                page.open()
                if number in (WARM_LOADS, count // 4, count // 2, count):
                    rows.append((number, mib(site.process.pid)))
        finally:
            site.end()
    print("page loads | " + " | ".join(f"{number}: {size:.1f}" for number, size in rows))
    print(f"grown by {rows[-1][1] - rows[0][1]:.1f}")


def pictures(count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="loft-memory-") as root:
        site = Site(Path(root))
        try:
            page = PageCalls(site)
            page.open()
            submit = page.function("generate", "click")
            rows, made, asked = [], 0, 0
            began = time.monotonic()
            while made < count:
                while asked < min(made + 20, count):  # as many as somebody may let wait
                    values = {"set_prompt": f"a red cat {asked}", "set_num_inference_steps": 1}
                    reply = page.post(submit, page.sent(submit, **values))
                    assert reply.status == 200 and b"notice bad" not in reply.body, reply.body
                    asked += 1
                page.post(page.tick(), page.sent(page.tick()))
                time.sleep(1)
                made = len(list(site.places.outputs.rglob("*.png")))
                if made >= (WARM_PICTURES if not rows else len(rows) * count // 4):
                    rows.append((made, mib(site.process.pid), mib(site.worker_pid())))
                assert time.monotonic() - began < 20 * count + 300, f"{made} pictures only"
        finally:
            site.end()
    print("pictures | " + " | ".join(f"{made}: {studio:.1f}, worker {worker:.1f}" for made, studio, worker in rows))
    print(f"the studio has grown by {rows[-1][1] - rows[0][1]:.1f}, its worker by {rows[-1][2] - rows[0][2]:.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loads", type=int, default=1000)
    parser.add_argument("--pictures", type=int, default=300)
    said = parser.parse_args()
    loads(said.loads)
    pictures(said.pictures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
