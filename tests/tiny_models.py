"""Tiny models with random weights, of the true classes and in the folder layout that diffusers saves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from backend.schema.paths import ASSETS

SCHEDULE = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
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


def make_qwen_image(
    folder: Path, *, num_layers: int = 2, seed: int = 0, max_shard_size: str = "5GB", num_heads: int = 3
) -> Path:
    """A Qwen-Image of some 0.5 million parameters, with the starter's tokenizer and the schedule of the large model."""
    import torch

    torch.manual_seed(seed)
    for name, module in _qwen_parts(num_layers, num_heads).items():
        for parameter in module.parameters():  # away from zeros and ones, so that every weight matters
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
        keywords = {"max_shard_size": max_shard_size} if name != "text_encoder" else {}
        module.save_pretrained(folder / name, **keywords)
    shutil.copytree(ASSETS / "starter" / "tokenizer", folder / "tokenizer")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULE))
    index = json.loads((ASSETS / "starter" / "model_index.json").read_text())
    del index["_sizes"]  # the starter's
    (folder / "model_index.json").write_text(json.dumps({**index, "_defaults": {"width": 64, "height": 64}}))
    return folder


EDIT_CLASSES = {
    "edit": "QwenImageEditPipeline",
    "edit-2509": "QwenImageEditPlusPipeline",
    "edit-2511": "QwenImageEditPlusPipeline",
}


def make_qwen_edit(folder: Path, variant: str = "edit", *, seed: int = 0) -> Path:
    """A Qwen-Image-Edit as tiny as `make_qwen_image`'s, in the folder that a stranger downloads: its class in model_index.json, the
    vision tower among the text encoder's weights, a processor with a tokenizer of its own."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make_qwen_image(folder, seed=seed)
    Qwen2VLImageProcessorPil().save_pretrained(folder / "processor")
    for path in (folder / "tokenizer").iterdir():
        shutil.copy(path, folder / "processor")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": EDIT_CLASSES[variant], "processor": ["transformers", "Qwen2VLProcessor"]}
    index["_reference_pixels"] = 64 * 64
    (folder / "model_index.json").write_text(json.dumps(index))
    if variant == "edit-2511":
        config = folder / "transformer" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "zero_cond_t": True}))
    return folder


def _qwen_parts(num_layers: int, num_heads: int) -> dict:
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = json.loads((ASSETS / "starter" / "text_encoder" / "config.json").read_text())
    text["text_config"].update(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
    )
    text["vision_config"].update(hidden_size=16, intermediate_size=16, out_hidden_size=48)
    return {
        "transformer": QwenImageTransformer2DModel(
            num_layers=num_layers,
            attention_head_dim=16,
            num_attention_heads=num_heads,
            joint_attention_dim=48,
            axes_dims_rope=(4, 6, 6),
        ),
        "vae": AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1, temperal_downsample=[False, True, True]),
        "text_encoder": Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**text)),
    }
