"""A model that no shipped table covers is traced by a helper process, and the estimate stops guessing."""

from __future__ import annotations

import time
from dataclasses import replace

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
    small = replace(spec, parts={"text_encoder": spec.parts["text_encoder"]})  # the quickest to trace
    try:
        assert tracing.ask(small, data) == ("text_encoder",)
        end = time.monotonic() + 400
        while not (answers := list(tracing.folder(data).glob("*.json"))) and time.monotonic() < end:
            time.sleep(0.2)
        assert not sizes_of(small, folder=tracing.folder(data)).estimating, [path.read_text()[:500] for path in answers]
    finally:
        tracing.end(data)
    assert tracing.ask(small, data) == ()
