"""Pictures drawn by the weights as they are: samples while training, and what the untouched model draws to be trained along."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from backend.catalog.family import DrawSettings, Encoding, Family, Latents, each_stream
from backend.engine.pipeline.guidance import guided
from backend.engine.pipeline.image_tensors import to_picture
from backend.engine.pipeline.sampler import noise, sample
from backend.images.png_metadata import save_png
from backend.training.encoding.encoding_cache import changed


@torch.no_grad()
def draw_latents(
    family: Family,
    parts: dict,
    settings: DrawSettings,
    positive: Sequence[Encoding],
    negative: Sequence[Encoding],
    *,
    seeds: Sequence[int],
    steps: int,
    dtype: torch.dtype,
    together: bool = True,
) -> Latents:
    """Latents (N, C, h, w) of pictures as `settings` say, by the engine's own sampler and guidance: one for each encoding and seed, led from the
    one of `negative` in its place. `together`: the branches of guidance in one pass, else one after the other, for less memory."""
    networks = [name for name in family.parts_of("denoise", settings.variant) if name in parts]
    device = next(parts[networks[0]].parameters()).device
    parts = parts | {name: Computing(parts[name], dtype) for name in networks}

    def there(value: torch.Tensor) -> torch.Tensor:
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    denoise = guided(
        family,
        parts,
        {
            name: [changed(one, there) for one in some]
            for name, some in (("positive", positive), ("negative", negative))
        },
        settings,
        num_steps=steps,
        device=device,
        together=together,
    )
    shape, kept = family.latent_shape(settings), torch.float32 if family.FLOAT32_LATENTS else dtype
    each = [noise(shape, torch.Generator().manual_seed(seed), device=device, dtype=kept) for seed in seeds]
    sigmas = family.sigmas(settings, steps)
    x = family.initial(each_stream(lambda *some: torch.cat(some), *each), sigmas, settings)
    return sample(denoise, x, sigmas, method=family.SAMPLERS[0])


def num_at_once(size: tuple[int, int]) -> int:
    """How many pictures of `size` (height, width) are drawn together: small ones, which alone would not keep a device busy."""
    return max(1, min(8, 2**18 // (size[0] * size[1])))


class Computing:
    """A network whose weights are kept in float32 while it computes in `dtype`, as a network stored in `dtype` would."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype):
        self.module, self.dtype = module, dtype
        self.parameters = module.parameters

    def __getattr__(self, name: str):
        return getattr(self.module, name)

    def __call__(self, *arguments, **named):
        device = next(self.module.parameters()).device.type
        with torch.autocast(device, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return self.module(*arguments, **named)


@torch.no_grad()
def save_sample(
    family: Family, parts: dict, latents: torch.Tensor, path: Path, settings: dict, *, tiled: bool = False
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
