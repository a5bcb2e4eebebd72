"""Edited pictures equal those of diffusers' own pipelines, on the same weights, noise and schedule.

diffusers' Qwen2VLProcessor wants torchvision for videos; its PIL image processor and the tokenizer are put together here as it does it.
And diffusers 0.42 does not hand on which tokens are pictures', which transformers 5 needs for the positions that the model was trained
with (https://github.com/huggingface/diffusers/issues/14194): here the text encoder is told.
"""

from __future__ import annotations

import numpy
import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from backend import families
from backend.catalog.identify import identify_model
from backend.engine.load import load_part
from backend.families import _qwen_pictures, qwen_image
from tests.tiny_models import make_qwen_edit

pytestmark = pytest.mark.torch
PIXELS = 64 * 64  # the area of references of the tiny models


@pytest.fixture(scope="session")
def edits(tmp_path_factory):
    """edits(variant) -> the folder of a tiny model of it."""
    made = {}

    def folder(variant: str):
        if variant not in made:
            made[variant] = make_qwen_edit(tmp_path_factory.mktemp("edit") / variant, variant)
        return made[variant]

    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    values = numpy.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=numpy.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def parts_of(folder) -> dict:
    spec = identify_model(folder, families.FAMILIES)
    parts = {name: load_part(part, dtype=torch.float32) for name, part in spec.parts.items()}
    return {
        **parts,
        "tokenizer": qwen_image.load_tokenizer(spec.tokenizer),
        "processor": qwen_image.load_processor(spec.processor, spec.variant),
    }


def theirs(variant: str, folder, monkeypatch):
    """diffusers' pipeline of `variant`, with references of the tiny models' area."""
    module = pipeline_qwenimage_edit if variant == "edit" else pipeline_qwenimage_edit_plus
    true = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: true(min(area, PIXELS), ratio))
    cls = QwenImageEditPipeline if variant == "edit" else QwenImageEditPlusPipeline
    pipe = cls.from_pretrained(folder, processor=None, torch_dtype=torch.float32)
    processor = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    processor.image_processor, processor.tokenizer = Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"), pipe.tokenizer
    processor.video_processor, processor.video_token, processor.video_token_id = None, "<|video_pad|>", 2047
    processor.image_token, processor.image_token_id = "<|image_pad|>", 2046
    pipe.processor, forward = processor, pipe.text_encoder.forward
    pipe.text_encoder.forward = lambda **given: forward(**given, mm_token_type_ids=(given["input_ids"] == 2046).int())
    pipe.set_progress_bar_config(disable=True)
    return pipe


PICTURES = {
    "edit": (picture(120, 80),),
    "edit-2509": (picture(120, 80), picture(60, 90, seed=1)),
    "edit-2511": (picture(70, 70),),
}


@pytest.mark.parametrize("variant", PICTURES)
def test_prompts_with_pictures_are_encoded_as_by_diffusers(variant, edits, monkeypatch):
    pipe, pictures = theirs(variant, edits(variant), monkeypatch), PICTURES[variant]
    prompt = "make the ball red"
    seen = [one.resize(_qwen_pictures.size_within(one.size, PIXELS), Image.Resampling.LANCZOS) for one in pictures]
    with torch.no_grad():
        other = pipe.encode_prompt(prompt, seen, device="cpu")[0][0]
        parts = parts_of(edits(variant))
        alone = qwen_image.encode_text(parts, [prompt], pictures=[pictures])[0]["embeds"]
        torch.testing.assert_close(alone, other, rtol=1e-5, atol=1e-5)
        assert (alone - qwen_image.encode_text(parts, [prompt], pictures=[[picture(90, 70, 7)] * len(pictures)])[0]["embeds"][: len(alone)]).abs().max() > 1e-3
        many = qwen_image.encode_text(parts, ["a much longer prompt, of an owl and of a ball", prompt, "a cat"], pictures=[None, pictures, ()])
    torch.testing.assert_close(many[1]["embeds"], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(many[2]["embeds"], qwen_image.encode_text(parts, ["a cat"])[0]["embeds"], rtol=1e-4, atol=1e-5)
