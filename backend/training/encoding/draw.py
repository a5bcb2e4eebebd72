"""Pictures drawn by the weights as they are: samples while training, and what the untouched model draws to be trained along."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

from backend.engine.pipeline.image_tensors import to_picture
from backend.engine.pipeline.sampler import noise, sample
from backend.images.png_metadata import save_png
from backend.training.encoding.encoding_cache import changed


@torch.no_grad()
def draw_latents(
    family: ModuleType,
    parts: dict,
    scheduler: dict,
    towards: Sequence[dict],
    away: Sequence[dict],
    *,
    seeds: Sequence[int],
    steps: int,
    guidance: float,
    size: tuple[int, int],
    dtype: torch.dtype,
    together: bool = True,
) -> torch.Tensor:
    """Latents (N, C, h, w) of pictures of `size` (height, width), by the same functions as the engine's: one for each encoding and seed, led
    from the one of `away` in its place. `together`: the halves of guidance in one pass, else in two, for less memory."""
    height, width = size
    device = next(parts["dit"].parameters()).device
    parts = {**parts, "dit": Computing(parts["dit"], dtype)}
    guiding = guidance > 1
    groups = [towards] if not guiding else [[*towards, *away]] if together else [towards, away]
    conditions = [
        family.collate([changed(one, lambda value: value.to(device, dtype)) for one in group], device=device)
        for group in groups
    ]

    def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        if guiding and together:
            x, sigma = torch.cat([x, x]), torch.cat([sigma, sigma])
        halves = torch.cat([family.predict(parts, x, sigma, condition) for condition in conditions])
        return family.guide(*halves.chunk(2), guidance) if guiding else halves

    shape = family.latent_shape(width, height)
    x = torch.cat([noise(shape, torch.Generator().manual_seed(seed), device=device, dtype=dtype) for seed in seeds])
    return sample(denoise, x, family.sigmas(scheduler, steps, width=width, height=height))


def num_at_once(size: tuple[int, int]) -> int:
    """How many pictures of `size` (height, width) are drawn together: small ones, which alone would not keep a device busy."""
    return max(1, min(8, 2**18 // (size[0] * size[1])))


class Computing:
    """A network whose weights are kept in float32 while it computes in `dtype`, as a network stored in `dtype` would."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype):
        self.module, self.dtype = module, dtype
        self.parameters = module.parameters

    def __call__(self, *arguments, **named):
        device = next(self.module.parameters()).device.type
        with torch.autocast(device, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return self.module(*arguments, **named)


@torch.no_grad()
def save_sample(
    family: ModuleType, parts: dict, latents: torch.Tensor, path: Path, settings: dict, *, tiled: bool = False
) -> None:
    weights = next(parts["vae"].parameters())
    pixels = family.decode(parts, latents.to(weights.device, weights.dtype), tiled=tiled)
    save_png(to_picture(pixels[0]), path, settings)


@contextlib.contextmanager
def drawing(module: torch.nn.Module) -> Iterator[None]:
    """Everything in `module` in eval mode, the random state as it was before: drawing leaves no trace in the run."""
    modes = [(inner, inner.training) for inner in module.modules()]
    state = torch.get_rng_state()
    module.eval()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for inner, mode in modes:
            inner.training = mode
