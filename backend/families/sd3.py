"""Stable Diffusion 3 and 3.5: recognition and names of its transformer; pictures are not made yet."""

from __future__ import annotations

import re
from collections.abc import Iterable

from backend.catalog.family import Defaults, LoraSign, LoraTargets, NameMap, Part, Rule, Signature, SizeRule, TextSign
from backend.catalog.lora.module_names import CLIP, FIRST, T5
from backend.families._shared.shapes import count_blocks

NAME = "sd3"
TITLE = "Stable Diffusion 3"
WORDS = ("stable-diffusion-3", "sd3", "sd_3")
PIPELINE = "StableDiffusion3Pipeline"

PARTS = {
    "dit": Part(
        network="diffusers.models.transformers.transformer_sd3:SD3Transformer2DModel",
        folder="transformer",
        phase="denoise",
        blocks=("transformer_blocks",),
        prefixes=("model.diffusion_model.", "diffusion_model.", "transformer.", "model."),
        keep_precise=("norm", "pos_embed", "context_embedder", "time_text_embed", "proj_out"),
    ),
}
_OURS = ("transformer_blocks.{}.norm1_context.linear.weight", "pos_embed.proj.weight")
SIGNATURES = (
    Signature("dit", "base", _OURS, title="Stable Diffusion 3"),
    Signature(
        "dit", "3.5-large", (*_OURS, "transformer_blocks.37.attn.to_q.weight"), title="Stable Diffusion 3.5 Large"
    ),
    Signature(
        "dit", "3.5-medium", (*_OURS, "transformer_blocks.{}.attn2.to_q.weight"), title="Stable Diffusion 3.5 Medium"
    ),
    Signature(
        "dit",
        "original",
        ("joint_blocks.{}.context_block.adaLN_modulation.1.weight", "x_embedder.proj.weight"),
        dialect="original",
        title="Stable Diffusion 3",
    ),
)

WHOLE_CONFIG = {"dual_attention_layers": [0], "qk_norm": "rms_norm"}

_BLOCK, _JOINT = "transformer_blocks.{}.", "joint_blocks.{}."


def _attention(theirs: str, ours: str, names: Iterable[str]) -> tuple[Rule, ...]:
    return (Rule(_JOINT + theirs + ".qkv", tuple(_BLOCK + f"{ours}.{name}" for name in names)),)


ORIGINAL = (
    *_attention("x_block.attn", "attn", ("to_q", "to_k", "to_v")),
    *_attention("context_block.attn", "attn", ("add_q_proj", "add_k_proj", "add_v_proj")),
    *_attention("x_block.attn2", "attn2", ("to_q", "to_k", "to_v")),
    Rule(_JOINT + "x_block.attn.proj", (_BLOCK + "attn.to_out.0",)),
    Rule(_JOINT + "x_block.attn2.proj", (_BLOCK + "attn2.to_out.0",)),
    Rule(_JOINT + "context_block.attn.proj", (_BLOCK + "attn.to_add_out",)),
    *(
        Rule(_JOINT + f"{theirs}.{end}", (_BLOCK + f"{ours}.{name}",))
        for theirs, ours in (("x_block.attn", "attn"), ("x_block.attn2", "attn2"))
        for end, name in (("ln_q", "norm_q"), ("ln_k", "norm_k"))
    ),
    Rule(_JOINT + "context_block.attn.ln_q", (_BLOCK + "attn.norm_added_q",)),
    Rule(_JOINT + "context_block.attn.ln_k", (_BLOCK + "attn.norm_added_k",)),
    *(
        Rule(_JOINT + f"{theirs}.mlp.{end}", (_BLOCK + f"{ours}.{name}",))
        for theirs, ours in (("x_block", "ff"), ("context_block", "ff_context"))
        for end, name in (("fc1", "net.0.proj"), ("fc2", "net.2"))
    ),
    Rule(_JOINT + "x_block.adaLN_modulation.1", (_BLOCK + "norm1.linear",)),
    Rule(_JOINT + "context_block.adaLN_modulation.1", (_BLOCK + "norm1_context.linear",)),
    Rule("x_embedder.proj", ("pos_embed.proj",)),
    Rule("pos_embed", ("pos_embed",), parameter="pos_embed"),
    *(
        Rule(f"{theirs}.mlp.{index}", (f"time_text_embed.{ours}_embedder.linear_{number}",))
        for theirs, ours in (("t_embedder", "timestep"), ("y_embedder", "text"))
        for number, index in ((1, 0), (2, 2))
    ),
    Rule("final_layer.linear", ("proj_out",)),
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap_halves=True),
)
NAME_MAPS = (NameMap("original", "dit", ORIGINAL),)


def derived_maps(part: str, modules: Iterable[str]) -> tuple[NameMap, ...]:
    """The last block alone keeps the halves of its text modulation in the other order; which is the last depends on the depth."""
    numbers = [int(name.split(".")[1]) for name in modules if name.startswith("transformer_blocks.")]
    if part != "dit" or not numbers:
        return ()
    last = max(numbers)
    rule = Rule(
        f"joint_blocks.{last}.context_block.adaLN_modulation.1",
        (f"transformer_blocks.{last}.norm1_context.linear",),
        swap_halves=True,
    )
    return (NameMap("original, last block", "dit", (rule,)),)


def config_from_lora(widths: tuple[tuple[str, int, int], ...]) -> dict:
    """As many blocks as the width has heads of 64, as in all published models: what a LoRA shows of its model's depth."""
    inner = re.compile(r"_attn2?_(?:qkv|to_[qkv]|add_[qkv]_proj)$|adaLN_modulation_1$|norm1(?:_context)?_linear$")
    seen = {width for name, width, _ in widths if width and width % 64 == 0 and inner.search(name)}
    return {"num_layers": max(seen) // 64} if seen else {}


LORA_SIGNS = (
    LoraSign((r"(?m)^joint_blocks_\d+_",)),
    LoraSign(
        (r"(?m)^transformer_blocks_\d+_attn_(?:to|add)_[qkv]",),
        ("single_transformer_blocks",),
        {r"(?m)^transformer_blocks_\d+_attn_(?:to|add)_[qkv]": (1536, 2432)},
    ),
)
LORA_TEXT_SIGNS = (TextSign(CLIP, (768, 3072), FIRST), TextSign(CLIP, (1280, 5120)), TextSign(T5, (4096, 10240)))
LORA = LoraTargets(part="dit", presets={"attention": ("to_q", "to_k", "to_v", "to_out.0")}, default="attention")
DEFAULTS = Defaults(request={"width": 1024, "height": 1024, "num_inference_steps": 28, "guidance": 7.0})
SCHEDULER: dict = {}
SIZES = SizeRule(multiple=16, pixels=1024 * 1024)


def config_from_shapes(part: str, shapes: dict[str, tuple[int, ...]]) -> dict:
    """The sizes that an SD3 transformer's parameters show."""
    width, channels, patch, _ = shapes["pos_embed.proj.weight"]
    head = 64 if width % 64 == 0 else 16
    dual = {name.split(".")[1] for name in shapes if ".attn2.to_q." in name}
    table = shapes.get("pos_embed.pos_embed")
    return {
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "num_layers": count_blocks(shapes, "transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "caption_projection_dim": width,
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "pos_embed_max_size": round(table[1] ** 0.5) if table else 96,
        "dual_attention_layers": tuple(sorted(map(int, dual))),
        "qk_norm": "rms_norm" if "transformer_blocks.0.attn.norm_q.weight" in shapes else None,
    }
