"""A device is measured in a second or two, and the estimate of seconds follows what was measured."""

from __future__ import annotations

import json
import time

import pytest

from backend.catalog import learnt
from backend.catalog.identify import identify_model
from backend.catalog.page import estimate_for_page
from backend.catalog.speed import speed_of
from backend.engine import calibrate
from backend.families import FAMILIES
from backend.host import card
from backend.schema.places import ASSETS
from backend.schema.request import GenerationRequest

pytestmark = pytest.mark.torch


def test_the_command_s_figures_reach_the_page_and_runs_replace_them(data, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["calibrate", "--device", "cpu", "--file", str(ASSETS / "starter" / "vae" / "config.json")]
    )
    monkeypatch.setattr(calibrate, "SECONDS", 0.1)
    began = time.monotonic()
    calibrate.main()
    assert time.monotonic() - began < 60 and "TFLOP/s" in capsys.readouterr().out
    file = data.user / "calibration.json"
    here = card.choose(card.probe(), "cpu")
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
        learnt.remember(
            data.user / "measured.json",
            here,
            spec.family,
            kind=learnt.kind_of(request),
            predicted_bytes=10,
            measured_bytes=10,
            seconds=took,
        )
    low, high = seconds()
    assert 4.5 < low <= 5.0 and 6.0 <= high < 7.0
    found = estimate_for_page(spec, here, request, user=data.user)
    assert found.last_time.startswith("Last time: predicted")
