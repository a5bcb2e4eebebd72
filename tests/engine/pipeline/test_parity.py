"""Pictures equal those of diffusers' own pipelines, on the same weights, noise and schedule."""

from __future__ import annotations

import numpy
import pytest
import torch
from diffusers import QwenImageImg2ImgPipeline, QwenImagePipeline
from PIL import Image

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.acceleration import first_block_cache
from backend.engine.pipeline.pipeline import Pipeline
from backend.families import qwen_image
from backend.families.qwen_image import vae as _qwen_vae
from backend.schema.paths import ASSETS
from backend.schema.request import GenerationRequest

pytestmark = pytest.mark.torch
STARTER = ASSETS / "starter"


def loft(folder, dtype=torch.float32) -> Pipeline:
    return Pipeline(identify_model(folder, families.FAMILIES), dtype=dtype, device="cpu")


def theirs(cls, folder, dtype=torch.float32):
    pipe = cls.from_pretrained(folder, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def apart(ours: Image.Image, other: Image.Image) -> float:
    """The largest difference in steps of 255, of pictures that are more than one colour."""
    assert numpy.asarray(other).std() > 5
    return float(numpy.abs(numpy.asarray(ours, dtype=float) - numpy.asarray(other, dtype=float)).max())


@pytest.fixture(params=["tiny", "starter"])
def folder(request, tiny_qwen):
    return tiny_qwen if request.param == "tiny" else STARTER


REQUESTS = [
    GenerationRequest(
        prompt="a red apple", negative_prompt="blurry, two apples", width=64, height=96, num_inference_steps=4
    ),
    GenerationRequest(prompt="", width=128, height=64, num_inference_steps=3, guidance=1.0, seed=2**40 + 7),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_text_to_image_is_that_of_diffusers_by_seed(folder, request_):
    pipe = theirs(QwenImagePipeline, folder)
    other = pipe(
        request_.prompt,
        negative_prompt=request_.negative_prompt if request_.guidance > 1 else None,
        true_cfg_scale=request_.guidance,
        width=request_.width,
        height=request_.height,
        num_inference_steps=request_.num_inference_steps,
        generator=torch.Generator().manual_seed(request_.seed),
    ).images[0]
    assert apart(loft(folder).generate(request_)[0], other) <= 1


def test_image_to_image_is_that_of_diffusers_by_seed(folder, tmp_path):
    picture = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=numpy.uint8))
    picture.save(tmp_path / "in.png")
    asked = {"width": 64, "height": 64, "num_inference_steps": 5, "seed": 3, "denoising_strength": 0.55}
    request = GenerationRequest(prompt="a green frog", input_image=str(tmp_path / "in.png"), **asked)
    other = theirs(QwenImageImg2ImgPipeline, folder)(
        "a green frog",
        image=picture,
        negative_prompt="",
        true_cfg_scale=request.guidance,
        width=64,
        height=64,
        strength=0.55,
        num_inference_steps=5,
        generator=torch.Generator().manual_seed(3),
    ).images[0]
    assert apart(loft(folder).generate(request)[0], other) <= 1


def test_latents_in_bfloat16_agree_within_its_rounding():
    noise = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    other = theirs(QwenImagePipeline, STARTER, torch.bfloat16)(
        "a red apple",
        negative_prompt="",
        true_cfg_scale=3.0,
        width=128,
        height=128,
        num_inference_steps=8,
        latents=qwen_image.pack(noise),
    ).images[0]
    request = GenerationRequest(prompt="a red apple", num_inference_steps=8)
    ours = loft(STARTER, torch.bfloat16).generate(request, noise=noise)[0]
    difference = numpy.asarray(ours, dtype=float) - numpy.asarray(other, dtype=float)
    assert numpy.sqrt((difference**2).mean()) < 6  # of 255; another seed gives about 60


def test_cached_steps_without_a_slope_are_those_of_diffusers_first_block_cache(monkeypatch):
    from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

    monkeypatch.setattr(first_block_cache, "SLOPE", 0.0)
    request = GenerationRequest(prompt="a red apple", num_inference_steps=10, guidance=1.0, seed=2, step_cache=0.25)
    pipe = theirs(QwenImagePipeline, STARTER)
    apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.25))
    other = pipe(
        "a red apple", width=128, height=128, num_inference_steps=10, generator=torch.Generator().manual_seed(2)
    ).images[0]
    ours = loft(STARTER)
    assert apart(ours.generate(request)[0], other) <= 1
    assert "reused" in ours.notes[0]


def test_padded_prompts_and_both_halves_in_one_pass_change_nothing(tiny_qwen):
    pipeline = loft(tiny_qwen)
    alone = [pipeline.encode_prompt(prompt)["embeds"] for prompt in ("a cat", "a very long story of a dog and a cat")]
    with torch.no_grad():
        batch = qwen_image.encode_text(pipeline.parts, ["a cat", "a very long story of a dog and a cat"])
    for one, row in zip(alone, batch):
        torch.testing.assert_close(one, row["embeds"], rtol=1e-5, atol=1e-5)
    request = GenerationRequest(
        prompt="a cat", negative_prompt="a very long story", width=64, height=64, num_inference_steps=3
    )
    together = pipeline.generate(request)[0]
    pipeline.together = False
    assert apart(together, pipeline.generate(request)[0]) <= 1


def test_a_single_frame_through_flat_convolutions_equals_the_video_path(tiny_qwen):
    pipeline = loft(tiny_qwen)
    vae = theirs(QwenImagePipeline, tiny_qwen).vae
    latents = torch.randn(2, 16, 6, 4, generator=torch.Generator().manual_seed(0))
    shift, scale = _qwen_vae.statistics(vae, latents)
    with torch.no_grad():
        other = vae.decode(latents.unsqueeze(2) / (1 / scale) + shift).sample[:, :, 0]
        torch.testing.assert_close(qwen_image.decode(pipeline.parts, latents), other, rtol=1e-4, atol=1e-4)
        mean = (vae.encode(other.unsqueeze(2)).latent_dist.mode() - shift) / scale
        torch.testing.assert_close(qwen_image.encode_image(pipeline.parts, other), mean[:, :, 0], rtol=1e-4, atol=1e-4)


def test_without_a_feature_cache_the_numbers_are_those_of_diffusers_bit_for_bit(tiny_qwen):
    vae = theirs(QwenImagePipeline, tiny_qwen).vae
    latents = torch.randn(1, 16, 42, 36, generator=torch.Generator().manual_seed(0))
    shift, scale = _qwen_vae.statistics(vae, latents.unsqueeze(2))
    z = latents.unsqueeze(2) / (1.0 / scale) + shift
    with torch.no_grad():
        whole = vae.decode(z[..., :9, :7]).sample[:, :, 0]
        assert torch.equal(qwen_image.decode({"vae": vae}, latents[..., :9, :7]), whole)
        mean = (vae.encode(whole.unsqueeze(2)).latent_dist.mode() - shift) * (1.0 / scale)
        assert torch.equal(qwen_image.encode_image({"vae": vae}, whole), mean[:, :, 0])
        tiles = vae.tiled_decode(z).sample[:, :, 0].clamp(-1, 1)
        assert torch.equal(qwen_image.decode({"vae": vae}, latents, tiled=True), tiles)


def test_tiles_give_nearly_the_whole_picture():
    pipeline = loft(STARTER)
    latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(latents, scale_factor=6, mode="bicubic")
    whole, tiled = (numpy.asarray(pipeline.decode(smooth, tiled=tiled), dtype=float) for tiled in (False, True))
    assert numpy.abs(whole - tiled).mean() < 2 and whole.std() > 10
