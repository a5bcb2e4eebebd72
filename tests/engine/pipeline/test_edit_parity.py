"""Edited pictures equal those of diffusers' own pipelines, on the same weights, noise and schedule.

diffusers' Qwen2VLProcessor wants torchvision for videos; its PIL image processor and the tokenizer are put together here as it does it.
And diffusers 0.42 does not hand on which tokens are pictures', which transformers 5 needs for the positions that the model was trained
with (https://github.com/huggingface/diffusers/issues/14194): here the text encoder is told.
"""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.loading.load import load_part
from backend.engine.pipeline.pipeline import Pipeline
from backend.families import qwen_image
from backend.families.qwen_image import reference_geometry
from backend.schema.memory_plan import VramConfig
from backend.schema.request import GenerationRequest

pytestmark = pytest.mark.torch
PIXELS = 64 * 64  # the area of references of the tiny models


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
    processor.image_processor, processor.tokenizer = (
        Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"),
        pipe.tokenizer,
    )
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
def test_prompts_with_pictures_are_encoded_as_by_diffusers(variant, tiny_edit, monkeypatch):
    pipe, pictures = theirs(variant, tiny_edit(variant), monkeypatch), PICTURES[variant]
    prompt = "make the ball red"
    seen = [one.resize(reference_geometry.size_within(one.size, PIXELS), Image.Resampling.LANCZOS) for one in pictures]
    with torch.no_grad():
        other = pipe.encode_prompt(prompt, seen, device="cpu")[0][0]
        parts = parts_of(tiny_edit(variant))
        alone = qwen_image.encode_text(parts, [prompt], pictures=[pictures])[0]["embeds"]
        torch.testing.assert_close(alone, other, rtol=1e-5, atol=1e-5)
        others = tuple(picture(*one.size, seed=7) for one in pictures)
        assert (alone - qwen_image.encode_text(parts, [prompt], pictures=[others])[0]["embeds"]).abs().max() > 1e-3
        many = qwen_image.encode_text(
            parts, ["a much longer prompt, of an owl and of a ball", prompt, "a cat"], pictures=[None, pictures, ()]
        )
    torch.testing.assert_close(many[1]["embeds"], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        many[2]["embeds"], qwen_image.encode_text(parts, ["a cat"])[0]["embeds"], rtol=1e-4, atol=1e-5
    )


def latents_of(pipeline: Pipeline, request: GenerationRequest, monkeypatch) -> torch.Tensor:
    """What `request`'s picture is decoded from."""
    kept = []
    monkeypatch.setattr(pipeline, "decode", lambda latents, **_: kept.append(latents))
    pipeline.generate(request)
    return kept[0]


def saved(pictures, folder) -> tuple[str, ...]:
    for number, one in enumerate(pictures):
        one.save(folder / f"{number}.png")
    return tuple(str(folder / f"{number}.png") for number in range(len(pictures)))


def loft(folder, **options) -> Pipeline:
    return Pipeline(identify_model(folder, families.FAMILIES), dtype=torch.float32, device="cpu", **options)


ASKED = GenerationRequest(
    prompt="make the ball red",
    negative_prompt="blurry",
    width=48,
    height=64,
    num_inference_steps=3,
    guidance=4.0,
    seed=11,
)
DISK = VramConfig(None, "disk", None, "disk", "float32", "cpu", "float32", "cpu")
CODES = VramConfig(*("float8_e4m3fn", "cpu") * 3, "float32", "cpu")


@pytest.mark.parametrize("variant", PICTURES)
def test_edited_latents_are_those_of_diffusers_however_weights_lie(variant, tiny_edit, tmp_path, monkeypatch):
    pictures, folder = PICTURES[variant], tiny_edit(variant)
    request = replace(ASKED, edit_images=saved(pictures, tmp_path))
    other = theirs(variant, folder, monkeypatch)(
        list(pictures) if variant != "edit" else pictures[0],
        request.prompt,
        negative_prompt=request.negative_prompt,
        true_cfg_scale=request.guidance,
        width=request.width,
        height=request.height,
        num_inference_steps=request.num_inference_steps,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
    ).images
    plain = loft(folder)
    assert set(plain.parts) == {"dit", "text_encoder", "vision", "vae", "tokenizer", "processor"}
    mine = latents_of(plain, request, monkeypatch)
    torch.testing.assert_close(qwen_image.pack(mine), other, rtol=1e-4, atol=1e-4)
    plain.together = False
    torch.testing.assert_close(latents_of(plain, request, monkeypatch), mine, rtol=1e-4, atol=1e-4)
    streamed = loft(folder, configs=dict.fromkeys(plain.spec.parts, DISK), vram_limit_bytes=0)
    torch.testing.assert_close(latents_of(streamed, request, monkeypatch), mine, rtol=1e-4, atol=1e-4)
    streamed.close()
    rounded = latents_of(loft(folder, configs=dict.fromkeys(plain.spec.parts, CODES)), request, monkeypatch)
    assert 0 < (rounded - mine).std() < 0.2 * mine.std()


def test_sizes_are_those_of_diffusers():
    for width, height in ((1, 1), (640, 480), (333, 1001), (5000, 60), (1920, 1080), (1024, 1024), (97, 89)):
        for pixels in (reference_geometry.REFERENCE_PIXELS, reference_geometry.SEEN_PIXELS):
            ours = reference_geometry.size_within((width, height), pixels)
            assert ours == pipeline_qwenimage_edit_plus.calculate_dimensions(pixels, width / height)
            assert ours == pipeline_qwenimage_edit.calculate_dimensions(pixels, width / height)[:2]
    assert reference_geometry.SEEN_PIXELS == pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE
    assert reference_geometry.REFERENCE_PIXELS == pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE
