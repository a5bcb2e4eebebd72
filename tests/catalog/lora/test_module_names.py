"""The table of families' modules is that of their networks, and small LoRA files are known by it where one family alone has their modules."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.lora.identify import families_of, outline_of
from backend.families import FAMILIES
from tests.catalog.lora.make_module_names import OUT, tables

pytestmark = pytest.mark.torch


def test_the_table_is_that_of_the_networks():
    assert json.loads(OUT.read_text(encoding="utf-8")) == tables(), "run python -m tests.catalog.lora.make_module_names"


def told(modules: dict[str, tuple[int, int]], *, down="lora_A.weight", up="lora_B.weight", metadata=None) -> tuple:
    sizes = {}
    for name, (rows, columns) in modules.items():
        sizes |= {f"{name}.{down}": (4, columns), f"{name}.{up}": (rows, 4)}
    outline = outline_of(tuple(sizes), tuple(sizes.values()))
    return families_of(outline.widths, metadata or {}, FAMILIES, texts=outline.texts)[:2]


ALONE = {  # a few modules without a word of metadata -> the one family that has them in this size
    "qwen_image": [
        {"transformer_blocks.41.attn.to_q": (3072, 3072)},
        {"transformer_blocks.3.img_mod.1": (18432, 3072)},
        {"lora_unet_transformer_blocks_2_txt_mlp_net_2": (3072, 12288)},
        {"txt_in": (3072, 3584)},
        {"text_encoder.model.layers.3.self_attn.q_proj": (3584, 3584)},
    ],
    "flux": [
        {"lora_unet_double_blocks_3_img_mod_lin": (18432, 3072)},
        {"double_blocks.0.txt_attn.qkv": (9216, 3072), "double_blocks.0.txt_mlp.0": (12288, 3072)},
        {"single_transformer_blocks.30.norm.linear": (9216, 3072)},
        {"transformer.context_embedder": (3072, 4096)},
        {"lora_unet_single_blocks_20_modulation_lin": (9216, 3072)},
    ],
    "flux2": [
        {"transformer_blocks.2.attn.to_q": (6144, 6144)},
        {"diffusion_model.single_stream_modulation.lin": (18432, 6144)},
        {"single_blocks.40.linear1": (55296, 6144)},
        {"context_embedder": (3072, 7680)},
    ],
    "z_image": [
        {"noise_refiner.1.attention.to_k": (3840, 3840)},
        {"layers.7.attention.qkv": (11520, 3840)},
        {"cap_embedder.1": (3840, 2560)},
    ],
    "wan": [
        {"blocks.11.ffn.0": (13824, 5120)},
        {"blocks.3.attn2.add_k_proj": (5120, 5120)},
        {"condition_embedder.time_proj": (30720, 5120)},
        {"text_embedding.0": (1536, 4096)},
    ],
    "sd3": [
        {"joint_blocks.7.x_block.mlp.fc1": (6144, 1536)},
        {"transformer_blocks.5.ff.net.0.proj": (9728, 2432)},
        {"transformer_blocks.3.norm1_context.linear": (9216, 1536)},
    ],
    "sd15": [
        {"lora_unet_up_blocks_3_attentions_2_transformer_blocks_0_attn2_to_v": (320, 768)},
        {"lora_te_text_model_encoder_layers_3_mlp_fc1": (3072, 768)},
    ],
    "sdxl": [
        {"lora_unet_down_blocks_2_attentions_1_transformer_blocks_9_ff_net_0_proj": (10240, 1280)},
        {"lora_unet_input_blocks_8_1_transformer_blocks_4_attn1_to_q": (1280, 1280)},
        {"unet.add_embedding.linear_1": (1280, 2816)},
    ],
}


@pytest.mark.parametrize(
    ("family", "number"), [(name, at) for name, files in ALONE.items() for at in range(len(files))]
)
def test_a_few_modules_are_enough_where_one_family_has_them(family: str, number: int):
    file = ALONE[family][number]
    assert told(file) == (family, (family,))
    kohya = told(file, down="lora_down.weight", up="lora_up.weight")
    assert kohya == (family, (family,))


@pytest.mark.parametrize(
    ("file", "possible"),
    [
        ({"transformer_blocks.3.attn.to_q": (3072, 3072)}, {"qwen_image", "flux", "flux2"}),
        ({"lora_te1_text_model_encoder_layers_3_mlp_fc1": (3072, 768)}, {"sdxl", "sd3", "flux"}),
        ({"lora_te2_text_model_encoder_layers_3_mlp_fc1": (5120, 1280)}, {"sdxl", "sd3"}),
        ({"lora_te3_encoder_block_3_layer_0_SelfAttention_q": (4096, 4096)}, {"flux", "sd3"}),
        ({"lora_unet_mid_block_attentions_0_proj_in": (1280, 1280)}, {"sd15", "sdxl"}),
    ],
)
def test_what_several_have_is_said_with_all_their_names(file: dict, possible: set[str]):
    family, found = told(file)
    assert family == "" and set(found) == possible


@pytest.mark.parametrize(
    "file",
    [
        {"layers.3.attention.qkv": (6912, 2304)},  # Lumina 2
        {"double_blocks.0.img_attn_qkv": (9216, 3072), "double_blocks.0.img_mod.linear": (18432, 3072)},  # HunyuanVideo
        {"transformer_blocks.0.attn1.to_q": (1152, 1152)},  # PixArt
        {"model.layers.0.mlp.unknown": (10, 10)},
    ],
)
def test_strangers_stay_strangers(file: dict):
    assert told(file)[0] == ""
