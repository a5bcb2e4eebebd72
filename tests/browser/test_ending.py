"""The end of everything by one signal to the launcher: with a worker that has drawn, and with a run that is training."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from backend.host import processes, runs
from backend.schema.places import Places
from tests.browser.conftest import tab, wait_until
from tests.launch_test import WINDOWS, Launched

pytestmark = [
    pytest.mark.browser, pytest.mark.torch, pytest.mark.slow, pytest.mark.skipif(WINDOWS, reason="POSIX signals"),
]  # fmt: skip
SLOW_SECONDS = 240


@dataclass(frozen=True)
class Opened:
    """What `open_page` wants of a site."""

    address: str
    was_killed: bool = True


@pytest.fixture
def launch(tmp_path: Path):
    started = []

    def start() -> Launched:
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        started.append(Launched(data))
        return started[-1]

    yield start
    for each in started:
        if each.child.poll() is None:
            each.child.kill()
            each.child.wait()
        for process in each.processes():
            process.kill()


def end(studio: Launched, by: signal.Signals) -> None:
    studio.child.send_signal(by)
    assert studio.wait() == 0
    wait_until(lambda: studio.processes() == [], what="everything to end")
    assert "Traceback" not in studio.said()


def test_a_worker_that_has_drawn_and_a_run_that_trains_end_with_the_launcher(launch, open_page, tmp_path):
    places = Places(tmp_path / "data")
    studio = launch()
    page = open_page(Opened(studio.address()))
    page.fill("#set-prompt textarea", "a red apple")
    page.fill("#set-num_inference_steps input[type=number]", "2")
    page.click("#generate")
    page.wait_for_selector("#stage img[alt='a red apple']", timeout=SLOW_SECONDS * 1000)
    worker = processes.from_file(places.user / "worker.json")[0]
    assert processes.alive(worker)
    end(studio, signal.SIGTERM)
    assert not processes.alive(worker)

    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name, colour in (("one", "red"), ("two", "blue")):
        Image.new("RGB", (64, 64), colour).save(pictures / f"{name}.png")
        (pictures / f"{name}.txt").write_text(f"a {colour} square")
    wanted = {"dataset_base_path": str(pictures), "max_pixels": 4096, "mixed_precision": "no", "lora_rank": 2, "max_steps": 100000}
    (places.user / "training.json").write_text(json.dumps(wanted))
    studio = launch()
    page = open_page(Opened(studio.address()))
    tab(page, "Train")
    page.click("#train-start")
    (run,) = wait_until(lambda: [found for found in runs.list_runs(places) if found.step > 1], SLOW_SECONDS, "a second step")
    end(studio, signal.SIGINT)
    ended = runs.read(run.folder)
    assert ended.status == "stopped" and ended.step >= run.step
    assert ended.saved and ended.can_resume, "Ctrl-C has the run save what it has learnt, and its state to go on from"
