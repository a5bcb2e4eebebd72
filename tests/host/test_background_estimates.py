"""A model that no shipped table covers is traced by a helper process, and the estimate stops guessing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from backend.catalog.models.identify import identify_model
from backend.families import FAMILIES
from backend.host import background_estimates
from backend.planner.costs.device_speed import what_if
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.page_estimate import estimate_for_page
from backend.schema.paths import ASSETS
from backend.schema.request import GenerationRequest
from tests.tiny_models import make_qwen_image


def test_known_networks_are_not_asked_for(data):
    assert background_estimates.ask(identify_model(ASSETS / "starter", FAMILIES), data) == ()
    assert not background_estimates.folder(data).exists()


@pytest.mark.torch
@pytest.mark.slow
def test_unknown_networks_are_traced(data, tmp_path):
    spec = identify_model(make_qwen_image(tmp_path / "tiny"), FAMILIES)
    card = what_if("8GiB")[0]
    guess = estimate_for_page(spec, card, GenerationRequest(width=64, height=64), user=data.user)
    assert guess.estimating
    small = replace(spec, parts={"text_encoder": spec.parts["text_encoder"]})  # the quickest to trace
    try:
        assert background_estimates.ask(small, data) == ("text_encoder",)
        end = time.monotonic() + 400
        while not (answers := list(background_estimates.folder(data).glob("*.json"))) and time.monotonic() < end:
            time.sleep(0.2)
        assert not sizes_of(small, folder=background_estimates.folder(data)).estimating, [
            path.read_text()[:500] for path in answers
        ]
    finally:
        background_estimates.end(data)
    assert background_estimates.ask(small, data) == ()
