"""The engine itself under the client: a picture, a death in the middle of one, and the next."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import psutil
import pytest
from PIL import Image

from backend.host.engine.client import Engine
from backend.schema.request import GenerationRequest
from tests.waiting import wait_for

pytestmark = [pytest.mark.torch, pytest.mark.slow]
APPLE = GenerationRequest(prompt="a red apple", num_inference_steps=4, seed=3)


def test_killed_in_a_picture_the_next_request_draws_the_same_as_ever(data):
    engine = Engine(data)

    def answered(id: str):
        return wait_for(lambda: next((item for item in engine.snapshot().answers if item.id == id), None), 240)

    try:
        first = answered(engine.submit(APPLE))
        assert first.trouble is None, first.trouble.detail
        assert engine.snapshot().device_name
        long = engine.submit(dataclasses.replace(APPLE, num_inference_steps=200))
        wait_for(lambda: (job := engine.snapshot().job) and job.step > 1, 240)
        pid = engine.snapshot().pid
        psutil.Process(pid).kill()
        assert answered(long).trouble.kind == "worker_died"
        again = answered(engine.submit(APPLE))
        assert engine.snapshot().pid != pid
        pictures = [Image.open(Path(answer.result.pictures[0])).convert("RGB") for answer in (first, again)]
        assert pictures[0].size == (128, 128) and pictures[0].tobytes() == pictures[1].tobytes()
    finally:
        engine.stop()
    assert not [child for child in psutil.Process().children(recursive=True) if "backend.engine" in child.cmdline()]
