"""Z-Image (Turbo, Base): text-to-image and image-to-image, as diffusers' ZImagePipeline and ZImageImg2ImgPipeline
compute them.

Shapes: B pictures, C latent channels, h x w latent cells (8 pixels a side), L text tokens, D text width. Guidance
counts from 1 here as everywhere: a scale of 1 is diffusers' 0 (none), 5 its 4.

Read: keys, text_encoder.
"""

from __future__ import annotations

from backend.catalog.family import (
    CachedBlocks,
    Defaults,
    DrawSettings,
    LoraTargets,
    Part,
    SizeRule,
    TextSign,
    Tokenizer,
    TrainingSchedule,
)
from backend.catalog.lora.module_names import DECODER
from backend.families._shared import autoencoder_kl
from backend.families._shared.autoencoder_kl import decode, encode_image
from backend.families._shared.flow_schedule import flow_sigmas
from backend.families._shared.packing import latent_shape
from backend.families.z_image import text_encoder
from backend.families.z_image.keys import LORA_SIGNS, NAME_MAPS, SIGNATURES, config_from_shapes
from backend.families.z_image.text_encoder import count_tokens, encode_text, load_tokenizer, most_tokens, truncated

__all__ = [
    "LORA_SIGNS",
    "NAME_MAPS",
    "SIGNATURES",
    "config_from_shapes",
    "count_tokens",
    "decode",
    "encode_image",
    "encode_text",
    "latent_shape",
    "load_tokenizer",
    "most_tokens",
    "truncated",
]

NAME = "z_image"
TITLE = "Z-Image"
WORDS = ("z-image", "zimage", "z_image")
PIPELINE = "ZImagePipeline"
DRAWS = True
COUNTS_TOKENS = True

PARTS = {
    "dit": Part(
        network="diffusers.models.transformers.transformer_z_image:ZImageTransformer2DModel",
        folder="transformer",
        phase="denoise",
        blocks=("noise_refiner", "context_refiner", "layers"),
        prefixes=("model.diffusion_model.", "diffusion_model.", "transformer.", "model."),
        keep_precise=("norm", "embedder", "final_layer", "adaLN"),
    ),
    "text_encoder": text_encoder.PART,
    "vae": autoencoder_kl.autoencoder(),
}
TOKENIZERS = {"tokenizer": Tokenizer("tokenizer", usual=("Tongyi-MAI/Z-Image-Turbo", "tokenizer/"))}

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
LORA = LoraTargets(part="dit", presets={"attention": _ATTENTION}, default="attention")
LORA_TEXT_SIGNS = (TextSign(DECODER, (2560, 9728)),)
DEFAULTS = Defaults(request={"width": 1024, "height": 1024, "num_inference_steps": 9, "guidance": 1.0})
SCHEDULER = {"num_train_timesteps": 1000, "shift": 3.0, "use_dynamic_shifting": False}
SIZES = SizeRule(multiple=16, pixels=1024 * 1024)
TRAINING_SCHEDULE = TrainingSchedule(shift=3.0)  # at every size, as DiffSynth-Studio trains it
COMPUTE_DTYPES = ("bfloat16", "float32")
FLOAT32_LATENTS = True
CACHED_BLOCKS = (CachedBlocks("layers", (0,)),)


def collate(encodings, settings: DrawSettings, *, branch=None, device=None, dtype=None) -> dict:
    """Encodings of `encode_text` as the network takes them: {"embeds": list of (L, D)}, none of them padded."""
    return {"embeds": [encoding["embeds"].to(device=device, dtype=dtype) for encoding in encodings]}


def predict(parts: dict, x, sigma, cond: dict, *, part: str = "dit", sigma_next=None):
    """The velocity (noise - picture), float32, at `x` (B, C, h, w) and `sigma` (B,) in [0, 1], given `collate`'s
    `cond`. Differentiable.

    The network counts time from the noise (1 - sigma) and gives the velocity towards the picture."""
    import torch

    pictures = list(x.to(cond["embeds"][0].dtype).unsqueeze(2).unbind(0))
    found = parts[part](pictures, (1000 - sigma * 1000) / 1000, cond["embeds"], return_dict=False)[0]
    return -torch.stack([one.float() for one in found]).squeeze(2)


def sigmas(settings: DrawSettings, num_steps: int):
    """Noise levels (num_steps + 1,) float32 from 1 down to 0, as diffusers' scheduler with this configuration sets
    them."""
    import torch

    levels = torch.linspace(1.0, 1 / num_steps, num_steps).tolist()
    tokens = SIZES.tokens(settings.width, settings.height)
    return flow_sigmas(settings.scheduler or SCHEDULER, levels, tokens=tokens)


def example_inputs(module, point, dtype):
    """A point's tensors without numbers."""
    import torch

    batch, said = point["b"], module.config
    embeds = [torch.empty(point["t"], said.cap_feat_dim, dtype=dtype) for _ in range(batch)]
    return torch.empty(batch, said.in_channels, point["h"], point["w"]), torch.empty(batch), {"embeds": embeds}
