"""Qwen-Image's VAE on single pictures: pixels to latents and back. Shapes as in `qwen_image`."""

from __future__ import annotations

from backend.families._shared.vae import in_tiles, sample_of

TILES = (32, 24)  # latent cells a side of a tile, and from one to the next, as in diffusers


def encode_image(parts: dict, pixels, *, generator=None, tiled: bool = False):
    """Pixels (B, 3, H, W) in [-1, 1] as normalised latents (B, C, h, w): the mean, or with a `generator` a sample. Differentiable.
    `tiled`: in the pieces that `decode` would take, for less memory."""
    vae = parts["vae"]
    latents = sample_of(_encode_moments(vae, pixels.unsqueeze(2), tiled), generator)
    shift, scale = statistics(vae, latents)
    return ((latents - shift) * (1.0 / scale)).squeeze(2)


def decode(parts: dict, latents, *, tiled: bool | tuple[int, int] = False):
    """Pixels (B, 3, H, W) in [-1, 1] of normalised latents (B, C, h, w). `tiled`: in pieces, for less memory; of 32 cells, 24 apart, or
    of the two numbers given."""
    vae = parts["vae"]
    z = latents.unsqueeze(2)
    shift, scale = statistics(vae, z)
    z = z / (1.0 / scale) + shift
    size, stride = tiled if isinstance(tiled, tuple) else TILES
    if tiled and max(z.shape[-2:]) > size:
        work = lambda tile: vae.decoder(vae.post_quant_conv(tile))  # noqa: E731
        return in_tiles(vae, z, work, size, stride, across=lambda cells: 8 * cells).squeeze(2).clamp(-1, 1)
    return vae.decoder(vae.post_quant_conv(z)).squeeze(2).clamp(-1, 1)


def _encode_moments(vae, frames, tiled: bool = False):
    size, stride = (8 * cells for cells in TILES)
    if not tiled or max(frames.shape[-2:]) <= size:
        return vae.quant_conv(vae.encoder(frames))
    return in_tiles(
        vae, frames, lambda tile: vae.quant_conv(vae.encoder(tile)), size, stride, across=lambda pixels: pixels // 8
    )


def statistics(vae, like):
    """latents_mean and latents_std, (1, C, 1, 1, 1)."""
    import torch

    shape = (1, vae.config.z_dim, 1, 1, 1)
    return (
        torch.tensor(vae.config.latents_mean, device=like.device, dtype=like.dtype).view(shape),
        torch.tensor(vae.config.latents_std, device=like.device, dtype=like.dtype).view(shape),
    )


def use_flat_convolutions(vae) -> None:
    """A single frame sees only the last time slice of each causal kernel, the rest meets zeros: run it as a 2-D convolution."""
    from types import MethodType

    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.forward = MethodType(_flat_forward, module)


def _flat_forward(conv, x, cache_x=None):
    import torch
    import torch.nn.functional as F

    from backend.schema import measured_choices

    if cache_x is not None or x.shape[2] != 1 or conv.stride[0] != 1:
        return type(conv).forward(conv, x, cache_x)
    left, _, top, _, _, _ = conv._padding
    frame, kernel = x[:, :, 0], conv.weight[:, :, -1]
    if measured_choices.chosen().vae == "channels_last":
        frame, kernel = frame.contiguous(memory_format=torch.channels_last), _prepared(conv)
    return F.conv2d(frame, kernel, conv.bias, stride=conv.stride[1:], padding=(top, left)).unsqueeze(2)


def _prepared(conv):
    """The last time slice of the kernel, its channels side by side in memory; made once for as long as the weights are the same."""
    import torch

    weight = conv.weight
    key = (weight.data_ptr(), weight._version, weight.dtype, weight.device)
    known = conv.__dict__.get("_flat_kernel")
    if known is None or known[0] != key or weight.requires_grad:
        known = conv.__dict__["_flat_kernel"] = (
            key,
            weight[:, :, -1].contiguous(memory_format=torch.channels_last),
        )
    return known[1]
