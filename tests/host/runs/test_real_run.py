"""The trainer itself under the host: started, stopped, killed and resumed as the page does it."""

from __future__ import annotations

import time

import psutil
import pytest

from backend.host.process import processes
from backend.host.runs import runs
from backend.schema.paths import ASSETS
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from backend.system import process_record

pytestmark = [pytest.mark.torch, pytest.mark.slow]
SETTINGS = {
    "name": "zubi",
    "dataset_base_path": str(ASSETS / "datasets" / "character"),
    "max_pixels": 64 * 64,
    "lora_rank": 4,
    "save_steps": 4,
    "sample_prompts": "zubi",
    "sample_every": 8,
    "sample_inference_steps": 2,
}


def wait_for(folder, condition, seconds: float = 480.0):
    end = time.monotonic() + seconds
    while not condition(run := runs.read(folder)):
        assert run.status not in ("failed",), (run.sentence, runs.log(folder))
        assert time.monotonic() < end, (run, runs.log(folder))
        time.sleep(0.05)
    return run


def test_stopped_resumed_killed_resumed_complete(data):
    folder = runs.create(from_values(TrainingConfig, SETTINGS | {"max_steps": 40}), data)
    runs.start(folder, places=data)
    assert runs.read(folder).status == "starting"
    run = wait_for(folder, lambda run: run.step >= 5)
    assert run.status == "running" and run.total_steps == 40 and run.seconds_per_step > 0 and run.loss is not None

    runs.stop(folder)
    run = wait_for(folder, lambda run: run.status == "stopped")
    assert 5 <= run.step < 40 and run.can_resume and run.checkpoints
    stopped_at = run.step
    wait_for(folder, lambda run: not process_record.alive(run.process))

    runs.resume(folder, places=data)
    run = wait_for(folder, lambda run: run.resumed and run.step > stopped_at)
    assert run.resumed["step"] == stopped_at
    psutil.Process(run.process.pid).kill()
    run = wait_for(folder, lambda run: run.status == "died")
    assert run.trouble.kind == "died"

    runs.resume(folder, places=data)
    run = wait_for(folder, lambda run: run.status == "complete")
    assert run.step == 40
    assert runs.loss_series(folder, points=1000).steps == tuple(range(1, 41))
    assert run.saved[-1].name == "step-40.safetensors" and run.saved[-1].parent == folder
    assert {sample.step for sample in run.samples} >= {8, 16, 24, 32, 40}
    assert all(sample.path.is_file() for sample in run.samples)
    wait_for(folder, lambda run: not process_record.alive(run.process))
    assert processes.marked(f"run:{folder}") == []
    assert not list(folder.rglob("*.tmp"))


def test_a_run_without_pictures_fails_with_a_sentence(data):
    (data.root / "empty").mkdir()
    config = from_values(TrainingConfig, SETTINGS | {"dataset_base_path": str(data.root / "empty")})
    folder = runs.create(config, data)
    runs.start(folder, places=data)
    end = time.monotonic() + 120
    while (run := runs.read(folder)).status != "failed":
        assert time.monotonic() < end and run.status in ("starting", "running"), (run, runs.log(folder))
        time.sleep(0.05)
    assert str(data.root / "empty") in run.sentence and "Traceback" not in run.sentence
