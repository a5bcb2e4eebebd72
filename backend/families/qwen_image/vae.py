"""Qwen-Image's VAE on single pictures: pixels to latents and back. Shapes as in `qwen_image`."""

from __future__ import annotations

TILES = (32, 24)  # latent cells a side of a tile, and from one to the next, as in diffusers


def encode_image(parts: dict, pixels, *, generator=None, tiled: bool = False):
    """Pixels (B, 3, H, W) in [-1, 1] as normalised latents (B, C, h, w): the mean, or with a `generator` a sample. Differentiable.
    `tiled`: in the pieces that `decode` would take, for less memory."""
    import torch

    vae = parts["vae"]
    moments = _encode_moments(vae, pixels.unsqueeze(2), tiled)
    mean, log_variance = moments.chunk(2, dim=1)
    if generator is not None:
        noise = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=torch.float32)
        mean = mean + torch.exp(0.5 * log_variance.clamp(-30.0, 20.0)) * noise.to(mean.device, mean.dtype)
    shift, scale = statistics(vae, mean)
    return ((mean - shift) * (1.0 / scale)).squeeze(2)


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
        return _in_tiles(vae, z, work, size, stride, across=lambda cells: 8 * cells).squeeze(2).clamp(-1, 1)
    return vae.decoder(vae.post_quant_conv(z)).squeeze(2).clamp(-1, 1)


def _in_tiles(vae, x, work, size: int, stride: int, *, across):
    """`work` on tiles of `x`, joined. As AutoencoderKLQwenImage's tiled_decode and tiled_encode cut and blend, but one row of tiles at a
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


def _encode_moments(vae, frames, tiled: bool = False):
    size, stride = (8 * cells for cells in TILES)
    if not tiled or max(frames.shape[-2:]) <= size:
        return vae.quant_conv(vae.encoder(frames))
    return _in_tiles(
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
