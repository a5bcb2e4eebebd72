"""The Generate form as it is kept and comes back, without a browser."""

from __future__ import annotations

import gradio as gr
import pytest
from PIL import Image

from backend.families import FAMILIES
from backend.host.engine.client import Engine
from backend.schema.request import GenerationRequest
from studio.generate import layout
from studio.generate import tab as generate
from studio.state import saved_forms
from studio.state.context import Studio


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    """A studio and its Generate tab; each test writes what it needs."""
    from backend.schema.paths import Places

    places = Places(tmp_path_factory.mktemp("data"))
    studio = Studio(places, Engine(places, fake=True), FAMILIES)
    with gr.Blocks():
        yield studio, layout.build(studio)


def values_of(tab, request: GenerationRequest, *, fresh: bool) -> tuple:
    """What the browser sends for the form that shows `request`."""
    fields, _ = generate.fill(tab, request, (), fresh=fresh)
    plain = [value.get("value") if isinstance(value, dict) else value for value in fields]
    return (*plain, request.input_image)


def test_pictures_of_a_data_folder_that_was_moved_do_not_come_back(laid_out, tmp_path):
    studio, _ = laid_out
    elsewhere, here = tmp_path / "old.png", studio.places.user / "inputs" / "here.png"
    here.parent.mkdir(parents=True)
    for path in (elsewhere, here):
        Image.new("RGB", (8, 8)).save(path)
    values = {"prompt": "x", "input_image": str(elsewhere), "edit_images": [str(elsewhere), str(here)]}
    saved_forms.write_values(saved_forms.request_file(studio.places), values)
    request, _ = generate.remembered(studio)
    assert request.input_image is None and request.edit_images == (str(here),) and request.prompt == "x"


def test_whether_a_new_seed_is_drawn_is_kept(laid_out):
    studio, tab = laid_out
    assert generate.wants_fresh_seed(studio)
    request = GenerationRequest(prompt="a cat", seed=7)
    for wish in (False, True, False):
        values = values_of(tab, request, fresh=wish)
        generate.keep(studio, tab, generate.read_inputs(tab, values, studio), values)
        assert generate.wants_fresh_seed(studio) is wish
        assert generate.remembered(studio) == (request, ())
