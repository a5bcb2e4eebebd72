"""Look at a starter: unpicked grids with one seed, and how much the right caption helps against a wrong one."""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from recipes.starter.captions import COMMON, read_concepts, thing
from recipes.starter.compose_images import COLOURS

PAIRS = (
    "a cat left of a dog",
    "a dog left of a cat",
    "a car right of a house",
    "an apple above a banana",
    "a penguin and a guitar",
    "a fox to the right of a tree",
    "a robot left of a rocket",
    "a frog above a mushroom",
    "a star below a crown",
    "an owl and a key",
    "a donut left of coffee",
    "a panda above a balloon",
    "a red circle left of a blue square",
    "a yellow star right of a green triangle",
    "a purple heart above a pink ring",
    "a black square and a red diamond",
)
GROUNDS = tuple(
    f"{what} on a{'n' if ground[0] == 'o' else ''} {ground} background"
    for what, ground in zip(
        (
            "a cat",
            "an apple",
            "a rocket",
            "a lion",
            "a guitar",
            "a rose",
            "a duck",
            "a house",
            "a ghost",
            "a cupcake",
            "a bus",
            "a crab",
        ),
        COLOURS,
        strict=True,
    )
)
TINTED = (
    "a blue car",
    "a green car",
    "a yellow balloon",
    "a purple umbrella",
    "a pink backpack",
    "an orange fish",
    "a blue teapot",
    "a red dress",
)
STYLES = (
    "a flat icon of a fox",
    "a fox, 3d style",
    "a flat icon of a pizza",
    "a small apple",
    "a small cat",
    "a house, flat style",
    "a green circle",
    "a blue star on a yellow background",
)


def load(folder: Path):
    """The stock pipeline on the folder, in bfloat16."""
    from diffusers import QwenImagePipeline

    pipe = QwenImagePipeline.from_pretrained(folder, torch_dtype=torch.bfloat16, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(
    pipe, prompts: list[str], *, seed: int, steps: int = 12, guidance: float = 3.0, together: int = 8
) -> list[Image.Image]:
    """One picture of 128x128 for each prompt, every one from the same noise of ``seed``."""
    pictures = []
    for start in range(0, len(prompts), together):
        part = list(prompts[start : start + together])
        noise = [torch.Generator().manual_seed(seed) for _ in part]
        pictures += pipe(
            part,
            negative_prompt=[" "] * len(part),
            true_cfg_scale=guidance,
            num_inference_steps=steps,
            width=128,
            height=128,
            generator=noise,
        ).images
    return pictures


def sheet(pictures: list[Image.Image], columns: int, labels: list[str] | None = None) -> Image.Image:
    rows, room = math.ceil(len(pictures) / columns), 14
    out = Image.new("RGB", (columns * 132, rows * (130 + room)), "white")
    pen = ImageDraw.Draw(out)
    for i, picture in enumerate(pictures):
        x, y = i % columns * 132, i // columns * (130 + room)
        out.paste(picture, (x, y))
        pen.text((x + 2, y + 128), f"{i + 1}" if labels is None else labels[i][:24], fill="black")
    return out


def exam_names(count: int, seed: int) -> list[str]:
    """``count`` of the starter's concepts, drawn by ``seed`` alone."""
    names = [concept.name for concept in read_concepts()]
    return [names[i] for i in np.random.default_rng(seed).permutation(len(names))[:count]]


def exam(pipe, out: Path, *, count: int, seed: int) -> None:
    """A numbered grid without names, and the names in a file beside it, to be opened after the pictures were named."""
    names = exam_names(count, seed)
    sheet(draw(pipe, [thing(name) for name in names], seed=seed), 8).save(out / f"exam-{seed}.png")
    answers = [f"{i + 1} {name}" for i, name in enumerate(names)]
    (out / f"exam-{seed}.answers.txt").write_text("\n".join(answers) + "\n", "utf-8")


def gallery(pipe, out: Path, *, seed: int) -> None:
    for name, prompts, columns in (
        ("pairs", PAIRS, 8),
        ("grounds", GROUNDS, 6),
        ("tinted", TINTED, 8),
        ("styles", STYLES, 8),
    ):
        sheet(draw(pipe, list(prompts), seed=seed), columns, list(prompts)).save(out / f"{name}.png")


@torch.no_grad()
def right_against_wrong(
    pipe, dataset: Path, *, count: int = 64, levels=(0.99, 0.9, 0.8)
) -> dict[float, tuple[float, float]]:
    """Mean squared error of the predicted clean latents with the picture's caption and with another picture's."""
    lines = [json.loads(line) for line in (dataset / "metadata.jsonl").read_text("utf-8").splitlines()]
    chosen = [lines[i] for i in np.random.default_rng(1).permutation(len(lines))[:count]]
    pictures = np.stack([np.asarray(Image.open(dataset / line["image"]).convert("RGB")) for line in chosen])
    x = torch.from_numpy(pictures).permute(0, 3, 1, 2)[:, :, None].to(torch.bfloat16) / 127.5 - 1
    shape = (1, pipe.vae.config.z_dim, 1, 1, 1)
    mean, std = (torch.tensor(v).view(shape) for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std))
    clean = ((torch.cat([pipe.vae.encode(part).latent_dist.mode() for part in x.split(8)]).float() - mean) / std)[
        :, :, 0
    ]
    captions = [line["prompt"][0] for line in chosen]
    found = {}
    for level in levels:
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
        noisy = (1 - level) * clean + level * noise
        found[level] = tuple(
            error(pipe, noisy, clean, level, texts) for texts in (captions, captions[1:] + captions[:1])
        )
    return found


def error(pipe, noisy: torch.Tensor, clean: torch.Tensor, level: float, texts: list[str]) -> float:
    tokens = pipe._pack_latents(noisy, *noisy.shape)
    embeds, mask = pipe.encode_prompt(texts)
    velocity = pipe.transformer(
        hidden_states=tokens.to(torch.bfloat16),
        timestep=torch.full((len(texts),), level),
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, noisy.shape[2] // 2, noisy.shape[3] // 2)]] * len(texts),
        return_dict=False,
    )[0].float()
    guess = tokens - level * velocity
    return (guess - pipe._pack_latents(clean, *clean.shape)).square().mean().item()


def seconds_a_picture(pipe) -> float:
    draw(pipe, ["a cat"], seed=0)
    began = time.monotonic()
    for seed in range(3):
        draw(pipe, ["a cat"], seed=seed)
    return (time.monotonic() - began) / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dataset", type=Path, help="training set, for the error with right and wrong captions")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--common", action="store_true", help="also a grid of the commonest things, with names")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pipe = load(options.model)
    if options.dataset:
        for level, (right, wrong) in right_against_wrong(pipe, options.dataset).items():
            print(f"sigma {level}: right {right:.3f} wrong {wrong:.3f}", flush=True)
    if options.count:
        exam(pipe, options.out, count=options.count, seed=options.seed)
        gallery(pipe, options.out, seed=options.seed)
    if options.common:
        names = [thing(name) for name in COMMON]
        sheet(draw(pipe, names, seed=options.seed), 16, names).save(options.out / "common.png")
    print(f"{seconds_a_picture(pipe):.2f} s a picture at 128x128, 12 steps", flush=True)


if __name__ == "__main__":
    main()
