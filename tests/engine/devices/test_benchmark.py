"""A device is measured in a second or two, and the estimate of seconds follows what was measured."""

from __future__ import annotations

import json
import threading
import time

import pytest

from backend.catalog.models.identify import identify_model
from backend.engine.devices import benchmark
from backend.families import FAMILIES
from backend.planner import history
from backend.planner.costs.device_speed import speed_of
from backend.planner.page_estimate import estimate_for_page
from backend.schema.paths import ASSETS
from backend.schema.request import GenerationRequest
from backend.system import gpu_probe

pytestmark = pytest.mark.torch


def test_the_command_s_figures_reach_the_page_and_runs_replace_them(data, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["calibrate", "--device", "cpu", "--file", str(ASSETS / "starter" / "vae" / "config.json")]
    )
    monkeypatch.setattr(benchmark, "SECONDS", 0.1)
    began = time.monotonic()
    benchmark.main()
    assert time.monotonic() - began < 60 and "TFLOP/s" in capsys.readouterr().out
    file = data.user / "calibration.json"
    here = gpu_probe.choose(gpu_probe.probe(), "cpu")
    speed = speed_of(here, file)
    assert speed.measured and speed.flops == json.loads(file.read_text())["cpu"]["flops"] > 1e9

    spec, request = identify_model(ASSETS / "starter", FAMILIES), GenerationRequest(prompt="a red apple")

    def seconds():
        return estimate_for_page(spec, here, request, user=data.user).plan.seconds

    low, high = seconds()
    assert 0 < low < high
    twice = json.loads(file.read_text())
    twice["cpu"]["flops"] *= 2
    file.write_text(json.dumps(twice))
    assert seconds()[0] < low
    for took in (5.0, 6.0):  # what the same request took here is known better than any rate
        history.remember(
            data.user / "measured.json",
            here,
            spec.family,
            kind=history.kind_of(request),
            predicted_bytes=10,
            measured_bytes=10,
            seconds=took,
        )
    low, high = seconds()
    assert 4.5 < low <= 5.0 and 6.0 <= high < 7.0
    found = estimate_for_page(spec, here, request, user=data.user)
    assert found.last_time.startswith("Last time: predicted")


def test_a_worker_measures_once_while_nothing_is_asked_of_it_and_lets_itself_be_stopped(data, monkeypatch):
    from backend.engine.worker import commands
    from backend.schema.messages import Cancelled

    monkeypatch.setattr(benchmark, "SECONDS", 0.02)
    monkeypatch.setattr(benchmark, "ROOM_BYTES", 0)
    monkeypatch.setattr(benchmark, "others_are_busy", lambda: True)
    worker, file, here = commands.Work(None), data.user / "calibration.json", gpu_probe.choose(gpu_probe.probe(), "cpu")
    worker.measure_speed(lambda: False)
    assert not worker.measured and not file.exists(), "others are at work"
    monkeypatch.setattr(benchmark, "others_are_busy", lambda: False)
    asked = iter([False, False, True])
    worker.measure_speed(lambda: next(asked))
    assert not worker.measured and not file.exists(), "a command came"
    worker.measure_speed(lambda: False)
    assert worker.measured and speed_of(here, file).measured
    kept = file.read_text()
    assert benchmark.measure_once(worker.device, here=data, should_stop=lambda: True), "once is enough"
    assert file.read_text() == kept
    spec, request = identify_model(ASSETS / "starter", FAMILIES), GenerationRequest(prompt="a red apple")
    said = " ".join(estimate_for_page(spec, here, request, user=data.user).sentences)
    assert "measured of this processor" in said and "card" not in said
    with pytest.raises(Cancelled):
        benchmark.measure(worker.device, should_stop=lambda: True)


def test_the_loop_measures_when_it_is_quiet_and_a_command_comes_first(monkeypatch):
    import queue

    from backend.engine import __main__ as loop

    class Wire:
        def __init__(self):
            self.commands, self.ended = queue.Queue(), threading.Event()

    class Worker:
        measured, asked = False, 0

        def measure_speed(self, should_stop):
            self.asked += 1
            assert not should_stop()
            wire.commands.put({"command": "generate"})
            assert should_stop(), "what waits ends the measuring"

    monkeypatch.setattr(loop, "QUIET_SECONDS", 0.01)
    wire, worker = Wire(), Worker()
    wire.commands.put({"command": "load"})
    assert loop._next(wire, worker) == {"command": "load"} and not worker.asked
    assert loop._next(wire, worker) == {"command": "generate"} and worker.asked == 1
