"""A worker whose memory runs out goes a rung lower, says so with the picture, stays there, and begins anew when it is loaded anew."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


class Ears:
    def __init__(self):
        self.said = []

    def say(self, event, **values):
        self.said.append((event, values))

    def should_stop(self, id):
        return False


def test_the_receipt_says_it_and_the_next_job_keeps_it(data, tiny_qwen):
    import torch

    from backend.engine.worker.commands import Work

    work = Work(Ears())
    values = {
        "request": {"model": str(tiny_qwen), "width": 128, "height": 128, "num_inference_steps": 1},
        "folder": str(data.outputs),
    }
    work.load("a", values)
    calls = []

    def runs_out(*_) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    work.pipeline.parts["dit"].register_forward_pre_hook(runs_out)
    lower = work.pipeline.lower
    for expected in (1, 0):
        work.generate("b", values)
        result = next(one[1] for one in reversed(work.wire.said) if one[0] == "result")
        notes = [note for note in result["notes"] if note.startswith("Out of memory while the picture was drawn, so ")]
        assert len(notes) == expected
    assert len(lower.taken) == 1 and work.pipeline.lower is lower
    assert not (data.user / "measured.json").exists()  # what was not the plan's arrangement teaches nothing
    work.unload()
    work.generate("c", values)
    assert not work.pipeline.lower.taken and (data.user / "measured.json").exists()
    work.unload()
