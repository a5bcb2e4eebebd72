"""The Qwen-Image autoencoder on 2-D kernels.

A still picture meets only the last time slice of each 3-D kernel (the slices before it see zero padding), so this is
the stock class for single frames, equal within rounding and several times faster to train.

``p`` maps the class's own parameter names to tensors, the 3-D ones cut to their last slice.
"""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage

CONFIG = dict(
    base_dim=16,
    z_dim=16,
    dim_mult=[1, 2, 4, 4],
    num_res_blocks=1,
    attn_scales=[],
    temperal_downsample=[False, False, False],
)


def flatten(model: AutoencoderKLQwenImage) -> dict[str, torch.Tensor]:
    """Leaf tensors for training: 3-D kernels reduced to their last time slice, norms to one axis."""
    flat = {}
    for name, value in model.named_parameters():
        value = value.detach()
        if value.ndim == 5:
            value = value[:, :, -1]
        if name.endswith("gamma"):
            value = value.flatten()
        flat[name] = value.clone().requires_grad_()
    return flat


def unflatten(model: AutoencoderKLQwenImage, flat: dict[str, torch.Tensor]) -> None:
    """Write the trained tensors back; the earlier time slices stay zero."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 5:
                value.zero_()
                value[:, :, -1] = flat[name]
            else:
                value.copy_(flat[name].reshape(value.shape))


def norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """The class's RMS norm over channels of ``[batch, channel, y, x]``."""
    x32 = x.float()
    size = x32.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    return (x32 * (gamma.shape[0] ** 0.5 / size) * gamma[:, None, None]).to(x.dtype)


def norm_silu(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    y = norm(x, gamma).float()
    return (y * torch.sigmoid(y)).to(x.dtype)


ACTIVATE = {"fn": norm_silu}


def conv(p: dict, name: str, x: torch.Tensor, **kwargs) -> torch.Tensor:
    weight = p[name + ".weight"]
    return F.conv2d(x, weight, p[name + ".bias"], **({"padding": weight.shape[-1] // 2} | kwargs))


def residual(p: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    shortcut = conv(p, name + ".conv_shortcut", x) if name + ".conv_shortcut.weight" in p else x
    x = conv(p, name + ".conv1", ACTIVATE["fn"](x, p[name + ".norm1.gamma"]))
    return conv(p, name + ".conv2", ACTIVATE["fn"](x, p[name + ".norm2.gamma"])) + shortcut


def middle(p: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    x = residual(p, name + ".resnets.0", x)
    b, c, h, w = x.shape
    qkv = conv(p, name + ".attentions.0.to_qkv", norm(x, p[name + ".attentions.0.norm.gamma"]))
    q, k, v = qkv.reshape(b, 3, c, h * w).unbind(1)
    weights = torch.softmax((q.transpose(1, 2) @ k).float() * c**-0.5, -1).to(v.dtype)
    mixed = (v @ weights.transpose(1, 2)).reshape(b, c, h, w)
    x = x + conv(p, name + ".attentions.0.proj", mixed)
    return residual(p, name + ".resnets.1", x)


def head(p: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    return conv(p, name + ".conv_out", ACTIVATE["fn"](x, p[name + ".norm_out.gamma"]))


def encode(p: dict, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[b, 3, y, x]`` in -1..1 to mean and log variance, each ``[b, 16, y/8, x/8]``."""
    x = conv(p, "encoder.conv_in", x)
    for i in range(2 * len(CONFIG["dim_mult"]) - 1):
        block = f"encoder.down_blocks.{i}"
        if block + ".resample.1.weight" in p:
            x = conv(p, block + ".resample.1", F.pad(x, (0, 1, 0, 1)), stride=2, padding=0)
        else:
            x = residual(p, block, x)
    x = head(p, "encoder", middle(p, "encoder.mid_block", x))
    return conv(p, "quant_conv", x).float().chunk(2, 1)


def decode(p: dict, z: torch.Tensor) -> torch.Tensor:
    """Latents ``[b, 16, y, x]`` to pictures ``[b, 3, 8y, 8x]``, not clamped."""
    x = conv(p, "decoder.conv_in", conv(p, "post_quant_conv", z))
    x = middle(p, "decoder.mid_block", x)
    for i in range(len(CONFIG["dim_mult"])):
        for j in range(CONFIG["num_res_blocks"] + 1):
            x = residual(p, f"decoder.up_blocks.{i}.resnets.{j}", x)
        up = f"decoder.up_blocks.{i}.upsamplers.0.resample.1"
        if up + ".weight" in p:
            x = conv(p, up, F.interpolate(x, scale_factor=2.0, mode="nearest-exact"))
    return head(p, "decoder", x)


def start(model: AutoencoderKLQwenImage, generator: torch.Generator) -> None:
    """Unit gain in the last time slice, zeros elsewhere; a small first variance. The class's own init barely learns."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("gamma"):
                value.fill_(1)
            elif value.ndim == 1:
                value.zero_()
            else:
                last = value[:, :, -1] if value.ndim == 5 else value
                fan_in = last[0].numel()
                fresh = torch.randn(last.shape, generator=generator) * fan_in**-0.5
                value.zero_()
                (value[:, :, -1] if value.ndim == 5 else value).copy_(fresh)
        model.quant_conv.bias[CONFIG["z_dim"] :] = -6
