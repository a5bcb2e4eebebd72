"""The end of everything by one signal to the launcher: with a worker that has drawn, and with a run that is training."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from backend.host.runs import runs
from backend.schema.paths import Places
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from backend.system import process_record
from tests.browser.conftest import wait_until
from tests.launch_test import WINDOWS, Launched

pytestmark = [
    pytest.mark.browser,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(WINDOWS, reason="POSIX signals"),
]
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


def test_a_worker_that_has_drawn_and_a_run_that_trains_end_with_the_launcher(launch, open_page, tmp_path):
    places = Places(tmp_path / "data")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name, colour in (("one", "red"), ("two", "blue")):
        Image.new("RGB", (64, 64), colour).save(pictures / f"{name}.png")
        (pictures / f"{name}.txt").write_text(f"a {colour} square")
    least = {
        "dataset_base_path": str(pictures),
        "max_pixels": 4096,
        "mixed_precision": "no",
        "lora_rank": 2,
        "max_steps": 100000,
    }
    studio = launch()
    page = open_page(Opened(studio.address()))
    page.fill("#set-prompt textarea", "a red apple")
    page.fill("#set-num_inference_steps input[type=number]", "2")
    page.click("#generate")
    known = wait_until(lambda: process_record.read_record(places.user / "worker.json"), SLOW_SECONDS, "the worker")
    folder = runs.create(from_values(TrainingConfig, least), places)
    runs.start(folder, places=places)  # without its engine: the worker stays, as a page that lost its run would have it
    page.wait_for_selector(
        "#stage img[alt='a red apple']", timeout=SLOW_SECONDS * 1000
    )  # both have loaded side by side
    worker = known[0]
    before = wait_until(lambda: runs.read(folder).step > 1 and runs.read(folder), SLOW_SECONDS, "a second step")
    assert process_record.alive(worker) and process_record.alive(before.process)
    studio.child.send_signal(signal.SIGINT)
    assert studio.wait() == 0
    wait_until(lambda: studio.processes() == [], what="everything to end")
    assert "Traceback" not in studio.said()
    after = runs.read(folder)
    assert after.status == "stopped" and after.step >= before.step
    assert after.saved and after.can_resume, "Ctrl-C has the run save what it has learnt, and its state to go on from"
