"""Other programs' module names on every family: native and fused ones, dotted and flattened, with rows cut and halves swapped.

The tables here are written out by hand, apart from the families' own: (their name, [our modules in the order of the rows], swapped?).
"""

from __future__ import annotations

import numpy
import pytest
import torch
from safetensors.torch import save_file

from backend.engine.lora import adapters
from tests.lora_models import assert_acts_as, assert_changed_by, same, shared, snapshot

pytestmark = pytest.mark.torch

QKV = ["attn.to_q", "attn.to_k", "attn.to_v"]
ADDED = ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"]


def of(block: str, *names: str) -> list[str]:
    return [block + name for name in names]


T1, S1 = "transformer_blocks.1.", "single_transformer_blocks.1."
FLUX = [
    ("double_blocks.1.img_attn.qkv", of(T1, *QKV)),
    ("double_blocks.1.txt_attn.qkv", of(T1, *ADDED)),
    ("double_blocks.1.img_attn.proj", of(T1, "attn.to_out.0")),
    ("double_blocks.1.txt_attn.proj", of(T1, "attn.to_add_out")),
    ("double_blocks.1.img_mlp.0", of(T1, "ff.net.0.proj")),
    ("double_blocks.1.img_mlp.2", of(T1, "ff.net.2")),
    ("double_blocks.1.txt_mlp.0", of(T1, "ff_context.net.0.proj")),
    ("double_blocks.1.txt_mlp.2", of(T1, "ff_context.net.2")),
    ("double_blocks.1.img_mod.lin", of(T1, "norm1.linear")),
    ("double_blocks.1.txt_mod.lin", of(T1, "norm1_context.linear")),
    ("single_blocks.1.linear1", of(S1, *QKV, "proj_mlp")),
    ("single_blocks.1.linear2", of(S1, "proj_out")),
    ("single_blocks.1.modulation.lin", of(S1, "norm.linear")),
    ("img_in", ["x_embedder"]),
    ("txt_in", ["context_embedder"]),
    ("time_in.in_layer", ["time_text_embed.timestep_embedder.linear_1"]),
    ("time_in.out_layer", ["time_text_embed.timestep_embedder.linear_2"]),
    ("vector_in.in_layer", ["time_text_embed.text_embedder.linear_1"]),
    ("vector_in.out_layer", ["time_text_embed.text_embedder.linear_2"]),
    ("guidance_in.in_layer", ["time_text_embed.guidance_embedder.linear_1"]),
    ("guidance_in.out_layer", ["time_text_embed.guidance_embedder.linear_2"]),
    ("final_layer.linear", ["proj_out"]),
    ("final_layer.adaLN_modulation.1", ["norm_out.linear"], True),
]
FLUX_DIFFSYNTH = [
    ("blocks.0.attn.a_to_qkv", of("transformer_blocks.0.", *QKV)),
    ("blocks.0.attn.b_to_qkv", of("transformer_blocks.0.", *ADDED)),
    ("blocks.0.attn.a_to_out", ["transformer_blocks.0.attn.to_out.0"]),
    ("blocks.0.attn.b_to_out", ["transformer_blocks.0.attn.to_add_out"]),
    ("blocks.0.ff_a.0", ["transformer_blocks.0.ff.net.0.proj"]),
    ("blocks.0.ff_a.2", ["transformer_blocks.0.ff.net.2"]),
    ("blocks.0.ff_b.0", ["transformer_blocks.0.ff_context.net.0.proj"]),
    ("blocks.0.ff_b.2", ["transformer_blocks.0.ff_context.net.2"]),
    ("blocks.0.norm1_a.linear", ["transformer_blocks.0.norm1.linear"]),
    ("blocks.0.norm1_b.linear", ["transformer_blocks.0.norm1_context.linear"]),
    ("single_blocks.0.to_qkv_mlp", of("single_transformer_blocks.0.", *QKV, "proj_mlp")),
    ("single_blocks.0.proj_out", ["single_transformer_blocks.0.proj_out"]),
    ("single_blocks.0.norm.linear", ["single_transformer_blocks.0.norm.linear"]),
]
FLUX_ONETRAINER = [
    *((f"double_blocks.0.img_attn.qkv.{place}", [f"transformer_blocks.0.{name}"]) for place, name in enumerate(QKV)),
    *((f"double_blocks.0.txt_attn.qkv.{place}", [f"transformer_blocks.0.{name}"]) for place, name in enumerate(ADDED)),
    *(
        (f"single_blocks.0.linear1.{place}", [f"single_transformer_blocks.0.{name}"])
        for place, name in enumerate((*QKV, "proj_mlp"))
    ),
]
FLUX2 = [
    ("double_blocks.1.img_attn.qkv", of(T1, *QKV)),
    ("double_blocks.1.txt_attn.qkv", of(T1, *ADDED)),
    ("double_blocks.1.img_attn.proj", of(T1, "attn.to_out.0")),
    ("double_blocks.1.txt_attn.proj", of(T1, "attn.to_add_out")),
    ("double_blocks.1.img_mlp.0", of(T1, "ff.linear_in")),
    ("double_blocks.1.img_mlp.2", of(T1, "ff.linear_out")),
    ("double_blocks.1.txt_mlp.0", of(T1, "ff_context.linear_in")),
    ("double_blocks.1.txt_mlp.2", of(T1, "ff_context.linear_out")),
    ("single_blocks.1.linear1", of(S1, "attn.to_qkv_mlp_proj")),
    ("single_blocks.1.linear2", of(S1, "attn.to_out")),
    ("double_stream_modulation_img.lin", ["double_stream_modulation_img.linear"]),
    ("double_stream_modulation_txt.lin", ["double_stream_modulation_txt.linear"]),
    ("single_stream_modulation.lin", ["single_stream_modulation.linear"]),
    ("time_in.in_layer", ["time_guidance_embed.timestep_embedder.linear_1"]),
    ("time_in.out_layer", ["time_guidance_embed.timestep_embedder.linear_2"]),
    ("guidance_in.in_layer", ["time_guidance_embed.guidance_embedder.linear_1"]),
    ("guidance_in.out_layer", ["time_guidance_embed.guidance_embedder.linear_2"]),
    ("img_in", ["x_embedder"]),
    ("txt_in", ["context_embedder"]),
    ("final_layer.linear", ["proj_out"]),
    ("final_layer.adaLN_modulation.1", ["norm_out.linear"], True),
]
Z_IMAGE = [
    ("layers.1.attention.qkv", of("layers.1.attention.", "to_q", "to_k", "to_v")),
    ("layers.1.attention.out", ["layers.1.attention.to_out.0"]),
    ("layers.0.attention_qkv", of("layers.0.attention.", "to_q", "to_k", "to_v")),
    ("noise_refiner.0.attention.qkv", of("noise_refiner.0.attention.", "to_q", "to_k", "to_v")),
    ("noise_refiner.0.attention.out", ["noise_refiner.0.attention.to_out.0"]),
    ("context_refiner.0.attention.qkv", of("context_refiner.0.attention.", "to_q", "to_k", "to_v")),
    ("context_refiner.0.attention.out", ["context_refiner.0.attention.to_out.0"]),
    *((f"layers.0.feed_forward.w{n}", [f"layers.0.feed_forward.w{n}"]) for n in (1, 2, 3)),
    ("noise_refiner.0.feed_forward.w2", ["noise_refiner.0.feed_forward.w2"]),
    ("t_embedder.mlp.0", ["t_embedder.mlp.0"]),
    ("layers.0.adaLN_modulation.0", ["layers.0.adaLN_modulation.0"]),
    ("t_embedder.mlp.2", ["t_embedder.mlp.2"]),
    ("cap_embedder.1", ["cap_embedder.1"]),
    ("x_embedder", ["all_x_embedder.2-1"]),
    ("final_layer.linear", ["all_final_layer.2-1.linear"]),
    ("final_layer.adaLN_modulation.1", ["all_final_layer.2-1.adaLN_modulation.1"]),
]
WAN = [
    *(
        (f"blocks.1.{theirs}.{short}", [f"blocks.1.{ours}.{long}"])
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for short, long in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    ),
    ("blocks.1.ffn.0", ["blocks.1.ffn.net.0.proj"]),
    ("blocks.1.ffn.2", ["blocks.1.ffn.net.2"]),
    ("time_embedding.0", ["condition_embedder.time_embedder.linear_1"]),
    ("time_embedding.2", ["condition_embedder.time_embedder.linear_2"]),
    ("text_embedding.0", ["condition_embedder.text_embedder.linear_1"]),
    ("text_embedding.2", ["condition_embedder.text_embedder.linear_2"]),
    ("time_projection.1", ["condition_embedder.time_proj"]),
    ("head.head", ["proj_out"]),
]
WAN_I2V = [
    ("blocks.0.cross_attn.k_img", ["blocks.0.attn2.add_k_proj"]),
    ("blocks.0.cross_attn.v_img", ["blocks.0.attn2.add_v_proj"]),
    ("img_emb.proj.1", ["condition_embedder.image_embedder.ff.net.0.proj"]),
    ("img_emb.proj.3", ["condition_embedder.image_embedder.ff.net.2"]),
]
SD3 = [
    ("joint_blocks.0.x_block.attn.qkv", of("transformer_blocks.0.", *QKV)),
    ("joint_blocks.0.context_block.attn.qkv", of("transformer_blocks.0.", *ADDED)),
    ("joint_blocks.0.x_block.attn.proj", ["transformer_blocks.0.attn.to_out.0"]),
    ("joint_blocks.0.context_block.attn.proj", ["transformer_blocks.0.attn.to_add_out"]),
    ("joint_blocks.0.x_block.attn2.qkv", of("transformer_blocks.0.attn2.", "to_q", "to_k", "to_v")),
    ("joint_blocks.0.x_block.attn2.proj", ["transformer_blocks.0.attn2.to_out.0"]),
    ("joint_blocks.0.x_block.mlp.fc1", ["transformer_blocks.0.ff.net.0.proj"]),
    ("joint_blocks.0.x_block.mlp.fc2", ["transformer_blocks.0.ff.net.2"]),
    ("joint_blocks.0.context_block.mlp.fc1", ["transformer_blocks.0.ff_context.net.0.proj"]),
    ("joint_blocks.0.context_block.mlp.fc2", ["transformer_blocks.0.ff_context.net.2"]),
    ("joint_blocks.0.x_block.adaLN_modulation.1", ["transformer_blocks.0.norm1.linear"]),
    ("joint_blocks.0.context_block.adaLN_modulation.1", ["transformer_blocks.0.norm1_context.linear"]),
    ("joint_blocks.1.context_block.adaLN_modulation.1", ["transformer_blocks.1.norm1_context.linear"], True),
    ("t_embedder.mlp.0", ["time_text_embed.timestep_embedder.linear_1"]),
    ("t_embedder.mlp.2", ["time_text_embed.timestep_embedder.linear_2"]),
    ("y_embedder.mlp.0", ["time_text_embed.text_embedder.linear_1"]),
    ("y_embedder.mlp.2", ["time_text_embed.text_embedder.linear_2"]),
    ("x_embedder.proj", ["pos_embed.proj"]),
    ("context_embedder", ["context_embedder"]),
    ("final_layer.linear", ["proj_out"]),
    ("final_layer.adaLN_modulation.1", ["norm_out.linear"], True),
]
SD15 = [
    ("input_blocks.1.0.in_layers.2", ["down_blocks.0.resnets.0.conv1"]),
    (
        "input_blocks.2.1.transformer_blocks.0.attn2.to_k",
        ["down_blocks.0.attentions.1.transformer_blocks.0.attn2.to_k"],
    ),
    ("input_blocks.3.0.op", ["down_blocks.0.downsamplers.0.conv"]),
    ("input_blocks.4.0.skip_connection", ["down_blocks.1.resnets.0.conv_shortcut"]),
    ("input_blocks.4.0.emb_layers.1", ["down_blocks.1.resnets.0.time_emb_proj"]),
    ("input_blocks.8.1.proj_in", ["down_blocks.2.attentions.1.proj_in"]),
    ("middle_block.0.in_layers.2", ["mid_block.resnets.0.conv1"]),
    ("middle_block.1.transformer_blocks.0.ff.net.2", ["mid_block.attentions.0.transformer_blocks.0.ff.net.2"]),
    ("middle_block.2.out_layers.3", ["mid_block.resnets.1.conv2"]),
    ("output_blocks.0.0.in_layers.2", ["up_blocks.0.resnets.0.conv1"]),
    ("output_blocks.2.1.conv", ["up_blocks.0.upsamplers.0.conv"]),
    ("output_blocks.5.2.conv", ["up_blocks.1.upsamplers.0.conv"]),
    ("output_blocks.8.2.conv", ["up_blocks.2.upsamplers.0.conv"]),
    (
        "output_blocks.11.1.transformer_blocks.0.attn1.to_out.0",
        ["up_blocks.3.attentions.2.transformer_blocks.0.attn1.to_out.0"],
    ),
    ("time_embed.0", ["time_embedding.linear_1"]),
    ("time_embed.2", ["time_embedding.linear_2"]),
    ("input_blocks.0.0", ["conv_in"]),
    ("input_blocks.11.0.in_layers.2", ["down_blocks.3.resnets.1.conv1"]),
    ("out.2", ["conv_out"]),
]
SDXL = [
    (
        "input_blocks.4.1.transformer_blocks.1.attn1.to_q",
        ["down_blocks.1.attentions.0.transformer_blocks.1.attn1.to_q"],
    ),
    (
        "input_blocks.8.1.transformer_blocks.2.attn2.to_v",
        ["down_blocks.2.attentions.1.transformer_blocks.2.attn2.to_v"],
    ),
    (
        "middle_block.1.transformer_blocks.2.ff.net.0.proj",
        ["mid_block.attentions.0.transformer_blocks.2.ff.net.0.proj"],
    ),
    ("output_blocks.2.2.conv", ["up_blocks.0.upsamplers.0.conv"]),
    ("output_blocks.5.2.conv", ["up_blocks.1.upsamplers.0.conv"]),
    ("output_blocks.3.1.proj_out", ["up_blocks.1.attentions.0.proj_out"]),
    ("label_emb.0.0", ["add_embedding.linear_1"]),
    ("label_emb.0.2", ["add_embedding.linear_2"]),
    ("input_blocks.0.0", ["conv_in"]),
]
TABLES = {
    "flux": ("tiny_flux", FLUX),
    "flux, DiffSynth": ("tiny_flux", FLUX_DIFFSYNTH),
    "flux, split by OneTrainer": ("tiny_flux", FLUX_ONETRAINER),
    "flux2": ("flux2", FLUX2),
    "z_image": ("z_image", Z_IMAGE),
    "wan": ("wan", WAN),
    "wan, from pictures": ("wan_i2v", WAN_I2V),
    "sd3": ("sd3", SD3),
    "sd15": ("sd15", SD15),
    "sdxl": ("sdxl", SDXL),
}
STYLES = {
    "lora_unet_": (lambda name: "lora_unet_" + name.replace(".", "_"), "lora_down", "lora_up"),
    "diffusion_model.": (lambda name: "diffusion_model." + name, "lora_A", "lora_B"),
    "trailing": (lambda name: "lora_unet_" + name.replace(".", "_") + "_", "lora_down", "lora_up"),
    "none": (lambda name: name, "lora_A.default", "lora_B.default"),
}


def make_file(path, model, table, style):
    """Random factors for every row of `table` and, per parameter, the change that they make (numpy, float64)."""
    random = numpy.random.default_rng(3)
    spelt, down, up = STYLES[style]
    tensors, expected = {}, {}
    for number, (theirs, ours, *swap) in enumerate(table):
        shapes = [tuple(model.get_parameter(f"{name}.weight").shape) for name in ours]
        rows, rank, alpha = sum(shape[0] for shape in shapes), 2 + number % 3, 1.5
        a = random.standard_normal((rank, *shapes[0][1:])).astype(numpy.float32)
        b = random.standard_normal((rows, rank)).astype(numpy.float32)
        stem = spelt(theirs)
        tensors[f"{stem}.{down}.weight"] = torch.tensor(a)
        tensors[f"{stem}.{up}.weight"] = torch.tensor(b.reshape(rows, rank, *[1] * (a.ndim - 2)))
        tensors[f"{stem}.alpha"] = torch.tensor(alpha)
        product = (b.astype(float) @ a.reshape(rank, -1).astype(float) * (alpha / rank)).reshape(rows, *shapes[0][1:])
        if swap:
            product = numpy.concatenate([product[rows // 2 :], product[: rows // 2]])
        start = 0
        for name, shape in zip(ours, shapes, strict=True):
            expected[f"{name}.weight"] = torch.tensor(product[start : start + shape[0]].copy())
            start += shape[0]
    save_file(tensors, path)
    return expected


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", TABLES)
def test_native_names(name, style, tmp_path):
    model, table = shared(TABLES[name][0]), TABLES[name][1]
    before = snapshot(model)
    expected = make_file(tmp_path / "native.safetensors", model, table, style)
    receipt = adapters.load(model, tmp_path / "native.safetensors", hot=False)
    assert (receipt.layers_applied, receipt.unused) == (len(table), {})
    assert_changed_by(model, before, expected, 1e-5)
    adapters.clear(model)
    assert same(model, before)
    adapters.load(model, tmp_path / "native.safetensors", hot=True)
    assert_acts_as(model, expected, 1e-4)
    adapters.clear(model)


@pytest.mark.parametrize(
    "prefix",
    [
        "transformer.",
        "lora_transformer_",
        "base_model.model.transformer.",
        "transformer.base_model.model.",
        "lora_unet__",
        "lycoris_",
        "pipe.dit.",
        "module.",
        "Acme_video_lora_",
        "",
    ],
)
@pytest.mark.parametrize("name", ["tiny_flux", "z_image", "wan", "tiny_qwen_image"])
def test_own_names_under_every_prefix(name, prefix, tmp_path):
    model = shared(name)
    modules = [path for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    flat = prefix.endswith("_")
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for path in modules:
        out, inner = model.get_submodule(path).weight.shape
        stem = prefix + (path.replace(".", "_") if flat else path)
        tensors[f"{stem}.lora_down.weight"] = torch.randn(2, inner, generator=random)
        tensors[f"{stem}.lora_up.weight"] = torch.randn(out, 2, generator=random)
    receipt = adapters.load(model, tensors, hot=True)
    adapters.clear(model)
    assert receipt.layers_applied == len(modules) and not receipt.unused


NORMS = {  # model -> {their name: our parameter}, whole changes of what only norms and tables have
    "tiny_flux": {
        "double_blocks.0.img_attn.norm.query_norm": "transformer_blocks.0.attn.norm_q.weight",
        "double_blocks.0.img_attn.norm.key_norm.scale": "transformer_blocks.0.attn.norm_k.weight",
        "double_blocks.1.txt_attn.norm.query_norm.scale": "transformer_blocks.1.attn.norm_added_q.weight",
        "double_blocks.1.txt_attn.norm.key_norm": "transformer_blocks.1.attn.norm_added_k.weight",
        "single_blocks.0.norm.query_norm": "single_transformer_blocks.0.attn.norm_q.weight",
        "single_blocks.0.norm.key_norm.scale": "single_transformer_blocks.0.attn.norm_k.weight",
    },
    "flux2": {
        "double_blocks.0.img_attn.norm.query_norm": "transformer_blocks.0.attn.norm_q.weight",
        "double_blocks.0.txt_attn.norm.key_norm.scale": "transformer_blocks.0.attn.norm_added_k.weight",
        "single_blocks.0.norm.key_norm": "single_transformer_blocks.0.attn.norm_k.weight",
    },
    "sd3": {
        "joint_blocks.0.x_block.attn.ln_q": "transformer_blocks.0.attn.norm_q.weight",
        "joint_blocks.0.x_block.attn2.ln_k": "transformer_blocks.0.attn2.norm_k.weight",
        "joint_blocks.0.context_block.attn.ln_q": "transformer_blocks.0.attn.norm_added_q.weight",
        "joint_blocks.0.context_block.attn.ln_k": "transformer_blocks.0.attn.norm_added_k.weight",
    },
    "z_image": {
        "layers.1.attention.q_norm": "layers.1.attention.norm_q.weight",
        "noise_refiner.0.attention.k_norm": "noise_refiner.0.attention.norm_k.weight",
        "layers.0.attention_norm1": "layers.0.attention_norm1.weight",
        "cap_embedder.0": "cap_embedder.0.weight",
    },
    "wan_i2v": {
        "blocks.0.self_attn.norm_q": "blocks.0.attn1.norm_q.weight",
        "blocks.0.cross_attn.norm_k": "blocks.0.attn2.norm_k.weight",
        "blocks.0.cross_attn.norm_k_img": "blocks.0.attn2.norm_added_k.weight",
        "blocks.1.norm3": "blocks.1.norm2.weight",
        "img_emb.proj.0": "condition_embedder.image_embedder.norm1.weight",
        "img_emb.proj.4": "condition_embedder.image_embedder.norm2.weight",
        "blocks.0.modulation": "blocks.0.scale_shift_table",
        "head.modulation": "scale_shift_table",
    },
    "sd15": {
        "input_blocks.1.0.in_layers.0": "down_blocks.0.resnets.0.norm1.weight",
        "input_blocks.4.0.out_layers.0": "down_blocks.1.resnets.0.norm2.weight",
        "out.0": "conv_norm_out.weight",
        "middle_block.1.norm": "mid_block.attentions.0.norm.weight",
    },
}


@pytest.mark.parametrize("suffix", ["diff", "w_norm"])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_norms_and_tables(name, flat, suffix):
    model = shared(name)
    before, random, file, expected = snapshot(model), torch.Generator().manual_seed(0), {}, {}
    for theirs, ours in NORMS[name].items():
        stem = "lora_unet_" + theirs.replace(".", "_") if flat else "diffusion_model." + theirs
        file[f"{stem}.{suffix}"] = expected[ours] = torch.randn(before[ours].shape, generator=random)
    receipt = adapters.load(model, file, hot=False)
    assert (receipt.layers_applied, receipt.unused) == (len(file), {})
    assert_changed_by(model, before, expected)
    adapters.clear(model)
    adapters.load(model, file, hot=True)
    layers = {ours: tensor for ours, tensor in expected.items() if ours.endswith(".weight")}
    assert_acts_as(model, layers, 1e-4)
    adapters.clear(model)
    assert same(model, before)


def test_one_part_of_a_fused_projection(tmp_path):
    """FLUX.2 keeps q, k, v and mlp of its single blocks in one matrix; some trainers name a part of it."""
    model = shared("flux2")
    before, random = snapshot(model), torch.Generator().manual_seed(0)
    down, up = torch.randn(3, 32, generator=random), torch.randn(32, 3, generator=random)
    name = "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"
    for stem, start in (("transformer.single_blocks.0.linear1.1", 32), ("single_transformer_blocks.0.attn.to_v", 64)):
        adapters.load(model, {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}, hot=False)
        expected = torch.zeros(288, 32, dtype=torch.float64)
        expected[start : start + 32] = up.double() @ down.double()
        assert_changed_by(model, before, {name: expected})
        adapters.clear(model)
    assert same(model, before)


def test_wan_keys_of_another_version_are_named_and_skipped(tmp_path):
    model = shared("wan")
    pair = {"lora_down.weight": torch.randn(2, 32), "lora_up.weight": torch.randn(32, 2)}
    stems = [
        "diffusion_model.blocks.0.self_attn.q",
        "diffusion_model.blocks.0.cross_attn.k_img",
        "diffusion_model.img_emb.proj.1",
    ]
    file = {f"{stem}.{key}": tensor for stem in stems for key, tensor in pair.items()}
    file["diffusion_model.patch_embedding.weight"] = torch.zeros(32, 36, 1, 2, 2)
    receipt = adapters.load(model, file, hot=True)
    adapters.clear(model)
    assert receipt.layers_applied == 1 and receipt.layers_found == 3
    assert set(receipt.unused) == {*stems[1:], "diffusion_model.patch_embedding.weight"}


@pytest.mark.parametrize("hot", [False, True])
def test_norms_biases_and_modulations_of_wan(hot):
    model = shared("wan")
    before, random = snapshot(model), torch.Generator().manual_seed(0)
    deltas = {
        "blocks.0.norm2.weight": ("diffusion_model.blocks.0.norm3.diff", torch.randn(32, generator=random)),
        "blocks.0.norm2.bias": ("diffusion_model.blocks.0.norm3.diff_b", torch.randn(32, generator=random)),
        "blocks.0.attn1.norm_q.weight": (
            "diffusion_model.blocks.0.self_attn.norm_q.diff",
            torch.randn(32, generator=random),
        ),
        "blocks.0.attn1.to_q.bias": ("diffusion_model.blocks.0.self_attn.q.diff_b", torch.randn(32, generator=random)),
        "blocks.1.scale_shift_table": ("diffusion_model.blocks.1.diff_m", torch.randn(1, 6, 32, generator=random)),
    }
    receipt = adapters.load(model, dict(deltas.values()), hot=hot)
    try:
        assert receipt.layers_applied == 4 and not receipt.unused
        if hot:
            assert same(model, before)
            outputs = _run_wan(model)
        else:
            assert_changed_by(model, before, {name: delta for name, (_, delta) in deltas.items()})
    finally:
        adapters.clear(model)
    assert same(model, before)
    if hot:
        bare = _run_wan(model)
        adapters.load(model, dict(deltas.values()), hot=False)
        fused = _run_wan(model)
        adapters.clear(model)
        assert float((outputs - fused).abs().max()) < 1e-4 * float(fused.abs().max())
        assert float((bare - fused).abs().max()) > 1e-2 * float(fused.abs().max())


def _run_wan(model):
    torch.manual_seed(4)
    x, text = torch.randn(1, 4, 1, 8, 8), torch.randn(1, 6, 24)
    return model(x, torch.tensor([500.0]), text, return_dict=False)[0]
