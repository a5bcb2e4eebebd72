"""The Generate form as it is kept and comes back, without a browser."""

from __future__ import annotations

import gradio as gr
import pytest

from backend.families import FAMILIES
from backend.host.engine import Engine
from backend.schema.request import GenerationRequest
from studio import generate, generate_layout
from studio.studio import Studio


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    """A studio and its Generate tab; each test writes what it needs."""
    from backend.schema.places import Places

    places = Places(tmp_path_factory.mktemp("data"))
    studio = Studio(places, Engine(places, fake=True), FAMILIES)
    with gr.Blocks():
        yield studio, generate_layout.build(studio)


def values_of(tab, request: GenerationRequest, *, fresh: bool) -> tuple:
    """What the browser sends for the form that shows `request`."""
    fields, _ = generate.fill(tab, request, (), fresh=fresh)
    plain = [value.get("value") if isinstance(value, dict) else value for value in fields]
    return (*plain, request.input_image)


def test_whether_a_new_seed_is_drawn_is_kept(laid_out):
    studio, tab = laid_out
    assert generate.wants_fresh_seed(studio)
    request = GenerationRequest(prompt="a cat", seed=7)
    for wish in (False, True, False):
        values = values_of(tab, request, fresh=wish)
        generate.keep(studio, tab, generate.read_inputs(tab, values, studio), values)
        assert generate.wants_fresh_seed(studio) is wish
        assert generate.remembered(studio) == (request, ())
