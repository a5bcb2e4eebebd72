"""FLUX.1's files: how they are known, other projects' names of their modules, sizes from parameter shapes."""

from __future__ import annotations

from backend.catalog.family import LoraSign, NameMap, Rule, Signature
from backend.families._shared import autoencoder_kl, clip, t5
from backend.families._shared.bfl_keys import DOUBLE, ENDS, SINGLE, double_blocks, embedders, single_norms
from backend.families._shared.shapes import count_blocks

VAE_SCALING, VAE_SHIFT = 0.3611, 0.1159  # of the published VAE's latents

_OURS = (
    "single_transformer_blocks.{}.proj_mlp.weight",
    "transformer_blocks.{}.attn.add_q_proj.weight",
    "x_embedder.weight",
)
_THEIRS = ("double_blocks.{}.img_attn.norm.key_norm.scale", "single_blocks.{}.linear1.weight", "img_in.weight")
_NOT = (
    "distilled_guidance_layer.in_proj.weight",
    "txt_in.individual_token_refiner.blocks.{}.norm1.weight",
    "single_stream_modulation.lin.weight",
)


def _signatures() -> tuple[Signature, ...]:
    found = []
    for dialect, must, embedder, guidance in (
        ("", _OURS, "x_embedder.weight", "time_text_embed.guidance_embedder.linear_1.weight"),
        ("bfl", _THEIRS, "img_in.weight", "guidance_in.in_layer.weight"),
    ):
        found.append(Signature("dit", "schnell", must, (*_NOT, guidance), dialect=dialect, title="FLUX.1 schnell"))
        found.append(Signature("dit", "dev", (*must, guidance), _NOT, dialect=dialect, title="FLUX.1 dev"))
        for variant, width in (("fill", 384), ("control", 128)):
            shapes = {embedder: (None, width)}
            found.append(Signature("dit", variant, (*must, guidance), _NOT, shapes, dialect, f"FLUX.1 {variant}"))
    return (
        *found,
        clip.signature("text_encoder"),
        *t5.signatures("text_encoder_2"),
        autoencoder_kl.signature(16, "FLUX.1 VAE"),
    )


SIGNATURES = _signatures()
_QKV_MLP = (SINGLE + "attn.to_q", SINGLE + "attn.to_k", SINGLE + "attn.to_v", SINGLE + "proj_mlp")
_MLP = (("img_mlp.0", "ff.net.0.proj"), ("img_mlp.2", "ff.net.2"), ("txt_mlp.0", "ff_context.net.0.proj"))
BFL = (
    *double_blocks(),
    *(
        Rule("double_blocks.{}." + theirs, (DOUBLE + ours,))
        for theirs, ours in (*_MLP, ("txt_mlp.2", "ff_context.net.2"))
    ),
    Rule("double_blocks.{}.img_mod.lin", (DOUBLE + "norm1.linear",)),
    Rule("double_blocks.{}.txt_mod.lin", (DOUBLE + "norm1_context.linear",)),
    Rule("single_blocks.{}.linear1", _QKV_MLP, rows=(1, 1, 1, 4)),
    *(Rule(f"single_blocks.{{}}.linear1.{place}", (name,)) for place, name in enumerate(_QKV_MLP)),
    Rule("single_blocks.{}.qkv", _QKV_MLP[:3]),
    Rule("single_blocks.{}.linear2", (SINGLE + "proj_out",)),
    Rule("single_blocks.{}.modulation.lin", (SINGLE + "norm.linear",)),
    *single_norms(),
    *embedders("time_text_embed", {"time_in": "timestep", "vector_in": "text", "guidance_in": "guidance"}),
    *ENDS,
)
DIFFSYNTH = (  # a: the picture's stream, b: the text's
    Rule("blocks.{}.attn.a_to_qkv", tuple(DOUBLE + f"attn.to_{name}" for name in "qkv")),
    Rule("blocks.{}.attn.b_to_qkv", tuple(DOUBLE + f"attn.add_{name}_proj" for name in "qkv")),
    Rule("blocks.{}.attn.a_to_out", (DOUBLE + "attn.to_out.0",)),
    Rule("blocks.{}.attn.b_to_out", (DOUBLE + "attn.to_add_out",)),
    Rule("blocks.{}.ff_a.0", (DOUBLE + "ff.net.0.proj",)),
    Rule("blocks.{}.ff_a.2", (DOUBLE + "ff.net.2",)),
    Rule("blocks.{}.ff_b.0", (DOUBLE + "ff_context.net.0.proj",)),
    Rule("blocks.{}.ff_b.2", (DOUBLE + "ff_context.net.2",)),
    Rule("blocks.{}.norm1_a.linear", (DOUBLE + "norm1.linear",)),
    Rule("blocks.{}.norm1_b.linear", (DOUBLE + "norm1_context.linear",)),
    Rule("single_blocks.{}.to_qkv_mlp", _QKV_MLP, rows=(1, 1, 1, 4)),
    Rule("single_blocks.{}.proj_out", (SINGLE + "proj_out",)),
    Rule("single_blocks.{}.norm.linear", (SINGLE + "norm.linear",)),
)
NAME_MAPS = (NameMap("bfl", "dit", BFL), NameMap("diffsynth", "dit", DIFFSYNTH), t5.names("text_encoder_2"))

_OTHERS = (
    "img_mlp_fc1",
    "img_mod_linear",
    "individual_token_refiner",
    "stream_modulation",
    "distilled_guidance",
    "to_qkv_mlp_proj",
)
LORA_SIGNS = (
    LoraSign((r"(?m)^single_blocks_\d+_linear2",), _OTHERS, {r"single_blocks_\d+_linear2$": (15360,)}),
    LoraSign(
        (r"(?m)^double_blocks_\d+_(?:img|txt)_mlp_2",),
        _OTHERS,
        {r"double_blocks_\d+_\w+_mlp_2$": (12288,), r"_(?:mlp_0|attn_qkv|attn_proj|linear1)$": (3072,)},
    ),
    *(
        LoraSign((names,), _OTHERS, {names: (3072,)}, {names: (rows,)})
        for names, rows in ((r"(?m)^double_blocks_\d+_\w+_mlp_0$", 12288), (r"(?m)^single_blocks_\d+_linear1$", 21504))
    ),
    LoraSign((r"(?m)^single_transformer_blocks_\d+_(?:attn_to_[qkv]|proj_mlp|proj_out|norm_linear)",), _OTHERS),
    LoraSign((r"(?m)^blocks_\d+_attn_[ab]_to_qkv",)),
    LoraSign(
        (r"(?m)^(?:double|single)_blocks_\d+_(?:img|txt|linear|modulation|processor|qkv|norm|to_qkv)",),
        _OTHERS,
        sure=False,
    ),
    LoraSign(
        (r"(?m)^transformer_blocks_\d+_attn_(?:to|add)_[qkv]",),
        (*_OTHERS, "img_m", "txt_m", "attn2"),
        {r"attn_(?:to|add)_[qkv]": (3072,)},
        sure=False,
    ),
)


def config_from_shapes(part: str, shapes: dict[str, tuple[int, ...]]) -> dict:
    """The class's keyword arguments, from parameter shapes; what shapes cannot show is as in the published models."""
    if part == "vae":
        return autoencoder_kl.sizes(shapes, scaling=VAE_SCALING, shift=VAE_SHIFT)
    return {"dit": _denoiser_sizes, "text_encoder": clip.sizes, "text_encoder_2": t5.sizes}[part](shapes)


def _denoiser_sizes(shapes: dict[str, tuple[int, ...]]) -> dict:
    """Rope axes as in the published models where the width is theirs."""
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    width = shapes["transformer_blocks.0.attn.to_q.weight"][0]
    axes = (16, 56, 56) if head == 128 else (head // 4, head // 8 * 3, head - head // 4 - head // 8 * 3)
    return {
        "patch_size": 1,
        "in_channels": shapes["x_embedder.weight"][1],
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": count_blocks(shapes, "transformer_blocks."),
        "num_single_layers": count_blocks(shapes, "single_transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "axes_dims_rope": axes,
    }
