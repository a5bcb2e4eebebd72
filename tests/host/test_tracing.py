"""A model that no shipped table covers is traced by a helper process, and the estimate stops guessing."""

from __future__ import annotations

import time

import pytest

from backend.catalog.identify import identify_model
from backend.catalog.page import estimate_for_page
from backend.catalog.sizes import sizes_of
from backend.catalog.speed import what_if
from backend.families import FAMILIES
from backend.host import tracing
from backend.schema.places import ASSETS
from backend.schema.request import GenerationRequest
from tests.tiny_models import make_qwen_image


def test_known_networks_are_not_asked_for(data):
    assert tracing.ask(identify_model(ASSETS / "starter", FAMILIES), data) == ()
    assert not tracing.folder(data).exists()


@pytest.mark.torch
@pytest.mark.slow
def test_unknown_networks_are_traced(data, tmp_path):
    spec = identify_model(make_qwen_image(tmp_path / "tiny"), FAMILIES)
    card = what_if("8GiB")[0]
    guess = estimate_for_page(spec, card, GenerationRequest(width=64, height=64), user=data.user)
    assert guess.estimating
    try:
        asked = tracing.ask(spec, data)
        assert set(asked) >= {"dit", "text_encoder"}
        end = time.monotonic() + 400
        while sizes_of(spec, folder=tracing.folder(data)).estimating and time.monotonic() < end:
            time.sleep(0.5)
        assert not sizes_of(spec, folder=tracing.folder(data)).estimating, (
            tracing.folder(data) / "log.txt"
        ).read_text()
    finally:
        tracing.end(data)
    known = estimate_for_page(spec, card, GenerationRequest(width=64, height=64), user=data.user)
    assert not known.estimating and known.plan.verdict == "green"
    assert tracing.ask(spec, data) == ()
