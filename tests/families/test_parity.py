"""Every family that draws equals diffusers' own pipelines for the same noise, and its trainer equals a step written by hand. Qwen-Image, which
was first, has more in tests/engine/pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import diffusers
import numpy
import pytest
import torch
from PIL import Image

from backend import families
from backend.catalog.family import settings_of
from backend.catalog.models.identify import identify_model
from backend.engine.pipeline.pipeline import Pipeline
from backend.families._shared.packing import unpack
from backend.schema.request import GenerationRequest
from backend.training.model.flow_matching_loss import Draws
from backend.training.model.training_module import TrainingBatch, TrainingModule

pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class Case:
    """A tiny model, diffusers' pipelines for it, and how those are asked for what a request of ours asks."""

    family: str
    make: str
    text: str  # diffusers' classes
    image: str
    options: dict = field(default_factory=dict)  # of `make`
    packed: bool = False  # whether its latents come out as tokens

    def asked(self, request: GenerationRequest) -> dict:
        if self.family == "flux":
            return {"guidance_scale": request.guidance}
        return {"guidance_scale": request.guidance - 1, "negative_prompt": request.negative_prompt}


CASES = {
    "flux dev": Case("flux", "make_flux", "FluxPipeline", "FluxImg2ImgPipeline", packed=True),
    "flux schnell": Case("flux", "make_flux", "FluxPipeline", "FluxImg2ImgPipeline", {"variant": "schnell"}, True),
    "z_image": Case("z_image", "make_z_image", "ZImagePipeline", "ZImageImg2ImgPipeline"),
}
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture
def folder_of(tiny):
    """The folder of a case's tiny model."""
    return lambda case: tiny(case.make, **case.options)


def loft(folder: Path) -> Pipeline:
    return Pipeline(identify_model(folder, families.FAMILIES), dtype=torch.float32, device="cpu")


def theirs(name: str, folder: Path):
    pipe = getattr(diffusers, name).from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents_of(pipeline: Pipeline, request: GenerationRequest, monkeypatch) -> torch.Tensor:
    """(1, C, h, w): what the pipeline hands to the decoder."""
    seen, decode = [], pipeline.family.decode
    monkeypatch.setattr(
        pipeline.family, "decode", lambda parts, x, **said: (seen.append(x), decode(parts, x, **said))[1]
    )
    pipeline.generate(request)
    monkeypatch.undo()
    return seen[0]


REQUESTS = [
    GenerationRequest(
        prompt="a red apple", negative_prompt="dark", width=64, height=96, num_inference_steps=4, guidance=3.5
    ),
    GenerationRequest(prompt="", width=176, height=48, num_inference_steps=3, guidance=1.0, seed=2**40 + 7),
]


@each
@pytest.mark.parametrize("request_", REQUESTS, ids=["guided", "plain"])
def test_latents_are_those_of_diffusers_by_seed(case, request_, folder_of, monkeypatch):
    folder = folder_of(case)
    other = theirs(case.text, folder)(
        request_.prompt,
        width=request_.width,
        height=request_.height,
        num_inference_steps=request_.num_inference_steps,
        generator=torch.Generator().manual_seed(request_.seed),
        output_type="latent",
        **case.asked(request_),
    ).images
    if case.packed:
        other = unpack(other, request_.height // 16, request_.width // 16)
    ours = latents_of(loft(folder), request_, monkeypatch)
    assert ours.std() > 0.3
    torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


@each
def test_pictures_from_text_and_from_a_picture_are_those_of_diffusers(case, folder_of, tmp_path):
    folder, pipeline = folder_of(case), loft(folder_of(case))
    picture = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=numpy.uint8))
    picture.save(tmp_path / "in.png")
    plain = GenerationRequest(prompt="a green frog", width=64, height=64, num_inference_steps=5, seed=3, guidance=2.5)
    request = GenerationRequest(
        prompt="a green frog", input_image=str(tmp_path / "in.png"), denoising_strength=0.6, width=64, height=64,
        num_inference_steps=5, seed=3, guidance=2.5,
    )  # fmt: skip
    for name, one, more in ((case.text, plain, {}), (case.image, request, {"image": picture, "strength": 0.6})):
        other = theirs(name, folder)(
            "a green frog",
            width=64,
            height=64,
            num_inference_steps=5,
            generator=torch.Generator().manual_seed(3),
            **case.asked(one),
            **more,
        ).images[0]
        ours = numpy.asarray(pipeline.generate(one)[0], dtype=float)
        other = numpy.asarray(other, dtype=float)
        assert other.std() > 5 and numpy.abs(ours - other).max() <= 1, name


@each
def test_the_loss_is_that_of_the_published_objective(case, folder_of):
    """Rectified flow: the network of diffusers' class, called by hand at (1 - s) x0 + s n, against n - x0."""
    pipeline = loft(folder_of(case))
    family, settings = pipeline.family, settings_of(pipeline.spec, width=64, height=48, guidance=1.0)
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(2, *family.latent_shape(settings), generator=generator)
    noise, sigma = torch.randn(x0.shape, generator=generator), torch.tensor([0.3, 0.8])
    encodings = [pipeline.encode_prompt(prompt) for prompt in ("a cat", "a very small dog on red ground")]
    learner = TrainingModule(family, {"dit": pipeline.parts["dit"]}, dtype=torch.float32)
    material = TrainingBatch(x0, ("", ""), encodings, Draws(noise, sigma), settings, torch.ones(2))
    _, each_loss = learner(material, PLAIN)
    s = sigma.view(2, 1, 1, 1)
    at, network = (1 - s) * x0 + s * noise, pipeline.parts["dit"]
    by_hand = HANDS[case.family](network, at, sigma, encodings, settings)
    expected = (by_hand - (noise - x0)).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(each_loss, expected, rtol=1e-5, atol=1e-6)


class PLAIN:
    """A loss that weighs all noise levels alike."""

    loss_weighting = "none"
    min_snr_gamma = 5.0


def _flux_by_hand(network, x, sigma, encodings, settings):
    batch, channels, height, width = x.shape
    tokens = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(batch, -1, channels * 4)
    ids = torch.cartesian_prod(torch.arange(1), torch.arange(height // 2), torch.arange(width // 2)).float()
    found = network(
        hidden_states=tokens,
        timestep=sigma,
        guidance=torch.ones(batch) if network.config.guidance_embeds else None,
        pooled_projections=torch.stack([one["pooled"] for one in encodings]),
        encoder_hidden_states=torch.stack([one["embeds"] for one in encodings]),
        txt_ids=torch.zeros(512, 3),
        img_ids=ids,
    ).sample
    found = found.reshape(batch, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return found.reshape(x.shape)


def _z_image_by_hand(network, x, sigma, encodings, settings):
    found = [
        network([one.unsqueeze(1)], 1 - level[None], [encoding["embeds"]]).sample[0]
        for one, level, encoding in zip(x, sigma, encodings, strict=True)
    ]
    return -torch.stack(found).squeeze(2)


HANDS = {"flux": _flux_by_hand, "z_image": _z_image_by_hand}


def test_every_family_that_draws_is_compared_with_diffusers():
    drawing = {family.NAME for family in families.FAMILIES if family.DRAWS}
    assert drawing == {case.family for case in CASES.values()} | {"qwen_image"}
