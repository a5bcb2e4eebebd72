"""Train the starter's autoencoder from random weights, on its 2-D kernels."""

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

from recipes.starter import compose_images, vae_2d
from recipes.starter.vae_2d import CONFIG, decode, encode, flatten, norm_silu, start, unflatten

CROP = 64


# Pictures


def scene(sprites: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random training picture ``[128, 128, 3]`` uint8: sprites, shapes, pixel art and soft gradients."""
    names = list(compose_images.COLOURS)
    kind = rng.random()
    colour = np.asarray(
        compose_images.COLOURS[names[rng.integers(len(names))]] if kind < 0.6 else rng.integers(0, 256, 3)
    )
    picture = compose_images.ground((255, 255, 255) if kind < 0.3 else colour)
    if kind > 0.85:
        other = rng.integers(0, 256, 3)
        ramp = np.linspace(0, 1, compose_images.SIDE, dtype=np.float32)
        ramp = ramp[:, None, None] if rng.random() < 0.5 else ramp[None, :, None]
        picture = picture * (1 - ramp) + other * ramp
    for _ in range(1 if rng.random() < 0.75 else 3):
        if rng.random() < 0.1:
            tint = compose_images.COLOURS[names[rng.integers(len(names))]]
            sprite = compose_images.shape_sprite(compose_images.SHAPES[rng.integers(len(compose_images.SHAPES))], tint)
        else:
            sprite = sprites[rng.integers(len(sprites)), rng.integers(2)]
            if rng.random() < 0.06:
                block = int(rng.choice([4, 8]))
                sprite = sprite[block // 2 :: block, block // 2 :: block].repeat(block, 0).repeat(block, 1)
        side = compose_images.SIDE if rng.random() < 0.5 else int(rng.integers(44, 140))
        centre = (64, 64) if side >= compose_images.SIDE else tuple(rng.uniform(36, 92, 2))
        compose_images.place(picture, sprite, centre=centre, side=side)
    return compose_images.pixels(picture)


def crop(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    x, y = rng.integers(0, compose_images.SIDE - CROP + 1, 2)
    part = picture[y : y + CROP, x : x + CROP]
    return part[:, ::-1] if rng.random() < 0.5 else part


def batch(sprites: np.ndarray, rng: np.random.Generator, size: int) -> torch.Tensor:
    """``[size, 3, 64, 64]`` in -1..1; two crops come from each picture."""
    parts = []
    while len(parts) < size:
        picture = scene(sprites, rng)
        parts += [crop(picture, rng), crop(picture, rng)]
    return as_tensor(np.stack(parts[:size]))


def as_tensor(pictures: np.ndarray) -> torch.Tensor:
    """``[n, y, x, 3]`` uint8 to ``[n, 3, y, x]`` in -1..1, channels last in memory."""
    moved = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    return moved.float().div(127.5).sub(1).contiguous(memory_format=torch.channels_last)


# Loss


def edges(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean distance of the horizontal and vertical differences of two pictures."""
    d = a - b
    return (d[..., 1:] - d[..., :-1]).abs().mean() + (d[..., 1:, :] - d[..., :-1, :]).abs().mean()


def distance(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out, x = out.float().contiguous(), x.contiguous()
    small_out, small = F.avg_pool2d(out, 2), F.avg_pool2d(x, 2)
    return (
        F.l1_loss(out, x)
        + 0.5 * edges(out, x)
        + 0.25 * edges(small_out, small)
        + F.mse_loss(out, x)
        + F.l1_loss(F.avg_pool2d(out, 8), F.avg_pool2d(x, 8))
    )


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
        g.copy_(buffer[at : at + g.numel()].view_as(g))
        at += g.numel()
    return buffer[-1].item()


def save(model: AutoencoderKLQwenImage, flat: dict, folder: Path) -> None:
    unflatten(model, flat)
    model.to(torch.bfloat16).save_pretrained(folder)
    model.to(torch.float32)


def network(options: argparse.Namespace) -> tuple[AutoencoderKLQwenImage, dict[str, torch.Tensor], list[torch.Tensor]]:
    """The class, its tensors for training with channels last, and those of them that learn."""
    if options.resume:
        model = AutoencoderKLQwenImage.from_pretrained(options.resume, torch_dtype=torch.float32)
    else:
        model = AutoencoderKLQwenImage(**CONFIG)
        start(model, torch.Generator().manual_seed(0))
    flat = {
        name: value.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        if value.ndim == 4
        else value
        for name, value in flatten(model).items()
    }
    learnt = [value for name, value in flat.items() if not options.decoder_only or name.startswith(("decoder", "post"))]
    return model, flat, learnt


def rate_at(share: float, step: int, full: float) -> float:
    """Learning rate after ``share`` of the time: fifty steps of rise, then a cosine down to a fiftieth."""
    return full * min(1, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(share, 1))))


def join(rank: int, ranks: int, options: argparse.Namespace) -> None:
    """One thread, its own noise, and the group of processes."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    if ranks > 1:
        meeting = f"file://{options.out.absolute()}.rendezvous"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    if options.compile:
        torch._dynamo.config.cache_size_limit = 64
        vae_2d.ACTIVATE["fn"] = torch.compile(norm_silu, dynamic=False)


def train(rank: int, ranks: int, options: argparse.Namespace) -> None:
    """One process's part of the training; the first one prints, measures and saves."""
    join(rank, ranks, options)
    sprites, rng = np.load(options.sprites, mmap_mode="r"), np.random.default_rng(100 + rank)
    exam = as_tensor(np.stack([scene(sprites, np.random.default_rng(i)) for i in range(64)]))
    model, flat, learnt = network(options)
    optimiser = torch.optim.AdamW(learnt, lr=options.lr, betas=(0.9, 0.99), weight_decay=1e-4, fused=True)
    began, seconds, step, seen = time.monotonic(), 0.0, 0, 0.0
    while seconds < options.minutes * 60:
        optimiser.param_groups[0]["lr"] = rate_at(seconds / (options.minutes * 60), step, options.lr)
        halved = rng.random() < (0.05 if options.decoder_only else 0.2)
        loss = objective(flat, batch(sprites, rng, options.batch), halved=halved, decoder_only=options.decoder_only)
        optimiser.zero_grad()
        loss.backward()
        seconds = reduce(learnt, time.monotonic() - began, ranks)
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimiser.step()
        step += 1
        seen = 0.98 * seen + 0.02 * loss.item()
        if step % 200 == 0 and rank == 0:
            note = {"step": step, "seconds": round(seconds), "loss": round(seen / (1 - 0.98**step), 4)}
            if step % 800 == 0:
                note["psnr"] = round(psnr(flat, exam), 2)
                save(model, flat, options.out)
            print(json.dumps(note), flush=True)
    if rank == 0:
        print(json.dumps({"step": step, "seconds": round(seconds), "psnr": round(psnr(flat, exam), 2)}), flush=True)
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
    options.out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{options.out.absolute()}.rendezvous").unlink(missing_ok=True)
    if options.processes == 1:
        train(0, 1, options)
    else:
        torch.multiprocessing.spawn(train, (options.processes, options), nprocs=options.processes)


if __name__ == "__main__":
    main()
