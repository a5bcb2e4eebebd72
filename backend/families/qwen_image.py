"""Qwen-Image: text-to-image and image-to-image, as diffusers' QwenImagePipeline and QwenImageImg2ImgPipeline compute them.

Shapes: B pictures, C latent channels, h x w latent cells (8 pixels a side), S = h/2 * w/2 tokens, L text tokens, D text width.
Only the language half of Qwen2.5-VL is loaded: its vision tower and `lm_head` have no part in making a picture from text.
"""

from __future__ import annotations

from backend.catalog.family import Defaults, LoraTargets, NameMap, Part, SizeRule
from backend.catalog.qwen_files import LORA_SIGNS, SIGNATURES, config_from_shapes, original_vae

__all__ = ["LORA_SIGNS", "SIGNATURES", "config_from_shapes"]

NAME = "qwen_image"
TITLE = "Qwen-Image"
WORDS = ("qwen-image", "qwen_image", "qwenimage")  # how metadata of LoRA files names it, in lower case

PARTS = {
    "dit": Part(
        network="diffusers.models.transformers.transformer_qwenimage:QwenImageTransformer2DModel",
        folder="transformer",
        phase="denoise",
        blocks=("transformer_blocks",),
        prefixes=("model.diffusion_model.", "diffusion_model.", "transformer.", "model."),
        keep_precise=("norm", "pos_embed", "img_in", "txt_in", "time_text_embed", "proj_out"),
    ),
    "text_encoder": Part(
        network="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLTextModel",
        folder="text_encoder",
        phase="text",
        blocks=("layers",),
        config_key="text_config",
        prefixes=("model.language_model.", "language_model.", "model."),
        unused=("visual.", "lm_head."),
        keep_precise=("norm", "embed_tokens", "rotary_emb"),
    ),
    "vae": Part(
        network="diffusers.models.autoencoders.autoencoder_kl_qwenimage:AutoencoderKLQwenImage",
        folder="vae",
        phase="decode",
        keep_precise=("norm",),
    ),
}

NAME_MAPS = (NameMap("wan", "vae", original_vae()),)  # the transformer has one naming everywhere

_ATTENTION = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
LORA = LoraTargets(
    part="dit",
    presets={
        "all": (*_ATTENTION, "img_mlp.net.2", "img_mod.1", "txt_mlp.net.2", "txt_mod.1"),
        "attention": _ATTENTION,
        "attention_and_mlp": (
            *_ATTENTION,
            "img_mlp.net.0.proj",
            "img_mlp.net.2",
            "txt_mlp.net.0.proj",
            "txt_mlp.net.2",
        ),
    },
    default="all",
)

DEFAULTS = Defaults(request={"width": 1328, "height": 1328, "num_inference_steps": 40, "guidance": 4.0})
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
BLOCK_STREAMS = ("transformer_blocks", ("encoder_hidden_states", "hidden_states"))  # what a block takes and gives; the picture's last
NOT_DRAWN = ("layered",)  # variants that need more than a prompt
SIZES = SizeRule(multiple=16, pixels=1328 * 1328)

TILES = (32, 24)  # latent cells a side of a tile, and from one to the next, as in diffusers
MAX_TOKENS = 512  # text tokens that condition a picture, as in diffusers' call
_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
_PREFIX_TOKENS = 34  # of the template before the prompt; their states are dropped


def load_tokenizer(folder):
    """The tokenizer in `folder`."""
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    return Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)


def prepare(name: str, module) -> None:
    """Makes a freshly built part quicker without changing what it computes or how its parameters are called."""
    if name == "vae":
        _use_flat_convolutions(module)


def encode_text(parts: dict, prompts: list[str], *, device=None) -> list[dict]:
    """One encoding per prompt: {"embeds": (L, D)} on `device`. Needs `text_encoder` and `tokenizer`. Differentiable."""
    import torch

    tokenizer, encoder = parts["tokenizer"], parts["text_encoder"]
    device = device or next(encoder.parameters()).device
    limit = MAX_TOKENS + _PREFIX_TOKENS
    rows = [tokenizer(_TEMPLATE.format(prompt), truncation=True, max_length=limit)["input_ids"] for prompt in prompts]
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    if len(rows) > 1 and torch.is_grad_enabled():
        states = _states_after_shared_start(encoder, ids, mask)
    else:
        states = encoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, _PREFIX_TOKENS:]
    return [{"embeds": states[i, : len(row) - _PREFIX_TOKENS]} for i, row in enumerate(rows)]


def _states_after_shared_start(encoder, ids, mask):
    """Last states after the template's start, which runs once for the whole batch: in training most tokens are these.

    Attention is causal, so the numbers are those of the plain call, and gradients reach the start through its keys and values.
    """
    import torch
    from transformers import DynamicCache

    places = torch.arange(ids.shape[1], device=ids.device)
    start, cache = places[:_PREFIX_TOKENS], DynamicCache()
    encoder(input_ids=ids[:1, :_PREFIX_TOKENS], position_ids=start[None], cache=cache, use_cache=True)
    cache.batch_repeat_interleave(ids.shape[0])
    return encoder(
        input_ids=ids[:, _PREFIX_TOKENS:],
        attention_mask=mask,
        position_ids=places[None, _PREFIX_TOKENS:].expand(ids.shape[0], -1),
        cache=cache,
        use_cache=True,
    ).last_hidden_state


def collate(encodings: list[dict], *, device=None, dtype=None) -> dict:
    """Encodings of `encode_text` side by side: {"embeds": (B, L, D), "mask": (B, L) bool, or None where none is padded}."""
    import torch

    embeds = [encoding["embeds"].to(device=device, dtype=dtype) for encoding in encodings]
    lengths = [len(rows) for rows in embeds]
    padded = torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)
    if min(lengths) == max(lengths):
        return {"embeds": padded, "mask": None}
    places = torch.arange(padded.shape[1], device=padded.device)
    return {"embeds": padded, "mask": places[None] < torch.tensor(lengths, device=padded.device)[:, None]}


def predict(parts: dict, x, sigma, cond: dict):
    """The velocity (noise - picture) at `x` (B, C, h, w) and `sigma` (B,) in [0, 1], given `collate`'s `cond`. Differentiable."""
    height, width = x.shape[-2] // 2, x.shape[-1] // 2
    timestep = (sigma * 1000).to(x.dtype) / 1000  # in this order, so that it rounds as in diffusers
    velocity = parts["dit"](
        hidden_states=pack(x),
        timestep=timestep,
        encoder_hidden_states=cond["embeds"],
        encoder_hidden_states_mask=cond["mask"],
        img_shapes=[[(1, height, width)]] * x.shape[0],
        return_dict=False,
    )[0]
    return unpack(velocity, height, width)


def guide(towards, away, scale: float):
    """True classifier-free guidance on velocities (B, C, h, w): each token keeps the length it has without guidance."""
    import torch

    height, width = towards.shape[-2] // 2, towards.shape[-1] // 2
    towards, away = pack(towards), pack(away)
    combined = away + scale * (towards - away)
    lengths = torch.norm(towards, dim=-1, keepdim=True), torch.norm(combined, dim=-1, keepdim=True)
    return unpack(combined * (lengths[0] / lengths[1]), height, width)


def pack(x):
    """Latents (B, C, h, w) as tokens of 2 x 2 cells (B, S, 4C)."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens, height: int, width: int):
    """The inverse of `pack` for a grid of `height` x `width` tokens."""
    batch, _, channels = tokens.shape
    x = tokens.reshape(batch, height, width, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(batch, channels // 4, height * 2, width * 2)


def latent_shape(width: int, height: int) -> tuple[int, int, int]:
    """(C, h, w) of a picture of `width` x `height` pixels."""
    return 16, 2 * (height // 16), 2 * (width // 16)


def sigmas(scheduler: dict, num_steps: int, *, width: int, height: int):
    """Noise levels (num_steps + 1,) float32 from 1 down to 0, as diffusers' scheduler with this configuration sets them."""
    import numpy
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    wanted = dict(scheduler or SCHEDULER)
    if num_steps == 1:
        wanted["shift_terminal"] = None  # stretching a single level divides nothing by nothing
    schedule = FlowMatchEulerDiscreteScheduler.from_config(wanted)
    said = schedule.config
    slope = (said.max_shift - said.base_shift) / (said.max_image_seq_len - said.base_image_seq_len)
    tokens = (height // 16) * (width // 16)
    mu = tokens * slope + said.base_shift - slope * said.base_image_seq_len
    schedule.set_timesteps(sigmas=numpy.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
    return schedule.sigmas


def encode_image(parts: dict, pixels, *, generator=None):
    """Pixels (B, 3, H, W) in [-1, 1] as normalised latents (B, C, h, w): the mean, or with a `generator` a sample. Differentiable."""
    import torch

    vae = parts["vae"]
    moments = _encode_moments(vae, pixels.unsqueeze(2))
    mean, log_variance = moments.chunk(2, dim=1)
    if generator is not None:
        noise = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=torch.float32)
        mean = mean + torch.exp(0.5 * log_variance.clamp(-30.0, 20.0)) * noise.to(mean.device, mean.dtype)
    shift, scale = _statistics(vae, mean)
    return ((mean - shift) * (1.0 / scale)).squeeze(2)


def decode(parts: dict, latents, *, tiled: bool | tuple[int, int] = False):
    """Pixels (B, 3, H, W) in [-1, 1] of normalised latents (B, C, h, w). `tiled`: in pieces, for less memory; of 32 cells, 24 apart, or
    of the two numbers given."""
    vae = parts["vae"]
    z = latents.unsqueeze(2)
    shift, scale = _statistics(vae, z)
    z = z / (1.0 / scale) + shift
    size, stride = tiled if isinstance(tiled, tuple) else TILES
    if tiled and max(z.shape[-2:]) > size:
        return _decode_tiles(vae, z, size, stride).squeeze(2).clamp(-1, 1)
    return vae.decoder(vae.post_quant_conv(z)).squeeze(2).clamp(-1, 1)


def _decode_tiles(vae, z, size: int, stride: int):
    """As AutoencoderKLQwenImage.tiled_decode cuts and blends, but one row of tiles at a time, and nothing is kept for a next frame."""
    import torch

    step, overlap = stride * 8, (size - stride) * 8
    above, rows = [], []
    for top in range(0, z.shape[-2], stride):
        places = range(0, z.shape[-1], stride)
        row = [vae.decoder(vae.post_quant_conv(z[..., top : top + size, left : left + size])) for left in places]
        for index, tile in enumerate(row):
            if above:
                vae.blend_v(above[index], tile, overlap)
            if index:
                vae.blend_h(row[index - 1], tile, overlap)
        rows.append(torch.cat([tile[..., :step, :step] for tile in row], dim=-1))
        above = [tile[..., -overlap:, :].clone() for tile in row] if overlap else []
    return torch.cat(rows, dim=-2)[..., : z.shape[-2] * 8, : z.shape[-1] * 8]


def _encode_moments(vae, frames):
    return vae.quant_conv(vae.encoder(frames))


def _statistics(vae, like):
    """latents_mean and latents_std, (1, C, 1, 1, 1)."""
    import torch

    shape = (1, vae.config.z_dim, 1, 1, 1)
    return (
        torch.tensor(vae.config.latents_mean, device=like.device, dtype=like.dtype).view(shape),
        torch.tensor(vae.config.latents_std, device=like.device, dtype=like.dtype).view(shape),
    )


def _use_flat_convolutions(vae) -> None:
    """A single frame sees only the last time slice of each causal kernel, the rest meets zeros: run it as a 2-D convolution."""
    from types import MethodType

    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.forward = MethodType(_flat_forward, module)


def _flat_forward(conv, x, cache_x=None):
    import torch.nn.functional as F

    if cache_x is not None or x.shape[2] != 1 or conv.stride[0] != 1:
        return type(conv).forward(conv, x, cache_x)
    left, _, top, _, _, _ = conv._padding
    flat = F.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, stride=conv.stride[1:], padding=(top, left))
    return flat.unsqueeze(2)
