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


def _save(folder: Path, parts: dict, *, seed: int) -> None:
    """Each part in a folder of its name, its weights moved away from zeros and ones so that every one matters."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, module in parts.items():
        for parameter in module.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        module.save_pretrained(folder / name)


def _tiny_kl():
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        force_upcast=False,
    )


def _schedule(folder: Path, **values) -> None:
    (folder / "scheduler").mkdir()
    said = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, **values}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(said))


FLUX_SCHEDULE = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}


def make_flux(folder: Path, *, variant: str = "dev", seed: int = 0) -> Path:
    """A FLUX.1 of some 0.3 million parameters, with tokenizers that know letters: "dev", or "schnell"."""
    import torch
    from diffusers import FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    clip = CLIPTextConfig(
        vocab_size=560,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=32,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    t5 = T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    network = FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=variant == "dev",
        axes_dims_rope=(4, 6, 6),
    )
    parts = {"transformer": network, "vae": _tiny_kl()}
    parts |= {"text_encoder": CLIPTextModel(clip), "text_encoder_2": T5EncoderModel(t5)}
    _save(folder, parts, seed=seed)
    _letters_of_clip(folder / "tokenizer")
    _letters_of_t5(folder / "tokenizer_2")
    _schedule(folder, **(FLUX_SCHEDULE if variant == "dev" else {"shift": 1.0, "use_dynamic_shifting": False}))
    index = {
        "_class_name": "FluxPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "_defaults": {"width": 64, "height": 64},
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _letters_of_clip(folder: Path) -> None:
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(33, 127)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    tokenizer = CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=77)
    tokenizer.save_pretrained(folder)


def _letters_of_t5(folder: Path) -> None:
    from transformers import T5TokenizerFast

    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0), ("▁", -2.0)]
    words += [(chr(code), -3.0) for code in range(33, 127)]
    T5TokenizerFast(vocab=words, extra_ids=0, model_max_length=512).save_pretrained(folder)


def make_z_image(folder: Path, *, seed: int = 0) -> Path:
    """A Z-Image of some 0.4 million parameters, with the starter's tokenizer."""
    import torch
    from diffusers import ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    vocabulary = json.loads((ASSETS / "starter" / "text_encoder" / "config.json").read_text())["text_config"][
        "vocab_size"
    ]
    qwen3 = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    network = ZImageTransformer2DModel(
        dim=48,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[1536, 512, 512],
    )
    parts = {"transformer": network, "vae": _tiny_kl(), "text_encoder": Qwen3ForCausalLM(qwen3)}
    _save(folder, parts, seed=seed)
    shutil.copytree(ASSETS / "starter" / "tokenizer", folder / "tokenizer")
    path = folder / "tokenizer" / "tokenizer_config.json"
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    _schedule(folder, shift=3.0, use_dynamic_shifting=False)
    index = {
        "_class_name": "ZImagePipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3Model"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "ZImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "_defaults": {"width": 64, "height": 64},
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


# Whoever adds a family that draws adds how to make a tiny one.
MAKERS = {"qwen_image": make_qwen_image, "flux": make_flux, "z_image": make_z_image}
