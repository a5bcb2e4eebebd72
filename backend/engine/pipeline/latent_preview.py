"""What a picture looks like while it is drawn, for a bounded share of the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from PIL import Image

from backend.catalog.family import DrawSettings, Family, Latents
from backend.engine.devices import out_of_memory
from backend.engine.pipeline.image_tensors import to_picture

DECODED_CELLS = 32  # up to so many latent cells a side the VAE draws the preview itself; above, a linear map does
SHARE = 0.2  # of the time may go into previews
LEAST_SECONDS = 0.4  # between two


@dataclass(frozen=True)
class Step:
    """How far a picture is. `preview()` draws what it looks like now, or gives None where one was drawn just before."""

    step: int
    steps: int
    picture: int  # number of the picture, from 0
    seconds_left: float  # of this picture
    preview: Callable[[], Image.Image | None]


class Preview:
    """Draws expected latents: by the VAE where the picture is small and the VAE stays on the device, else cell by cell
    with a linear map from latents to colours, which is learnt from what was decoded."""

    def __init__(self, family: Family, parts: dict, placements: dict, *, device: torch.device, dtype: torch.dtype):
        self.family, self.parts, self.placements = family, parts, placements
        self.device, self.dtype = device, dtype
        self.weights: torch.Tensor | None = None  # (C + 1, 3)

    def _decodes(self, height: int, width: int) -> bool:
        return max(height, width) <= DECODED_CELLS and "vae" not in self.placements

    def must_learn(self, settings: DrawSettings) -> bool:
        """Whether what is drawn can have no preview yet."""
        rows, columns = self.family.sizes(settings.variant).cells(settings.width, settings.height)
        return self.weights is None and not self._decodes(rows, columns)

    @torch.no_grad()
    def learn_from_noise(self, settings: DrawSettings) -> None:
        """Fits the map to the decoding of smooth noise; needs the VAE. Every decoded picture betters it. Of video and
        of several streams it is learnt from what was decoded alone."""
        shape = self.family.latent_shape(settings)
        if isinstance(shape, dict) or len(shape) != 3:
            return
        channels = shape[0]
        coarse = torch.randn((1, channels, 8, 8), generator=torch.Generator().manual_seed(0))
        smooth = torch.nn.functional.interpolate(coarse, scale_factor=4, mode="bicubic")
        smooth = (smooth / smooth.std()).to(self.device, self.dtype)
        with out_of_memory.suppress_oom():
            self.learn(smooth, self.family.decode(self.parts, smooth))

    def learn(self, latents: torch.Tensor, pixels: torch.Tensor) -> None:
        """Fits the linear map from latents (1, C, h, w) to their pixels (1, 3, H, W), if there are enough cells to
        determine it and memory for it."""
        cells = _with_one(latents)
        if len(cells) < 2 * cells.shape[1]:
            return
        with out_of_memory.suppress_oom():
            height, width = latents.shape[-2:]
            colours = torch.nn.functional.adaptive_avg_pool2d(pixels.float(), (height, width))[0].flatten(1).T.cpu()
            self.weights = torch.linalg.lstsq(cells, colours, driver="gelsd").solution

    @torch.no_grad()
    def draw(self, latents: Latents) -> Image.Image | None:
        """A picture of latents (1, C, h, w), None where the map is not known."""
        whole, latents = latents, self.family.preview_latents(latents)
        height, width = latents.shape[-2:]
        if whole is latents and self._decodes(height, width):
            return to_picture(self.family.decode(self.parts, latents.to(self.dtype))[0])
        if self.weights is None:
            return None
        picture = to_picture((_with_one(latents) @ self.weights).T.reshape(3, height, width).clamp(-1, 1))
        scale = max(1, 256 // max(height, width))
        return picture.resize((width * scale, height * scale), Image.Resampling.BICUBIC)


def _with_one(latents: torch.Tensor) -> torch.Tensor:
    cells = latents[0].float().flatten(1).T.cpu()
    return torch.cat([cells, torch.ones(len(cells), 1)], dim=1)


def watched(number: int, num_steps: int, on_step: Callable[[Step], None], preview: Preview):
    """What `sampling.sample` is to call after each step of picture `number`: times it and tells `on_step`."""
    began = drawn = time.monotonic()
    cost = 0.0

    def draw(step: int, estimate: Callable[[], torch.Tensor]) -> Image.Image | None:
        nonlocal drawn, cost
        now = time.monotonic()
        if step == num_steps or now - drawn < max(LEAST_SECONDS, cost / SHARE):
            return None
        picture = None
        with out_of_memory.suppress_oom():  # a preview is left out; the picture itself may well go on
            picture = preview.draw(estimate())
        drawn, cost = time.monotonic(), time.monotonic() - now
        return picture

    def after(step: int, estimate: Callable[[], torch.Tensor]) -> None:
        pace = (time.monotonic() - began) / step
        on_step(Step(step, num_steps, number, pace * (num_steps - step), partial(draw, step, estimate)))

    return after
