"""Z-Image's files: how they are known, its original names, sizes from parameter shapes."""

from __future__ import annotations

from backend.catalog.family import LoraSign, NameMap, Rule, Signature
from backend.families._shared import autoencoder_kl
from backend.families._shared.shapes import count_blocks

VAE_SCALING, VAE_SHIFT = 0.3611, 0.1159  # of the published VAE's latents, which is FLUX.1's

SIGNATURES = (
    Signature(
        "dit",
        "base",
        (
            "x_pad_token",
            "cap_embedder.1.weight",
            "noise_refiner.{}.attention.to_q.weight",
            "layers.{}.adaLN_modulation.0.weight",
        ),
        title="Z-Image",
    ),
    Signature(
        "dit",
        "base",
        (
            "x_pad_token",
            "cap_embedder.1.weight",
            "noise_refiner.{}.attention.qkv.weight",
            "layers.{}.adaLN_modulation.0.weight",
        ),
        dialect="native",
        title="Z-Image",
    ),
    Signature(
        "text_encoder",
        "base",
        ("layers.{}.self_attn.q_norm.weight", "layers.{}.mlp.gate_proj.weight", "embed_tokens.weight"),
        ("layers.{}.self_attn.q_proj.bias",),
        title="Qwen3",
    ),
    autoencoder_kl.signature(16, "FLUX.1 VAE"),
)


def _inside(block: str) -> tuple[Rule, ...]:
    ours = block + ".{}.attention."
    return (
        Rule(ours + "qkv", tuple(ours + f"to_{name}" for name in "qkv")),
        Rule(block + ".{}.attention_qkv", tuple(ours + f"to_{name}" for name in "qkv")),
        Rule(ours + "out", (ours + "to_out.0",)),
        Rule(ours + "q_norm", (ours + "norm_q",)),
        Rule(ours + "k_norm", (ours + "norm_k",)),
    )


NATIVE = (
    *(rule for block in ("layers", "noise_refiner", "context_refiner") for rule in _inside(block)),
    Rule("x_embedder", ("all_x_embedder.2-1",)),
    Rule("final_layer.linear", ("all_final_layer.2-1.linear",)),
    Rule("final_layer.adaLN_modulation.1", ("all_final_layer.2-1.adaLN_modulation.1",)),
)
NAME_MAPS = (NameMap("native", "dit", NATIVE),)

_BLOCK = r"(?m)^(?:layers|noise_refiner|context_refiner)_\d+_(?:attention|feed_forward|adaLN)"
LORA_SIGNS = (
    LoraSign((_BLOCK,), widths={r"_(?:attention_\w+|feed_forward_w[13])$": (3840,)}),
    LoraSign((_BLOCK,), widths={r"_feed_forward_w2$": (10240,)}),
    LoraSign((_BLOCK,), widths={r"_adaLN_modulation_0$": (256,)}),
)


def config_from_shapes(part: str, shapes: dict[str, tuple[int, ...]]) -> dict:
    """The class's keyword arguments, from parameter shapes; what shapes cannot show is as in the published models."""
    if part == "vae":
        return autoencoder_kl.sizes(shapes, scaling=VAE_SCALING, shift=VAE_SHIFT)
    return {"dit": _denoiser_sizes, "text_encoder": _qwen3_sizes}[part](shapes)


def _qwen3_sizes(shapes: dict[str, tuple[int, ...]]) -> dict:
    head = shapes["layers.0.self_attn.q_norm.weight"][0]
    vocabulary, width = shapes["embed_tokens.weight"]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": count_blocks(shapes, "layers."),
        "num_attention_heads": shapes["layers.0.self_attn.q_proj.weight"][0] // head,
        "num_key_value_heads": shapes["layers.0.self_attn.k_proj.weight"][0] // head,
        "head_dim": head,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }


def _denoiser_sizes(shapes: dict[str, tuple[int, ...]]) -> dict:
    """Rope axes as published: a quarter and two times three eighths of a head."""
    head = shapes["layers.0.attention.norm_q.weight"][0]
    width = shapes["cap_embedder.1.weight"][0]
    return {
        "in_channels": shapes["all_x_embedder.2-1.weight"][1] // 4,
        "dim": width,
        "n_layers": count_blocks(shapes, "layers."),
        "n_refiner_layers": count_blocks(shapes, "noise_refiner."),
        "n_heads": width // head,
        "n_kv_heads": shapes["layers.0.attention.to_k.weight"][0] // head,
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        "axes_dims": [head - head // 8 * 6, head // 8 * 3, head // 8 * 3],
        "axes_lens": [1536, 512, 512],
    }
