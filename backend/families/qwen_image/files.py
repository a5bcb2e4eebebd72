"""Qwen-Image's files: how they are known, sizes from parameter shapes where no config.json lies beside, and the VAE's names in the
Wan project."""

from __future__ import annotations

import math
import re
from pathlib import Path

from backend.catalog.family import EditRule, LoraSign, Rule, Signature
from backend.families._shared.shapes import count_blocks
from backend.schema.messages import Trouble

LAYERED, EDIT_2511 = "time_text_embed.addition_t_embedding.weight", "__index_timestep_zero__"
_DIT = (
    "transformer_blocks.{}.attn.add_q_proj.weight",
    "transformer_blocks.{}.img_mod.1.weight",
    "transformer_blocks.{}.txt_mlp.net.0.proj.weight",
    "txt_norm.weight",
    "img_in.weight",
)
SIGNATURES = (
    Signature("dit", "base", _DIT, title="Qwen-Image"),
    Signature("dit", "edit-2511", (*_DIT, EDIT_2511), title="Qwen-Image-Edit-2511"),
    Signature("dit", "layered", (*_DIT, LAYERED), title="Qwen-Image-Layered"),
    Signature(
        part="text_encoder",
        variant="base",
        title="Qwen2.5-VL",
        must=(
            "layers.{}.self_attn.q_proj.bias",
            "layers.{}.mlp.gate_proj.weight",
            "embed_tokens.weight",
            "norm.weight",
        ),
        must_not=("layers.{}.self_attn.q_norm.weight",),
    ),
    Signature(
        part="vision",
        variant="base",
        title="Qwen2.5-VL's vision tower",
        must=(
            "blocks.{}.attn.qkv.bias",
            "blocks.{}.mlp.gate_proj.bias",
            "patch_embed.proj.weight",
            "merger.ln_q.weight",
        ),
    ),
    Signature(
        part="vae",
        variant="base",
        title="Qwen-Image VAE",
        must=(
            "decoder.up_blocks.{}.resnets.0.conv1.weight",
            "encoder.down_blocks.{}.conv1.weight",
            "quant_conv.weight",
            "decoder.norm_out.gamma",
        ),
        shapes={"decoder.norm_out.gamma": (None, 1, 1, 1), "encoder.conv_in.weight": (None, 3, 3, 3, 3)},
    ),
    Signature(
        part="vae",
        variant="base",
        title="Qwen-Image VAE",
        must=("decoder.middle.{}.residual.0.gamma", "encoder.downsamples.{}.residual.0.gamma", "conv1.weight"),
        shapes={"decoder.head.0.gamma": (None, 1, 1, 1), "encoder.conv1.weight": (None, 3, 3, 3, 3)},
        dialect="wan",
    ),
)

TITLES = {
    "base": "Qwen-Image",
    "edit": "Qwen-Image-Edit",
    "edit-2509": "Qwen-Image-Edit-2509",
    "edit-2511": "Qwen-Image-Edit-2511",
    "layered": "Qwen-Image-Layered",
}
EDITING = ("edit", "edit-2509", "edit-2511")  # variants that are given pictures
_PROCESSOR = ("Qwen/Qwen-Image-Edit", "processor/")
EDITS = {
    "edit": EditRule(
        most=1, usual_processor=_PROCESSOR, hint="Give one, or choose Qwen-Image-Edit-2509 or a later one."
    ),
    "edit-2509": EditRule(most=None, shown="numbered, at their own size", usual_processor=_PROCESSOR),
    "edit-2511": EditRule(most=None, shown="numbered, at their own size", usual_processor=_PROCESSOR),
}
EDIT_HINT = "Choose a Qwen-Image-Edit model. A single file is known for one by that name, as in Qwen-Image-Edit-2509.safetensors."
VARIANT_CONFIG = {"edit-2511": {"zero_cond_t": True}}
_CLASSES = {  # of diffusers' pipelines, as model_index.json names them
    "QwenImageEditPipeline": "edit",
    "QwenImageEditInpaintPipeline": "edit",
    "QwenImageEditPlusPipeline": "edit-2509",
    "QwenImagePipeline": "base",
}
_NAMED = re.compile(r"(?:qwen|firered).?image", re.IGNORECASE)
_FIRERED = re.compile(r"firered.?image.?edit", re.IGNORECASE)  # Edit-2509 trained further: it takes several pictures
_CALLED_EDIT = re.compile(r"qwen.?image.*?edit(?:.*?(?P<when>2509|2511|plus))?", re.IGNORECASE)


def tell_variant(variant: str, class_name: str, config: dict, path: Path) -> tuple[str, str, str] | None:
    """(variant, title, by what) of a transformer whose tensors are those of Qwen-Image; None where nothing says that it edits.

    By the pipeline's class in model_index.json and `zero_cond_t` in its config (Edit-2511), and else by how the file, or the nearest
    folder above it that speaks of Qwen-Image, is called: the tensors of Qwen-Image, Edit and Edit-2509 have the same names.
    """
    if variant != "base":
        return None
    if config.get("zero_cond_t"):
        return "edit-2511", TITLES["edit-2511"], "zero_cond_t in its configuration"
    told = _CLASSES.get(class_name)
    if told is not None:
        return told, TITLES[told], ""
    word = next(
        (word for word in (path.stem, *[folder.name for folder in path.parents][:5]) if _NAMED.search(word)), ""
    )
    if _FIRERED.search(word):
        return "edit-2509", "FireRed-Image-Edit", f"it is called {word}"
    called = _CALLED_EDIT.search(word)
    if called is None:
        return None
    told = {"2511": "edit-2511", "2509": "edit-2509", "plus": "edit-2509"}.get((called["when"] or "").lower(), "edit")
    return told, TITLES[told], f"it is called {word}"


_BLOCK = r"(?m)^transformer_blocks_\d+_"
_NOT_OURS = ("single_transformer_blocks", "attn2", "_ff_", "norm1", r"blocks_\d+_attentions")
LORA_SIGNS = (
    LoraSign((_BLOCK + r"(?:img|txt)_(?:mlp|mod)",)),
    LoraSign(
        (r"(?m)^transformer_blocks_(?:19|[2-5]\d)_attn_",), _NOT_OURS, {_BLOCK + r"attn_(?:to|add)_[qkv]": (3072,)}
    ),
    LoraSign((r"(?m)^txt_in$",), widths={r"^txt_in$": (3584,)}),
    LoraSign((_BLOCK + r"attn_(?:to|add)_[qkv]",), _NOT_OURS, {_BLOCK + r"attn_(?:to|add)_[qkv]": (3072,)}, sure=False),
)

_RESIDUAL = (
    ("residual.0", "norm1"),
    ("residual.2", "conv1"),
    ("residual.3", "norm2"),
    ("residual.6", "conv2"),
    ("shortcut", "conv_shortcut"),
)
_MIDDLE = (("0", "resnets.0"), ("1", "attentions.0"), ("2", "resnets.1"))


def original_vae() -> tuple[Rule, ...]:
    """The VAE as the Wan project names it; its decoder numbers its blocks through, three resnets and an upsampler a level."""
    rules = [Rule("conv1", ("quant_conv",)), Rule("conv2", ("post_quant_conv",))]
    for half in ("encoder", "decoder"):
        rules += [
            Rule(f"{half}.conv1", (f"{half}.conv_in",)),
            Rule(f"{half}.head.0", (f"{half}.norm_out",)),
            Rule(f"{half}.head.2", (f"{half}.conv_out",)),
        ]
        for number, ours in _MIDDLE:
            rules += [Rule(f"{half}.middle.{number}.{a}", (f"{half}.mid_block.{ours}.{b}",)) for a, b in _RESIDUAL]
            rules += [
                Rule(f"{half}.middle.{number}.{a}", (f"{half}.mid_block.{ours}.{a}",))
                for a in ("norm", "to_qkv", "proj")
            ]
    rules += [Rule(f"encoder.downsamples.{{}}.{a}", (f"encoder.down_blocks.{{}}.{b}",)) for a, b in _RESIDUAL]
    rules += [
        Rule(f"encoder.downsamples.{{}}.{a}", (f"encoder.down_blocks.{{}}.{a}",)) for a in ("resample.1", "time_conv")
    ]
    for number in range(15):
        level, slot = divmod(number, 4)
        theirs, ours = f"decoder.upsamples.{number}", f"decoder.up_blocks.{level}"
        if slot < 3:
            rules += [Rule(f"{theirs}.{a}", (f"{ours}.resnets.{slot}.{b}",)) for a, b in _RESIDUAL]
        else:
            rules += [Rule(f"{theirs}.{a}", (f"{ours}.upsamplers.0.{a}",)) for a in ("resample.1", "time_conv")]
    return tuple(rules)


def config_from_shapes(part: str, shapes: dict[str, tuple[int, ...]]) -> dict:
    """The class's keyword arguments, from parameter shapes; what shapes cannot show is as in the published models."""
    return {"dit": _dit_sizes, "text_encoder": _text_sizes, "vision": _vision_sizes, "vae": _vae_sizes}[part](shapes)


def _dit_sizes(shapes: dict) -> dict:
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    turned = head // 16 * 2  # rotary axes: frame, then height and width in equal shares of the rest
    side = (head - turned) // 4 * 2
    return {
        "patch_size": 2,
        "in_channels": shapes["img_in.weight"][1],
        "out_channels": shapes["proj_out.weight"][0] // 4,
        "num_layers": count_blocks(shapes, "transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": shapes["img_in.weight"][0] // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "axes_dims_rope": (head - 2 * side, side, side),
        "zero_cond_t": EDIT_2511 in shapes,
        "use_additional_t_cond": LAYERED in shapes,
        "use_layer3d_rope": LAYERED in shapes,
    }


def _text_sizes(shapes: dict) -> dict:
    vocabulary, width = shapes["embed_tokens.weight"]
    head = 128 if width % 128 == 0 else 64
    rows = [shapes[f"layers.0.self_attn.{name}_proj.weight"][0] for name in "qk"]
    if any(count < head or count % head for count in rows):
        raise Trouble(
            "not_supported",
            f"A text encoder of width {width} has {rows[0]} and {rows[1]} rows of attention, which are no whole number of heads of {head}, "
            "and nothing beside its file says how many it has.",
            hint="Put the config.json of the text encoder that it was trained from beside the file.",
        )
    return {
        "hidden_size": width,
        "intermediate_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": count_blocks(shapes, "layers."),
        "num_attention_heads": rows[0] // head,
        "num_key_value_heads": rows[1] // head,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        "max_position_embeddings": 128000,
    }


def _vision_sizes(shapes: dict) -> dict:
    width, channels, frames, side, _ = shapes["patch_embed.proj.weight"]
    depth = count_blocks(shapes, "blocks.")
    return {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": shapes["blocks.0.mlp.gate_proj.weight"][0],
        "num_heads": max(width // 80, 1),
        "in_channels": channels,
        "patch_size": side,
        "temporal_patch_size": frames,
        "spatial_merge_size": math.isqrt(shapes["merger.mlp.0.weight"][0] // width),
        "window_size": 112,
        "out_hidden_size": shapes["merger.mlp.2.weight"][0],
        "fullatt_block_indexes": [index for index in range(depth) if index % 8 == 7],
    }


def _vae_sizes(shapes: dict) -> dict:
    levels = 1 + sum(
        name.startswith("decoder.up_blocks.") and name.endswith("upsamplers.0.resample.1.weight") for name in shapes
    )
    return {
        "base_dim": shapes["decoder.norm_out.gamma"][0],
        "z_dim": shapes["post_quant_conv.weight"][0],
        "dim_mult": [1, 2, 4, 4][:levels],
        "num_res_blocks": count_blocks(shapes, "decoder.up_blocks.0.resnets.") - 1,
        "attn_scales": [],
        "temperal_downsample": [
            f"decoder.up_blocks.{level}.upsamplers.0.time_conv.weight" in shapes for level in range(levels - 1)
        ][::-1],
    }
