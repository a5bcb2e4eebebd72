"""One request on a loaded pipeline: is it sound, what does it begin with, and the steps from noise to latents."""

from __future__ import annotations

import torch

from backend.catalog.family import Latents, Levels, each_stream
from backend.catalog.models import model_folder
from backend.catalog.models.supported import check_draws
from backend.engine.acceleration import apply
from backend.engine.devices import device_memory
from backend.engine.pipeline import oom_fallback, request_checks, sampler
from backend.engine.pipeline.guidance import guided
from backend.schema import measured_choices
from backend.schema.request import GenerationRequest


def check(pipeline, request: GenerationRequest, num_edited: int = 0) -> None:
    """Raises Trouble where the model cannot draw what is asked for with so many pictures to edit, or lacks a part."""
    family, spec = pipeline.family, pipeline.spec
    check_draws(family, variant=spec.variant, title=spec.title)
    model_folder.check_multiple(spec, family, width=request.width, height=request.height)
    request_checks.check(spec, family, num_edited, must=False)
    phases = [
        family.parts_of(phase, spec.variant, pictures=bool(num_edited)) for phase in ("denoise", "text", "decode")
    ]
    needed = [name for names in phases for name in names if family.PARTS[name].needed]
    for name in (*needed, *family.TOKENIZERS, *(("processor",) if num_edited else ())):
        if name not in pipeline.parts:
            with pipeline.using(name):
                pass


def start(pipeline, request: GenerationRequest, seed: int, source, noise) -> tuple[Latents, Levels]:
    """The latents to begin with and the noise levels to go through."""
    family, settings = pipeline.family, pipeline.settings(request)
    sigmas = family.sigmas(settings, request.num_inference_steps)
    dtype = torch.float32 if family.FLOAT32_LATENTS else pipeline.dtype
    generator = torch.Generator().manual_seed(seed)
    latents = None
    if source is not None:
        latents = pipeline.encode_picture(source, request.width, request.height, generator)
    if noise is None:
        noise = sampler.noise(family.latent_shape(settings), generator, device=pipeline.device, dtype=dtype)
    noise = each_stream(lambda one: one.to(pipeline.device, dtype), noise)
    if latents is None:
        return family.initial(noise, sigmas, settings), sigmas
    sigmas = sampler.steps_from(sigmas, request.denoising_strength)
    level = each_stream(lambda one, levels: levels[0].to(one.device, one.dtype), latents, sigmas)
    return family.noised(latents, noise, level, settings), sigmas


@torch.no_grad()
def denoise(pipeline, request: GenerationRequest, x, sigmas, positive, negative, on_step, should_stop) -> Latents:
    """Latents (1, C, h, w) of the picture; from the first step again, with the next fallback, where memory runs out."""
    networks = pipeline.family.parts_of("denoise", pipeline.spec.variant)

    def work() -> Latents:
        apply.arrange(pipeline, request)  # weights that were placed anew compute as they are asked to
        if len(networks) > 1:  # each comes for its own passes
            return _sample(pipeline, request, x, sigmas, positive, negative, on_step, should_stop, using=pipeline.using)
        with pipeline.using(*networks):
            return _sample(pipeline, request, x, sigmas, positive, negative, on_step, should_stop)

    own = [oom_fallback.halves(pipeline)] if negative is not None and pipeline.together else []
    return oom_fallback.again(pipeline, networks[0], work, when="the picture was drawn", own=own)


def _quicker_apart(pipeline) -> bool:
    """Whether guidance goes in two passes though there is memory for one: where nothing is fetched, and the way is
    chosen."""
    if measured_choices.chosen().guidance != "apart" or device_memory.is_ram(pipeline.device):
        return False
    blocks, staying = oom_fallback.staying_of(pipeline, apply.PART)
    return staying == blocks


def _sample(pipeline, request, x, sigmas, positive, negative, on_step, should_stop, using=None) -> Latents:
    cache = apply.step_cache(pipeline, request)
    denoised = guided(
        pipeline.family,
        pipeline.parts,
        {"positive": [positive]} | ({} if negative is None else {"negative": [negative]}),
        pipeline.settings(request),
        num_steps=sampler.num_steps(sigmas),
        device=pipeline.device,
        together=pipeline.together and not _quicker_apart(pipeline),
        cache=cache,
        using=using,
    )
    method = pipeline.family.SAMPLERS[0]
    latents = sampler.sample(denoised, x, sigmas, method=method, on_step=on_step, should_stop=should_stop)
    if cache:
        pipeline.note(cache.sentence)
    return latents
