"""Stable Diffusion 1.5: recognition and names of its UNet; pictures are not made yet."""

from __future__ import annotations

from backend.catalog.family import Defaults, LoraSign, LoraTargets, NameMap, Part, Signature, SizeRule, TextSign
from backend.catalog.lora.module_names import CLIP
from backend.families._shared.unet_keys import unet_maps as derived_maps

__all__ = ["derived_maps"]

NAME = "sd15"
TITLE = "Stable Diffusion 1.5"
WORDS = ("stable-diffusion-v1", "sd_v1", "sd_1.5", "sd1")
PIPELINE = "StableDiffusionPipeline"

PARTS = {
    "dit": Part(
        network="diffusers.models.unets.unet_2d_condition:UNet2DConditionModel",
        folder="unet",
        phase="denoise",
        blocks=("down_blocks", "up_blocks"),
        config={"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
        prefixes=("model.diffusion_model.", "diffusion_model.", "unet."),
        keep_precise=("norm", "conv_in", "conv_out", "time_embedding"),
    ),
}
_FIRST = "down_blocks.0.resnets.0.conv1.weight"
SIGNATURES = (
    Signature(
        "dit", "base", (_FIRST, "conv_in.weight"), ("add_embedding.linear_1.weight",), title="Stable Diffusion 1"
    ),
)
NAME_MAPS: tuple[NameMap, ...] = ()  # the original's names are worked out from the loaded UNet
LORA_NAMES = {"comfyui": "ldm", "kohya": ""}

_BLOCKS = r"(?m)^(?:input_blocks|output_blocks|middle_block|down_blocks|up_blocks|mid_block)_"
_CONTEXT = r"(?m)attn2_to_[kv]$"
LORA_SIGNS = (
    LoraSign((_BLOCKS,), (r"transformer_blocks_[2-9]_",), {_CONTEXT: (768,)}),
    LoraSign(
        (_BLOCKS,),
        (r"transformer_blocks_[1-9]_", r"(?m)^(?:input_blocks_[78]_1|add_embedding|label_emb)", _CONTEXT),
        sure=False,
    ),
)
LORA_TEXT_SIGNS = (TextSign(CLIP, (768, 3072), r"lora_te_|(?!lora_te)"),)
LORA_TEXT_NAMES = {"kohya": {"text_encoder": "lora_te"}}
LORA = LoraTargets(part="dit", presets={"attention": ("to_q", "to_k", "to_v", "to_out.0")}, default="attention")
DEFAULTS = Defaults(request={"width": 512, "height": 512, "num_inference_steps": 30, "guidance": 7.0})
SCHEDULER: dict = {}
SIZES = SizeRule(multiple=8, pixels=512 * 512, patch=1)
