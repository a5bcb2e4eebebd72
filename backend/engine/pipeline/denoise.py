"""One request on a loaded pipeline: is it sound, what does it begin with, and the steps from noise to latents."""

from __future__ import annotations

import torch

from backend.catalog.models.supported import check_draws
from backend.engine.acceleration import apply
from backend.engine.devices import device_memory
from backend.engine.pipeline import oom_fallback, request_checks, sampler
from backend.schema import measured_choices
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest


def check(pipeline, request: GenerationRequest, num_edited: int = 0) -> None:
    """Raises Trouble where the model cannot draw what is asked for with so many pictures to edit, or lacks a part."""
    family, spec = pipeline.family, pipeline.spec
    check_draws(family, variant=spec.variant, title=spec.title)
    multiple = family.SIZES.multiple
    for name, value in (("Width", request.width), ("Height", request.height)):
        if value % multiple or value < multiple:
            raise Trouble("bad_value", f"{name} is {value}; this model needs a multiple of {multiple}.")
    request_checks.check(spec, family, num_edited, must=False)
    for name in ("dit", "text_encoder", "vae", "tokenizer", *(("vision", "processor") if num_edited else ())):
        if name not in pipeline.parts:
            with pipeline.using(name):
                pass


def start(pipeline, request: GenerationRequest, seed: int, source, noise) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents to begin with and the noise levels to go through."""
    family = pipeline.family
    sigmas = family.sigmas(
        pipeline.spec.scheduler, request.num_inference_steps, width=request.width, height=request.height
    )
    generator = torch.Generator().manual_seed(seed)
    latents = None
    if source is not None:
        latents = pipeline.encode_picture(source, request.width, request.height, generator)
    if noise is None:
        shape = family.latent_shape(request.width, request.height)
        noise = sampler.noise(shape, generator, device=pipeline.device, dtype=pipeline.dtype)
    noise = noise.to(pipeline.device, pipeline.dtype)
    if latents is None:
        return noise, sigmas
    sigmas = sampler.steps_from(sigmas, request.denoising_strength)
    return sampler.mix(latents, noise, sigmas[0]), sigmas


@torch.no_grad()
def denoise(pipeline, request: GenerationRequest, x, sigmas, towards, away, on_step, should_stop) -> torch.Tensor:
    """Latents (1, C, h, w) of the picture; from the first step again, one rung lower, where memory runs out."""

    def work() -> torch.Tensor:
        apply.arrange(pipeline, request)  # weights that were placed anew compute as they are asked to
        with pipeline.using("dit"):
            return _sample(pipeline, request, x, sigmas, towards, away, on_step, should_stop)

    own = [oom_fallback.halves(pipeline)] if away is not None and pipeline.together else []
    return oom_fallback.again(pipeline, "dit", work, when="the picture was drawn", own=own)


def _quicker_apart(pipeline) -> bool:
    """Whether guidance goes in two passes though there is memory for one: where nothing is fetched, and the way is chosen."""
    if measured_choices.chosen().guidance != "apart" or device_memory.is_ram(pipeline.device):
        return False
    blocks, staying = oom_fallback.staying_of(pipeline, "dit")
    return staying == blocks


def _sample(pipeline, request, x, sigmas, towards, away, on_step, should_stop) -> torch.Tensor:
    cache = apply.step_cache(pipeline, request)
    velocity = sampler.guided(
        pipeline.family,
        pipeline.parts,
        towards,
        away,
        request.guidance,
        device=pipeline.device,
        together=pipeline.together and not _quicker_apart(pipeline),
        cache=cache,
    )
    latents = sampler.sample(velocity, x, sigmas, on_step=on_step, should_stop=should_stop)
    if cache:
        pipeline.note(cache.sentence)
    return latents
