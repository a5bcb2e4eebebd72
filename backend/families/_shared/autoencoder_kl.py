"""diffusers' `AutoencoderKL` as families share it: its files, its sizes from shapes, pixels to latents and back.

Shapes: B pictures, C latent channels, h x w latent cells of 8 pixels a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backend.catalog.family import Part, Signature

if TYPE_CHECKING:
    import torch

CELL = 8  # pixels a side of a latent cell
NETWORK = "diffusers.models.autoencoders.autoencoder_kl:AutoencoderKL"


def autoencoder() -> Part:
    return Part(network=NETWORK, folder="vae", phase="decode", keep_precise=("norm",))


def signature(channels: int, title: str, *, quantized: bool = False) -> Signature:
    """The VAE with so many latent channels; `quantized`: with the 1 x 1 convolutions around the latents that older models have."""
    names = (
        "decoder.up_blocks.{}.resnets.0.conv1.weight",
        "encoder.down_blocks.{}.resnets.0.conv1.weight",
        "decoder.conv_norm_out.weight",
    )
    both = ("quant_conv.weight", "post_quant_conv.weight")
    shapes = {"decoder.conv_in.weight": (None, channels, 3, 3)}
    must, must_not = ((*names, *both), ()) if quantized else (names, both)
    return Signature("vae", "base", must, must_not, shapes, title=title)


def sizes(shapes: dict[str, tuple[int, ...]], *, scaling: float, shift: float | None) -> dict:
    """The class's keyword arguments from parameter shapes. `scaling` and `shift` of latents cannot be seen in them: the family's own."""
    levels = _count(shapes, "encoder.down_blocks.")
    quantized = "quant_conv.weight" in shapes
    return {
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "block_out_channels": tuple(
            shapes[f"encoder.down_blocks.{level}.resnets.0.conv1.weight"][0] for level in range(levels)
        ),
        "layers_per_block": _count(shapes, "encoder.down_blocks.0.resnets."),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "scaling_factor": scaling,
        "shift_factor": shift,
        "use_quant_conv": quantized,
        "use_post_quant_conv": quantized,
        "force_upcast": quantized,
    }


def encode_image(
    parts: dict, pixels: torch.Tensor, *, generator=None, tiled: bool = False, tile: Sequence[int] = (64, 48)
):
    """Pixels (B, 3, H, W) in [-1, 1] as normalised latents (B, C, h, w): the mean, or with a `generator` of the CPU a sample, for which
    B x C x h x w numbers are drawn in float32. Differentiable. `tiled`: in pieces of `tile` cells a side, the second number apart."""
    import torch

    vae = parts["vae"]

    def moments_of(piece):
        found = vae.encoder(piece)
        return found if vae.quant_conv is None else vae.quant_conv(found)

    size, stride = tile
    if tiled and max(pixels.shape[-2:]) > size * CELL:
        moments = in_tiles(pixels, moments_of, size * CELL, stride * CELL, across=lambda length: length // CELL)
    else:
        moments = moments_of(pixels)
    mean, log_variance = moments.chunk(2, dim=1)
    if generator is not None:
        noise = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=torch.float32)
        mean = mean + torch.exp(0.5 * log_variance.clamp(-30.0, 20.0)) * noise.to(mean.device, mean.dtype)
    return (mean - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def decode(
    parts: dict, latents: torch.Tensor, *, tiled: bool | tuple[int, int] = False, tile: Sequence[int] = (64, 48)
):
    """Pixels (B, 3, H, W) in [-1, 1] of normalised latents (B, C, h, w). `tiled`: in pieces of `tile` cells, or of the two numbers given."""
    vae = parts["vae"]
    z = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)

    def pixels_of(piece):
        return vae.decoder(piece if vae.post_quant_conv is None else vae.post_quant_conv(piece))

    size, stride = tiled if isinstance(tiled, tuple) else tile
    if tiled and max(z.shape[-2:]) > size:
        return in_tiles(z, pixels_of, size, stride, across=lambda cells: cells * CELL).clamp(-1, 1)
    return pixels_of(z).clamp(-1, 1)


def in_tiles(x: torch.Tensor, work, size: int, stride: int, *, across) -> torch.Tensor:
    """`work` on overlapping tiles of `x` (B, C, H, W), `size` a side and `stride` apart, blended linearly where they overlap; one row of tiles
    is held at a time. `across`: a length of what goes in -> that length in what comes out."""
    import torch

    step, overlap = across(stride), across(size - stride)
    above, rows = [], []
    for top in range(0, x.shape[-2], stride):
        row = [work(x[..., top : top + size, left : left + size]) for left in range(0, x.shape[-1], stride)]
        for index, tile in enumerate(row):
            if above:
                _blend(above[index], tile, overlap, dim=-2)
            if index:
                _blend(row[index - 1], tile, overlap, dim=-1)
        rows.append(torch.cat([tile[..., :step, :step] for tile in row], dim=-1))
        above = [tile[..., -overlap:, :].clone() for tile in row] if overlap else []
    return torch.cat(rows, dim=-2)[..., : across(x.shape[-2]), : across(x.shape[-1])]


def _blend(before: torch.Tensor, tile: torch.Tensor, overlap: int, *, dim: int) -> None:
    """The first `overlap` rows or columns of `tile`, in place: from the last of `before` to its own."""
    import torch

    count = min(before.shape[dim], tile.shape[dim], overlap)
    shape = [1] * tile.ndim
    shape[dim] = count
    share = (torch.arange(count, device=tile.device, dtype=tile.dtype) / count).view(shape)
    first = tile.narrow(dim, 0, count)
    first.copy_(before.narrow(dim, before.shape[dim] - count, count) * (1 - share) + first * share)


def _count(shapes: dict[str, tuple[int, ...]], beginning: str) -> int:
    return len({name[len(beginning) :].partition(".")[0] for name in shapes if name.startswith(beginning)})
