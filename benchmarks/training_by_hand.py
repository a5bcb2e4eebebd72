"""A LoRA on the starter as one writes it with diffusers and peft: `python benchmarks/training_by_hand.py FOLDER STEPS BATCH`.

Everything is encoded before the first step, the encoders are let go, and the loop does what it must. The peer of `benchmarks/training.py peak`.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from peft import LoraConfig
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

STARTER = Path(__file__).resolve().parents[1] / "assets" / "starter"
TARGETS = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out"]


@torch.no_grad()
def encoded(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Packed latents (1, tokens, channels) and text (1, tokens, width) of every picture."""
    vae = AutoencoderKLQwenImage.from_pretrained(STARTER / "vae")
    text = Qwen2_5_VLForConditionalGeneration.from_pretrained(STARTER / "text_encoder", dtype=torch.bfloat16)
    pipe = QwenImagePipeline(scheduler=None, vae=vae, text_encoder=text, transformer=None,
                             tokenizer=AutoTokenizer.from_pretrained(STARTER / "tokenizer"))  # fmt: skip
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    scale = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    pairs = []
    for path in sorted(folder.glob("*.png")):
        picture = Image.open(path).convert("RGB").resize((128, 128), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(numpy.array(picture, dtype=numpy.float32)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
        latents = (vae.encode(pixels).latent_dist.mean - mean) / scale
        side = latents.shape[-1]
        packed = pipe._pack_latents(latents, 1, latents.shape[1], side, side)
        pairs.append((packed, pipe.encode_prompt(path.with_suffix(".txt").read_text())[0]))
    return pairs


def main(folder: Path, steps: int, batch: int) -> None:
    torch.set_num_threads(1)
    pairs = encoded(folder)
    gc.collect()
    dit = QwenImageTransformer2DModel.from_pretrained(STARTER / "transformer", torch_dtype=torch.bfloat16)
    dit.requires_grad_(False)
    dit.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS))
    weights = [weight for weight in dit.parameters() if weight.requires_grad]
    for weight in weights:
        weight.data = weight.data.float()
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
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
                hidden_states=torch.lerp(latents, noise, sigma.view(-1, 1, 1)).bfloat16(), timestep=sigma,
                encoder_hidden_states=text.bfloat16(), encoder_hidden_states_mask=mask,
                img_shapes=[[(1, side, side)]] * batch, return_dict=False,
            )[0]  # fmt: skip
        loss = (found.float() - (noise - latents)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(step, float(loss))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
