"""A LoRA as one writes it with diffusers and peft: `python benchmarks/training_by_hand.py FOLDER STEPS BATCH [MODEL
plain|checkpointed]`.

Everything is encoded before the first step, the encoders are let go, and the loop does what it must. The peer of
`benchmarks/training.py peak`, on the starter at 128 x 128, and of its `peers`, on MODEL with that one's adapter and
size.
"""

from __future__ import annotations

import csv
import gc
import json
import sys
from pathlib import Path

import numpy
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from peft import LoraConfig
from PIL import Image
from training_peers import RANK, SIDE, TARGETS, Ends
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

STARTER = Path(__file__).resolve().parents[1] / "assets" / "starter"
ATTENTION = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out"]


@torch.no_grad()
def encoded(folder: Path, model: Path, side: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Packed latents (1, tokens, channels) and text (1, tokens, width) of every picture."""
    vae = AutoencoderKLQwenImage.from_pretrained(model / "vae")
    text = Qwen2_5_VLForConditionalGeneration.from_pretrained(model / "text_encoder", dtype=torch.bfloat16)
    pipe = QwenImagePipeline(
        scheduler=None,
        vae=vae,
        text_encoder=text,
        transformer=None,
        tokenizer=AutoTokenizer.from_pretrained(model / "tokenizer"),
    )
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    scale = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    pairs, captions = [], captions_of(folder)
    for path in sorted(folder.glob("*.png")):
        picture = Image.open(path).convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(numpy.array(picture, dtype=numpy.float32)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
        latents = (vae.encode(pixels).latent_dist.mean - mean) / scale
        cells = latents.shape[-1]
        packed = pipe._pack_latents(latents, 1, latents.shape[1], cells, cells)
        pairs.append((packed, pipe.encode_prompt(captions[path.name])[0]))
    return pairs


def captions_of(folder: Path) -> dict[str, str]:
    """Of a table, or of a text file beside each picture."""
    if (folder / "metadata.csv").exists():
        with (folder / "metadata.csv").open(encoding="utf-8") as file:
            return {row["image"]: row["prompt"] for row in csv.DictReader(file)}
    return {path.name: path.with_suffix(".txt").read_text(encoding="utf-8") for path in folder.glob("*.png")}


def main(folder: Path, steps: int, batch: int, model: Path | None = None, word: str = "plain") -> None:
    torch.set_num_threads(1)
    pairs = encoded(folder, model or STARTER, SIDE if model else 128)
    gc.collect()
    dit = QwenImageTransformer2DModel.from_pretrained((model or STARTER) / "transformer", torch_dtype=torch.bfloat16)
    dit.requires_grad_(False)
    rank, targets = (RANK, list(TARGETS)) if model else (16, ATTENTION)
    dit.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets))
    if word == "checkpointed":
        dit.train()
        dit.enable_gradient_checkpointing()
    weights = [weight for weight in dit.parameters() if weight.requires_grad]
    for weight in weights:
        weight.data = weight.data.float()
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    ends = Ends()
    longest = max(text.shape[1] for _, text in pairs)
    for step in range(steps):
        some = [pairs[(step * batch + place) % len(pairs)] for place in range(batch)]
        latents = torch.cat([pair[0] for pair in some])
        text = torch.cat([torch.nn.functional.pad(pair[1], (0, 0, 0, longest - pair[1].shape[1])) for pair in some])
        mask = torch.tensor([[place < pair[1].shape[1] for place in range(longest)] for pair in some])
        noise, sigma = torch.randn_like(latents), torch.rand(batch)
        side = round(latents.shape[1] ** 0.5)
        with torch.autocast("cpu", torch.bfloat16):
            found = dit(
                hidden_states=torch.lerp(latents, noise, sigma.view(-1, 1, 1)).bfloat16(),
                timestep=sigma,
                encoder_hidden_states=text.bfloat16(),
                encoder_hidden_states_mask=mask,
                img_shapes=[[(1, side, side)]] * batch,
                return_dict=False,
            )[0]
        loss = (found.float() - (noise - latents)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(step, float(loss))
        ends()
    print(json.dumps({"steps": ends.steps}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *(Path(one) for one in sys.argv[4:5]), *sys.argv[5:])
