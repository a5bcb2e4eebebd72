"""FLUX.1 (dev, schnell, Krea): text-to-image and image-to-image, as diffusers' FluxPipeline and FluxImg2ImgPipeline
compute them. Kontext, Fill, Depth and Canny are recognised and take LoRAs, and do not draw yet.

Shapes: B pictures, C latent channels, h x w latent cells (8 pixels a side), S = h/2 * w/2 tokens, L = 512 text tokens,
D text width, P pooled width.

Read: keys, text_encoders.
"""

from __future__ import annotations

from backend.catalog.family import (
    CachedBlocks,
    Defaults,
    DrawSettings,
    Guidance,
    LoraTargets,
    SizeRule,
    TextSign,
    TokenCount,
    Tokenizer,
    TrainingSchedule,
)
from backend.catalog.lora.module_names import CLIP, FIRST, T5
from backend.families._shared import autoencoder_kl, clip, t5
from backend.families._shared.autoencoder_kl import decode, encode_image
from backend.families._shared.bfl_keys import denoiser
from backend.families._shared.flow_schedule import flow_sigmas
from backend.families._shared.packing import latent_shape, pack, unpack
from backend.families.flux.keys import LORA_SIGNS, NAME_MAPS, SIGNATURES, config_from_shapes
from backend.families.flux.text_encoders import MAX_TOKENS, encode_text, load_tokenizer, trace_encoder, truncated

__all__ = [
    "LORA_SIGNS",
    "NAME_MAPS",
    "SIGNATURES",
    "config_from_shapes",
    "decode",
    "encode_image",
    "encode_text",
    "latent_shape",
    "load_tokenizer",
    "trace_encoder",
    "truncated",
]

NAME = "flux"
TITLE = "FLUX.1"
WORDS = ("flux-1", "flux1", "flux.1", "lora_flux")
PIPELINE = "FluxImagePipeline"

DRAWS = True
NOT_DRAWN = ("fill", "control")  # variants that need more than a prompt

PARTS = {
    "dit": denoiser("diffusers.models.transformers.transformer_flux:FluxTransformer2DModel", "time_text_embed"),
    "text_encoder": clip.encoder("text_encoder"),
    "text_encoder_2": t5.encoder("text_encoder_2"),
    "vae": autoencoder_kl.autoencoder(),
}
TOKENIZERS = {
    "tokenizer": Tokenizer("tokenizer", usual=("black-forest-labs/FLUX.1-dev", "tokenizer/")),
    "tokenizer_2": Tokenizer("tokenizer_2", usual=("black-forest-labs/FLUX.1-dev", "tokenizer_2/")),
}
WHOLE_CONFIG = {"guidance_embeds": True}

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
LORA = LoraTargets(part="dit", presets={"attention": _ATTENTION}, default="attention")
LORA_TEXT_SIGNS = (TextSign(CLIP, (768, 3072), FIRST), TextSign(T5, (4096, 10240)))
LORA_TEXT_PREFIXES = {"text_encoder": "lora_te1", "text_encoder_2": "lora_te3"}  # as kohya's scripts number them

DEFAULTS = Defaults(request={"width": 1024, "height": 1024, "num_inference_steps": 28, "guidance": 3.5})
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
_SCHNELL = {"num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": False}
SIZES = SizeRule(multiple=16, pixels=1024 * 1024)
GUIDANCE = Guidance("embedded", training=1.0)  # the scale at which DiffSynth-Studio and kohya train
TRAINING_SCHEDULE = TrainingSchedule(shift=3.0, lowest=0.003 / 1.002)
COMPUTE_DTYPES = ("bfloat16", "float32")  # T5's activations leave float16's range
_STREAMS = ("encoder_hidden_states", "hidden_states")
CACHED_BLOCKS = (CachedBlocks("transformer_blocks", _STREAMS), CachedBlocks("single_transformer_blocks", _STREAMS))


def guidance(variant: str) -> Guidance:
    """schnell is distilled to draw without any."""
    return Guidance("none") if variant == "schnell" else GUIDANCE


def count_tokens(folders, prompts, *, variant: str, seen=()) -> list[TokenCount]:
    """Whatever a prompt says: T5 reads, and the network is given, as many tokens as there may be."""
    return [TokenCount(MAX_TOKENS, MAX_TOKENS)] * len(prompts)


def most_tokens(variant: str, *, pictures: bool = False) -> TokenCount:
    return TokenCount(MAX_TOKENS, MAX_TOKENS)


def collate(encodings, settings: DrawSettings, *, branch=None, device=None, dtype=None) -> dict:
    """Encodings of `encode_text` side by side: {"embeds": (B, L, D), "pooled": (B, P), "guidance": (B,) float32 or
    None}."""
    import torch

    scale = None
    if guidance(settings.variant).kind == "embedded":
        scale = torch.full((len(encodings),), settings.guidance, device=device, dtype=torch.float32)
    found = {
        name: torch.stack([encoding[name] for encoding in encodings]).to(device, dtype) for name in ("embeds", "pooled")
    }
    return {**found, "guidance": scale}


def predict(parts: dict, x, sigma, cond: dict, *, part: str = "dit", sigma_next=None):
    """The velocity (noise - picture) at `x` (B, C, h, w) and `sigma` (B,) in [0, 1], given `collate`'s `cond`.
    Differentiable."""
    import torch

    height, width = x.shape[-2] // 2, x.shape[-1] // 2
    timestep = (sigma * 1000).to(x.dtype) / 1000  # in this order, so that it rounds as in diffusers
    velocity = parts[part](
        hidden_states=pack(x),
        timestep=timestep,
        guidance=cond["guidance"],
        pooled_projections=cond["pooled"],
        encoder_hidden_states=cond["embeds"],
        txt_ids=torch.zeros(cond["embeds"].shape[1], 3, device=x.device),
        img_ids=positions(height, width, device=x.device),
        return_dict=False,
    )[0]
    return unpack(velocity, height, width)


def positions(height: int, width: int, *, device=None):
    """(S, 3) float32: 0, row and column of each token of a grid of `height` x `width`."""
    import torch

    rows, columns = torch.meshgrid(
        torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
    )
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float()


def sigmas(settings: DrawSettings, num_steps: int):
    """Noise levels (num_steps + 1,) float32 from 1 down to 0, as diffusers' scheduler with this configuration sets
    them."""
    import numpy

    usual = _SCHNELL if settings.variant == "schnell" else SCHEDULER
    levels = numpy.linspace(1.0, 1 / num_steps, num_steps)
    return flow_sigmas(settings.scheduler or usual, levels, tokens=SIZES.tokens(settings.width, settings.height))


def example_inputs(module, point, dtype):
    """A point's tensors without numbers."""
    import torch

    batch, said = point["b"], module.config
    cond = {
        "embeds": torch.empty(batch, point["t"], said.joint_attention_dim, dtype=dtype),
        "pooled": torch.empty(batch, said.pooled_projection_dim, dtype=dtype),
        "guidance": torch.empty(batch) if said.guidance_embeds else None,
    }
    return torch.empty(batch, said.in_channels // 4, point["h"], point["w"], dtype=dtype), torch.empty(batch), cond
