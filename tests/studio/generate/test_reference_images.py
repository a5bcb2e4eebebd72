"""The pictures to edit: taken, moved, taken away, drawn; and never a file that is none of the studio's own."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from backend.families import FAMILIES
from backend.host.engine.client import Engine
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest
from studio.generate import reference_images
from studio.generate.restore_settings import restore
from studio.generate.tab import for_its_model
from studio.state import library
from studio.state.context import Studio
from studio.state.output_files import Settings


@pytest.fixture
def sent(data):
    """Two pictures that a browser has sent."""
    folder = data.cache / "uploads"
    folder.mkdir(parents=True)
    for name, colour in (("a, b.png", "red"), ("c.png", "blue")):
        Image.new("RGB", (8, 8), colour).save(folder / name)
    return [str(folder / "a, b.png"), str(folder / "c.png")]


def test_pictures_are_kept_moved_and_taken_away(data, sent):
    kept = reference_images.changed([], "add", json.dumps(sent), data)
    assert len(kept) == 2 and all(data.user / "inputs" in reference_images.Path(path).parents for path in kept)
    reference_images.check_here(kept, data)
    assert reference_images.changed(kept, "move", "[1, 0]", data) == kept[::-1]
    assert (
        reference_images.changed(kept, "move", "[0, 5]", data)
        == reference_images.changed(kept, "else", "", data)
        == kept
    )
    assert reference_images.changed(kept, "remove", "0", data) == kept[1:]
    assert len(reference_images.changed(kept * 4, "add", json.dumps(sent), data)) == reference_images.MOST


def test_what_is_no_picture_or_from_elsewhere_is_refused(data, sent, tmp_path):
    text = data.cache / "uploads" / "text.png"
    text.write_text("no picture")
    with pytest.raises(Trouble, match=r"text\.png is not a picture"):
        reference_images.changed([], "add", json.dumps([str(text)]), data)
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8)).save(secret)
    with pytest.raises(Trouble, match="was not sent"):
        reference_images.changed([], "add", json.dumps([str(secret)]), data)
    with pytest.raises(Trouble, match=r"Picture 1, secret\.png, is not here"):
        reference_images.check_here([str(secret)], data)


def test_why_a_picture_could_not_be_sent_is_said(data):
    with pytest.raises(Trouble, match=r"could not be sent: HTTP 413: a\.png is larger than 64 MiB"):
        reference_images.changed([], "refused", '"HTTP 413: a.png is larger than 64 MiB"', data)


def test_the_row_is_drawn_for_a_model_that_edits_and_only_its_requests_have_pictures(data, sent):
    studio = Studio(data, Engine(data, fake=True), FAMILIES)
    paths = tuple(reference_images.changed([], "add", json.dumps(sent), data))
    assert library.edits((), "Qwen/Qwen-Image-Edit", studio) and not library.edits((), "Qwen/Qwen-Image", studio)
    assert reference_images.row(studio, paths, shown=False) == ""
    html = reference_images.row(studio, paths, shown=True)
    assert html.count("<figure") == 2 and "file=" in html and "Add pictures" in html and "Picture 2" in html
    assert "Drop pictures here" in reference_images.row(studio, (), shown=True)
    request = GenerationRequest(model="Qwen/Qwen-Image-Edit", edit_images=paths)
    assert for_its_model(studio, request) == request
    assert for_its_model(studio, GenerationRequest(model="Qwen/Qwen-Image", edit_images=paths)).edit_images == ()


def test_a_picture_brings_back_those_it_edited_as_far_as_they_are_here(data, sent):
    kept = reference_images.changed([], "add", json.dumps(sent), data)
    made = Settings(
        {"prompt": "x", "edit_images": [*kept, "/etc/hostname", "/gone/cat.png"], "input_image": "/etc/hostname"}
    )
    back = restore(made, models=[], loras=[], places=data)
    assert back.request.edit_images == tuple(kept) and back.request.input_image is None
    assert "hostname, cat.png are not here" in " ".join(back.missing)
