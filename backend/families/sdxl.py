"""SDXL: recognition and names of its UNet; pictures are not made yet."""

from __future__ import annotations

from backend.catalog.family import Defaults, LoraSign, LoraTargets, NameMap, Part, Signature, SizeRule, TextSign
from backend.catalog.lora.module_names import CLIP, FIRST
from backend.families._shared.unet_keys import unet_maps as derived_maps

__all__ = ["derived_maps"]

NAME = "sdxl"
TITLE = "SDXL"
WORDS = ("stable-diffusion-xl", "sdxl")
PIPELINE = "StableDiffusionXLPipeline"

PARTS = {
    "dit": Part(
        network="diffusers.models.unets.unet_2d_condition:UNet2DConditionModel",
        folder="unet",
        phase="denoise",
        blocks=("down_blocks", "up_blocks"),
        config={
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        prefixes=("model.diffusion_model.", "diffusion_model.", "unet."),
        keep_precise=("norm", "conv_in", "conv_out", "time_embedding", "add_embedding"),
    ),
}
_FIRST = "down_blocks.0.resnets.0.conv1.weight"
SIGNATURES = (
    Signature("dit", "base", (_FIRST, "conv_in.weight", "add_embedding.linear_1.weight"), title="SDXL"),
    Signature(
        "dit",
        "refiner",
        (_FIRST, "conv_in.weight", "add_embedding.linear_1.weight"),
        shapes={"add_embedding.linear_1.weight": (None, 2560)},
        title="SDXL refiner",
    ),
)
NAME_MAPS: tuple[NameMap, ...] = ()  # the original's names are worked out from the loaded UNet
LORA_NAMES = {"comfyui": "ldm", "kohya": "ldm"}

_BLOCKS = r"(?m)^(?:input_blocks|output_blocks|middle_block|down_blocks|up_blocks|mid_block)_"
_CONTEXT = r"(?m)attn2_to_[kv]$"
LORA_SIGNS = (
    LoraSign((_BLOCKS,), widths={_CONTEXT: (2048, 1280)}),
    LoraSign((_BLOCKS + r"\w*transformer_blocks_[2-9]_",)),
    LoraSign((_BLOCKS,), (_CONTEXT,), sure=False),
)
LORA_TEXT_SIGNS = (TextSign(CLIP, (768, 3072), FIRST), TextSign(CLIP, (1280, 5120)))
LORA = LoraTargets(part="dit", presets={"attention": ("to_q", "to_k", "to_v", "to_out.0")}, default="attention")
DEFAULTS = Defaults(request={"width": 1024, "height": 1024, "num_inference_steps": 30, "guidance": 7.0})
SCHEDULER: dict = {}
SIZES = SizeRule(multiple=8, pixels=1024 * 1024, patch=1)
