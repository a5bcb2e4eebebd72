"""What autoencoders have in common: samples of their latents, and pictures in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def sample_of(moments: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Latents (B, C, h, w) of an encoder's `moments` (B, 2C, h, w), mean and log variance side by side in dimension 1:
    the mean, or with a `generator` (of the CPU) a sample, for which float32 numbers are drawn as diffusers draws them.
    Differentiable."""
    import torch

    mean, log_variance = moments.chunk(2, dim=1)
    if generator is None:
        return mean
    noise = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return mean + torch.exp(0.5 * log_variance.clamp(-30.0, 20.0)) * noise.to(mean.device, mean.dtype)


def in_tiles(
    vae: torch.nn.Module,
    x: torch.Tensor,
    work: Callable[[torch.Tensor], torch.Tensor],
    size: int,
    stride: int,
    *,
    across: Callable[[int], int],
) -> torch.Tensor:
    """`work` on tiles of `x` (B, C, H, W), or (B, C, 1, H, W), `size` a side and `stride` apart, joined. As diffusers'
    tiled_decode and tiled_encode cut and blend, by the `vae`'s own `blend_v` and `blend_h`, but one row of tiles at a
    time, and nothing is kept for a next frame. `across`: a length of what goes in -> that length in what comes out."""
    import torch

    step, overlap = across(stride), across(size - stride)
    above, rows = [], []
    for top in range(0, x.shape[-2], stride):
        row = [work(x[..., top : top + size, left : left + size]) for left in range(0, x.shape[-1], stride)]
        for index, tile in enumerate(row):
            if above:
                vae.blend_v(above[index], tile, overlap)
            if index:
                vae.blend_h(row[index - 1], tile, overlap)
        rows.append(torch.cat([tile[..., :step, :step] for tile in row], dim=-1))
        above = [tile[..., -overlap:, :].clone() for tile in row] if overlap else []
    return torch.cat(rows, dim=-2)[..., : across(x.shape[-2]), : across(x.shape[-1])]
