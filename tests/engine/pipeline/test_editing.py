"""Editing pictures in the engine: refusals before anything is loaded, what is remembered, hot LoRAs, cached steps, the worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from backend import families
from backend.catalog.family import DrawSettings
from backend.catalog.models.identify import identify_model
from backend.engine.acceleration import first_block_cache
from backend.engine.pipeline.pipeline import Pipeline
from backend.engine.worker.commands import Work
from backend.families import qwen_image
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, request_from_values, request_to_values
from studio.state.output_files import read_settings
from tests.families_exam_test import write_lora

pytestmark = pytest.mark.torch
ASKED = GenerationRequest(prompt="make it red", width=48, height=48, num_inference_steps=2, guidance=3.0, seed=5)


def loft(folder) -> Pipeline:
    return open_spec(identify_model(folder, families.FAMILIES))


def open_spec(spec) -> Pipeline:
    return Pipeline(spec, dtype=torch.float32, device="cpu")


def values(picture) -> list:
    return numpy.asarray(picture).tolist()


@pytest.fixture
def photo(tmp_path) -> str:
    Image.linear_gradient("L").resize((90, 60)).convert("RGB").save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


def test_prompts_are_remembered_with_their_pictures(tiny_edit, photo, monkeypatch):
    pipeline, seen = loft(tiny_edit("edit-2509")), []
    encode = qwen_image.encode_text
    monkeypatch.setattr(qwen_image, "encode_text", lambda *args, **more: seen.append(args[1]) or encode(*args, **more))
    other = Image.new("RGB", (60, 60), "red")
    first = pipeline.encode_prompt("a", [Image.open(photo)])["embeds"]
    assert torch.equal(pipeline.encode_prompt("a", [Image.open(photo)])["embeds"], first) and seen == [["a"]]
    assert not torch.equal(pipeline.encode_prompt("a", [other])["embeds"], first) and len(seen) == 2
    assert pipeline.encode_prompt("a", [other, Image.open(photo)])["embeds"].shape != first.shape
    assert pipeline.encode_prompt("a")["embeds"].shape != first.shape and len(seen) == 4 and not pipeline.notes
    pipeline.encode_prompt("word " * 1100, [other])
    assert pipeline.notes == ["The prompt is too long: what comes after the first 1024 tokens was not read."]


def test_loras_and_cached_steps_take_references_along(tiny_edit, photo, tmp_path, monkeypatch):
    pipeline, request = loft(tiny_edit("edit-2511")), replace(ASKED, edit_images=(photo, photo))
    plain = values(pipeline.generate(request)[0])
    assert plain != values(pipeline.generate(replace(request, edit_images=(photo,)))[0])
    monkeypatch.setattr(first_block_cache, "FEWEST_BLOCKS", 2)
    exact = pipeline.generate(replace(request, step_cache=1e-9))[0]
    assert (
        plain == values(exact) != values(pipeline.generate(replace(request, step_cache=0.5, num_inference_steps=4))[0])
    )
    pipeline.add_lora("dit", write_lora(pipeline, tmp_path / "l.safetensors"), hot=True)
    with_lora = values(pipeline.generate(request)[0])
    assert with_lora != plain
    pipeline.clear_loras()
    assert plain == values(pipeline.generate(request)[0])


AT = DrawSettings(32, 32)


def test_references_of_a_batch_are_alike_and_gradients_reach_them(tiny_edit):
    pipeline = loft(tiny_edit("edit-2511"))
    one = {"embeds": torch.randn(5, 48), "references": (torch.randn(16, 4, 6), torch.randn(16, 2, 2))}
    two = {"embeds": torch.randn(3, 48), "references": tuple(torch.randn_like(each) for each in one["references"])}
    x, sigma = torch.randn(2, 16, 4, 4), torch.tensor([0.9, 0.3])
    both = qwen_image.predict(pipeline.parts, x, sigma, qwen_image.collate([one, two], AT))
    for index, each in enumerate((one, two)):
        alone = qwen_image.predict(
            pipeline.parts, x[index : index + 1], sigma[index : index + 1], qwen_image.collate([each], AT)
        )
        torch.testing.assert_close(both[index : index + 1], alone, rtol=1e-4, atol=1e-5)
    one["references"][1].requires_grad_()
    qwen_image.predict(pipeline.parts, x[:1], sigma[:1], qwen_image.collate([one], AT)).sum().backward()
    assert one["references"][1].grad.abs().sum() > 0
    with pytest.raises(Trouble, match=r"same sizes, and these have 48 x 32 and 48 x 32, 16 x 16\."):
        qwen_image.collate([one, {**two, "references": two["references"][:1]}], AT)
    with pytest.raises(Trouble, match=r"these have .*none"):
        qwen_image.collate([one, {"embeds": two["embeds"]}], AT)


class Ears:
    """A wire that keeps what is said."""

    def __init__(self):
        self.said = []

    def say(self, event, **given):
        self.said.append((event, given))

    def should_stop(self, id):
        return False


def test_the_worker_refuses_in_one_sentence_before_it_loads_and_a_picture_says_what_it_was_made_of(
    tiny_edit, tiny_qwen, photo, data
):
    work = Work(Ears())

    def ask(folder, *pictures, **more):
        request = request_to_values(
            replace(ASKED, width=128, height=128, model=str(folder), edit_images=pictures, **more)
        )
        assert request_from_values(request).edit_images == pictures
        work.generate("1", {"request": request, "folder": str(data.outputs)})
        return work.wire.said

    for folder, pictures, sentence in (
        (tiny_edit("edit"), (), "Qwen-Image-Edit changes a picture, and none was given"),
        (tiny_edit("edit"), (photo, photo), "works from one picture, and 2 were given"),
        (tiny_qwen, (photo,), "draws from words alone"),
    ):
        with pytest.raises(Trouble, match=sentence):
            ask(folder, *pictures)
        assert work.pipeline is None
    with pytest.raises(Trouble, match=r"no picture .*gone\.png"):
        ask(tiny_edit("edit"), photo.replace("photo", "gone"))
    assert work.pipeline is None
    (_, result), *_ = [one for one in ask(tiny_edit("edit"), photo) if one[0] == "result"]
    settings = read_settings(result["pictures"][0])
    assert settings.request["edit_images"] == [Path(photo).name]
    work.unload()


def test_what_editing_lacks_is_said_with_the_folder_to_add(tiny_edit, photo, tmp_path):
    request = replace(ASKED, edit_images=(photo,))
    spec = identify_model(tiny_edit("edit"), families.FAMILIES)
    with pytest.raises(
        Trouble, match=r"the part processor, which was not loaded\. Add its files: the model's folder processor\."
    ):
        open_spec(replace(spec, processor=None)).generate(request)
    without = {name: part for name, part in spec.parts.items() if name != "vision"}
    with pytest.raises(
        Trouble, match=r"the part vision, which was not loaded\. Add its files: the model's folder text_encoder\."
    ):
        open_spec(replace(spec, parts=without)).generate(request)
    with pytest.raises(Trouble, match="holds no processor of pictures"):
        qwen_image.load_processor(tmp_path, "edit")
