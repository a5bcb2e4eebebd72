"""Train the starter's autoencoder from random weights.

A still picture meets only the last time slice of each 3-D kernel (the slices before it see zero padding), so the
training runs the same network on 2-D kernels: several times faster, equal to the stock class within rounding.
"""

import argparse
import contextlib
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage

from backend.training.starter import canvas

CONFIG = dict(base_dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, attn_scales=[],
              temperal_downsample=[False, False, False])
CROP = 64


# The network on 2-D kernels. ``p`` maps the class's own parameter names to tensors, the 3-D ones cut to their last slice.

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
    weights = torch.softmax((q.transpose(1, 2) @ k).float() * c ** -0.5, -1).to(v.dtype)
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
                fresh = torch.randn(last.shape, generator=generator) * fan_in ** -0.5
                value.zero_()
                (value[:, :, -1] if value.ndim == 5 else value).copy_(fresh)
        model.quant_conv.bias[CONFIG["z_dim"]:] = -6


# Pictures

def scene(sprites: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random training picture ``[128, 128, 3]`` uint8: sprites, shapes, pixel art and soft gradients."""
    names = list(canvas.COLOURS)
    kind = rng.random()
    colour = np.asarray(canvas.COLOURS[names[rng.integers(len(names))]] if kind < 0.6 else rng.integers(0, 256, 3))
    picture = canvas.ground((255, 255, 255) if kind < 0.3 else colour)
    if kind > 0.85:
        other = rng.integers(0, 256, 3)
        ramp = np.linspace(0, 1, canvas.SIDE, dtype=np.float32)
        ramp = ramp[:, None, None] if rng.random() < 0.5 else ramp[None, :, None]
        picture = picture * (1 - ramp) + other * ramp
    for _ in range(1 if rng.random() < 0.75 else 3):
        if rng.random() < 0.1:
            tint = canvas.COLOURS[names[rng.integers(len(names))]]
            sprite = canvas.shape_sprite(canvas.SHAPES[rng.integers(len(canvas.SHAPES))], tint)
        else:
            sprite = sprites[rng.integers(len(sprites)), rng.integers(2)]
            if rng.random() < 0.06:
                block = int(rng.choice([4, 8]))
                sprite = sprite[block // 2::block, block // 2::block].repeat(block, 0).repeat(block, 1)
        side = canvas.SIDE if rng.random() < 0.5 else int(rng.integers(44, 140))
        centre = (64, 64) if side >= canvas.SIDE else tuple(rng.uniform(36, 92, 2))
        canvas.place(picture, sprite, centre=centre, side=side)
    return canvas.pixels(picture)


def crop(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    x, y = rng.integers(0, canvas.SIDE - CROP + 1, 2)
    part = picture[y:y + CROP, x:x + CROP]
    return part[:, ::-1] if rng.random() < 0.5 else part


def batch(sprites: np.ndarray, rng: np.random.Generator, size: int) -> torch.Tensor:
    """``[size, 3, 64, 64]`` in -1..1; two crops come from each picture."""
    parts = []
    while len(parts) < size:
        picture = scene(sprites, rng)
        parts += [crop(picture, rng), crop(picture, rng)]
    stacked = torch.from_numpy(np.stack(parts[:size])).permute(0, 3, 1, 2)
    return stacked.float().div(127.5).sub(1).contiguous(memory_format=torch.channels_last)


# Loss

def edges(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean distance of the horizontal and vertical differences of two pictures."""
    d = a - b
    return (d[..., 1:] - d[..., :-1]).abs().mean() + (d[..., 1:, :] - d[..., :-1, :]).abs().mean()


def distance(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out, x = out.float().contiguous(), x.contiguous()
    small_out, small = F.avg_pool2d(out, 2), F.avg_pool2d(x, 2)
    return (F.l1_loss(out, x) + 0.5 * edges(out, x) + 0.25 * edges(small_out, small) + F.mse_loss(out, x)
            + F.l1_loss(F.avg_pool2d(out, 8), F.avg_pool2d(x, 8)))


def objective(p: dict, x: torch.Tensor, *, halved: bool, decoder_only: bool = False) -> torch.Tensor:
    """Distance plus a little KL; ``halved`` also asks that a half-size latent decodes to the half-size picture."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad() if decoder_only else contextlib.nullcontext():
            mean, log_variance = encode(p, x)
        log_variance = log_variance.clamp(-20, 10)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        if halved:
            z, x = F.avg_pool2d(z, 2), F.avg_pool2d(x, 2)
        out = decode(p, z)
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return distance(out, x) + 2e-4 * kl


# The loop

def psnr(p: dict, pictures: torch.Tensor) -> float:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = torch.cat([decode(p, encode(p, part)[0]) for part in pictures.split(8)]).float().clamp(-1, 1)
    return 10 * math.log10(4 / F.mse_loss(out, pictures).item())


def reduce(learnt: list[torch.Tensor], seconds: float, ranks: int) -> float:
    """Average the gradients over the ranks, and the clock with them so that all end at the same step."""
    if ranks == 1:
        return seconds
    grads = [p.grad for p in learnt]
    buffer = torch.cat([g.flatten() for g in grads] + [torch.tensor([seconds])])
    dist.all_reduce(buffer)
    buffer /= ranks
    at = 0
    for g in grads:
        g.copy_(buffer[at:at + g.numel()].view_as(g))
        at += g.numel()
    return buffer[-1].item()


def save(model: AutoencoderKLQwenImage, flat: dict, folder: Path) -> None:
    unflatten(model, flat)
    model.to(torch.bfloat16).save_pretrained(folder)
    model.to(torch.float32)


def train(rank: int, ranks: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{options.out.absolute()}.rendezvous", rank=rank,
                                world_size=ranks)
    if options.compile:
        compiled = torch.compile(norm_silu, dynamic=False)
        torch._dynamo.config.cache_size_limit = 64
        ACTIVATE["fn"] = compiled
    sprites = np.load(options.sprites, mmap_mode="r")
    rng = np.random.default_rng(100 + rank)
    exam = torch.from_numpy(np.stack([scene(sprites, np.random.default_rng(i)) for i in range(64)]))
    exam = exam.permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous(memory_format=torch.channels_last)
    model = AutoencoderKLQwenImage(**CONFIG)
    if options.resume:
        model = AutoencoderKLQwenImage.from_pretrained(options.resume, torch_dtype=torch.float32)
    else:
        start(model, torch.Generator().manual_seed(0))
    flat = flatten(model)
    kernels = {k: v.detach().contiguous(memory_format=torch.channels_last).requires_grad_() if v.ndim == 4 else v
               for k, v in flat.items()}
    flat = kernels
    learnt = [v for k, v in flat.items() if not options.decoder_only or k.startswith(("decoder", "post"))]
    optimiser = torch.optim.AdamW(learnt, lr=options.lr, betas=(0.9, 0.99), weight_decay=1e-4, fused=True)
    began, seconds, step, seen = time.monotonic(), 0.0, 0, 0.0
    limit = options.minutes * 60
    while seconds < limit:
        rate = options.lr * min(1, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * seconds / limit)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        loss = objective(flat, batch(sprites, rng, options.batch), halved=rng.random() < (0.05 if options.decoder_only else 0.2),
                         decoder_only=options.decoder_only)
        optimiser.zero_grad()
        loss.backward()
        seconds = reduce(learnt, time.monotonic() - began, ranks)
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimiser.step()
        step += 1
        seen = 0.98 * seen + 0.02 * loss.item()
        if step % 200 == 0 and rank == 0:
            note = {"step": step, "seconds": round(seconds), "loss": round(seen / (1 - 0.98 ** step), 4),
                    "crops_per_second": round(step * options.batch * ranks / seconds, 1)}
            if step % 800 == 0:
                note["psnr"] = round(psnr(flat, exam), 2)
                save(model, flat, options.out)
            print(json.dumps(note), flush=True)
    if rank == 0:
        print(json.dumps({"step": step, "psnr": round(psnr(flat, exam), 2)}), flush=True)
        save(model, flat, options.out)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sprites", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=22)
    parser.add_argument("--batch", type=int, default=8, help="crops a step in each process")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--resume", type=Path, help="start from this autoencoder instead of random weights")
    parser.add_argument("--decoder-only", action="store_true", help="keep the encoder, and so all latents, as they are")
    parser.add_argument("--compile", action="store_true", help="fuse norm and activation (needs a C++ compiler)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if options.processes == 1:
        train(0, 1, options)
    else:
        torch.multiprocessing.spawn(train, (options.processes, options), nprocs=options.processes)


if __name__ == "__main__":
    main()
