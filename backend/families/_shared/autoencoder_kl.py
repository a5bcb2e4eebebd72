"""diffusers' `AutoencoderKL` as families share it: its files, its sizes from shapes, pixels to latents and back.

Shapes: B pictures, C latent channels, h x w latent cells of 8 pixels a side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.catalog.family import Family, Part, Signature
from backend.families._shared.shapes import count_blocks
from backend.families._shared.vae import in_tiles, sample_of

if TYPE_CHECKING:
    import torch

CELL = 8  # pixels a side of a latent cell
NETWORK = "diffusers.models.autoencoders.autoencoder_kl:AutoencoderKL"


def autoencoder() -> Part:
    return Part(network=NETWORK, folder="vae", phase="decode", keep_precise=("norm",))


def signature(channels: int, title: str, *, quantized: bool = False) -> Signature:
    """The VAE with so many latent channels; `quantized`: with the 1 x 1 convolutions around the latents that older
    models have."""
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
    """The class's keyword arguments from parameter shapes. `scaling` and `shift` of latents cannot be seen in them:
    the family's own."""
    levels = count_blocks(shapes, "encoder.down_blocks.")
    quantized = "quant_conv.weight" in shapes
    return {
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "block_out_channels": tuple(
            shapes[f"encoder.down_blocks.{level}.resnets.0.conv1.weight"][0] for level in range(levels)
        ),
        "layers_per_block": count_blocks(shapes, "encoder.down_blocks.0.resnets."),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "scaling_factor": scaling,
        "shift_factor": shift,
        "use_quant_conv": quantized,
        "use_post_quant_conv": quantized,
        "force_upcast": quantized,
    }


def encode_image(parts: dict, pixels: torch.Tensor, *, generator=None, tiled: bool = False) -> torch.Tensor:
    """Pixels (B, 3, H, W) in [-1, 1] as normalised latents (B, C, h, w): the mean, or with a `generator` of the CPU a
    sample. Differentiable. `tiled`: in the pieces that `decode` would take."""
    vae = parts["vae"]

    def moments_of(piece):
        found = vae.encoder(piece)
        return found if vae.quant_conv is None else vae.quant_conv(found)

    size, stride = (cells * CELL for cells in Family.TILES)
    if tiled and max(pixels.shape[-2:]) > size:
        moments = in_tiles(vae, pixels, moments_of, size, stride, across=lambda length: length // CELL)
    else:
        moments = moments_of(pixels)
    return (sample_of(moments, generator) - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def decode(parts: dict, latents: torch.Tensor, *, tiled: bool | tuple[int, int] = False) -> torch.Tensor:
    """Pixels (B, 3, H, W) in [-1, 1] of normalised latents (B, C, h, w). `tiled`: in pieces of `Family.TILES`, or of
    the two numbers given."""
    vae = parts["vae"]
    z = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)

    def pixels_of(piece):
        return vae.decoder(piece if vae.post_quant_conv is None else vae.post_quant_conv(piece))

    size, stride = tiled if isinstance(tiled, tuple) else Family.TILES
    if tiled and max(z.shape[-2:]) > size:
        return in_tiles(vae, z, pixels_of, size, stride, across=lambda cells: cells * CELL).clamp(-1, 1)
    return pixels_of(z).clamp(-1, 1)
