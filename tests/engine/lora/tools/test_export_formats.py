"""Every family's LoRAs through every layout and back: what they change is compared with arithmetic that shares nothing with the tools."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from backend.engine.lora import adapters
from backend.engine.lora.tools.commands import run_tool
from backend.schema.messages import Trouble
from tests.lora_models import assert_changed_by, same, saved, shared, snapshot

pytestmark = pytest.mark.torch
MODELS = {  # model -> (family, whether a base is named, every how manyeth layer is touched)
    "tiny_qwen_image": ("qwen_image", False, 3),
    "tiny_flux": ("flux", False, 1),
    "flux2": ("flux2", False, 2),
    "z_image": ("z_image", False, 2),
    "wan_i2v": ("wan", False, 1),
    "sd3": ("sd3", True, 1),
    "sd15": ("sd15", False, 11),
    "sdxl": ("sdxl", False, 15),
    "tiny_unet": ("sd15", True, 3),
}
NAMED = {  # what files of a layout hold, so that other programs find it: (layout, model) -> part of a name
    ("comfyui", "tiny_flux"): "diffusion_model.single_blocks.0.linear1.",
    ("kohya", "tiny_flux"): "lora_unet_double_blocks_1_img_attn_qkv.",
    ("diffusers", "tiny_flux"): "transformer.single_transformer_blocks.0.attn.to_q.lora_A",
    ("comfyui", "z_image"): "diffusion_model.layers.0.attention.qkv.",
    ("comfyui", "wan_i2v"): "diffusion_model.blocks.0.cross_attn.k_img.",
    ("kohya", "sd3"): "lora_unet_joint_blocks_1_context_block_adaLN_modulation_1.",
    ("comfyui", "sd15"): "diffusion_model.input_blocks.",
    ("kohya", "sd15"): "lora_unet_down_blocks_",
    ("kohya", "sdxl"): "lora_unet_input_blocks_",
    ("diffusers", "sdxl"): "unet.down_blocks.",
}


def made(model: nn.Module, every: int) -> tuple[dict, dict]:
    """(a file, what it changes) with factors for the linear and convolution layers of `model`."""
    random, file, expected = torch.Generator().manual_seed(0), {}, {}
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    for number, (name, layer) in enumerate(layers[::every]):
        rank, shape = 1 + number % 3, layer.weight.shape
        a = torch.randn(rank, *shape[1:], generator=random) * 0.2
        b = torch.randn(shape[0], rank, generator=random) * 0.2
        file |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b.reshape(*b.shape, *[1] * (a.ndim - 2))}
        file[f"{name}.alpha"] = torch.tensor(1.5)
        expected[f"{name}.weight"] = (1.5 / rank * b.double() @ a.double().flatten(1)).view(shape)
    return file, expected


def convert(source, out, layout: str, family: str, base) -> dict:
    values = {"path": str(source), "out": str(out), "layout": layout, "family": family}
    return run_tool({"tool": "convert", **values, **({"base": str(base)} if base else {})})


def check(model: nn.Module, path, expected: dict) -> None:
    before = snapshot(model)
    adapters.load(model, path, hot=False)
    try:
        assert_changed_by(model, before, expected, 2e-5)
    finally:
        adapters.clear(model)
    assert same(model, before)


@pytest.mark.parametrize("name", MODELS)
def test_from_every_layout_to_every_other(name, tmp_path):
    family, with_base, every = MODELS[name]
    model = shared(name)
    base = saved(name, tmp_path / "base") if with_base else None
    file, expected = made(model, every)
    save_file(file, tmp_path / "start.safetensors")
    source = tmp_path / "start.safetensors"
    for step, layout in enumerate(("kohya", "comfyui", "diffusers", "comfyui", "kohya", "diffusers", "kohya")):
        out = tmp_path / f"{step}.safetensors"
        assert convert(source, out, layout, family, base)["unused"] == {}
        wanted = NAMED.get((layout, name))
        assert wanted is None or any(key.startswith(wanted) for key in load_file(out)), list(load_file(out))[:3]
        if step in (0, 1, 2, 6):
            check(model, out, expected)
        source = out


def test_parts_of_a_fused_projection_become_one(tmp_path):
    """FLUX.2's q, k and mlp apart, as some trainers name them: one matrix with v's rows zero."""
    model, random, stem = shared("flux2"), torch.Generator().manual_seed(0), "single_transformer_blocks.0."
    file, change = {}, torch.zeros(288, 32, dtype=torch.float64)
    for part, start, rows in (("attn.to_q", 0, 32), ("attn.to_k", 32, 32), ("proj_mlp", 96, 192)):
        a, b = torch.randn(2, 32, generator=random), torch.randn(rows, 2, generator=random)
        file |= {f"{stem}{part}.lora_A.weight": a, f"{stem}{part}.lora_B.weight": b}
        change[start : start + rows] = b.double() @ a.double()
    save_file(file, tmp_path / "a.safetensors")
    for layout in ("comfyui", "diffusers", "kohya"):
        convert(tmp_path / "a.safetensors", tmp_path / f"{layout}.safetensors", layout, "flux2", None)
        check(model, tmp_path / f"{layout}.safetensors", {f"{stem}attn.to_qkv_mlp_proj.weight": change})


def test_tables_are_carried_or_refused(tmp_path):
    model, random = shared("wan"), torch.Generator().manual_seed(0)
    block, head, norm = (torch.randn(shape, generator=random) for shape in ((1, 6, 32), (1, 2, 32), (32,)))
    file = {"diffusion_model.blocks.1.diff_m": block, "diffusion_model.head.modulation.diff": head}
    file["diffusion_model.blocks.0.norm3.diff"] = norm
    save_file(file, tmp_path / "a.safetensors")
    expected = {"blocks.1.scale_shift_table": block, "scale_shift_table": head, "blocks.0.norm2.weight": norm}
    check(model, tmp_path / "a.safetensors", expected)
    for layout in ("comfyui", "kohya"):
        assert (
            convert(tmp_path / "a.safetensors", tmp_path / f"{layout}.safetensors", layout, "wan", None)["unused"] == {}
        )
        check(model, tmp_path / f"{layout}.safetensors", expected)
    with pytest.raises(Trouble, match="no form"):
        convert(tmp_path / "a.safetensors", tmp_path / "d.safetensors", "diffusers", "wan", None)


HALVES = {  # kohya's name -> (diffusers', ComfyUI's)
    "lora_te1_text_model_encoder_layers_3_self_attn_q_proj": (
        "text_encoder.text_model.encoder.layers.3.self_attn.q_proj",
        "text_encoders.clip_l.transformer.text_model.encoder.layers.3.self_attn.q_proj",
    ),
    "lora_te2_text_model_encoder_layers_11_mlp_fc2": (
        "text_encoder_2.text_model.encoder.layers.11.mlp.fc2",
        "text_encoders.clip_g.transformer.text_model.encoder.layers.11.mlp.fc2",
    ),
    "lora_te3_encoder_block_2_layer_1_DenseReluDense_wi_0": (
        "text_encoder_3.encoder.block.2.layer.1.DenseReluDense.wi_0",
        "text_encoders.t5xxl.transformer.encoder.block.2.layer.1.DenseReluDense.wi_0",
    ),
}


def test_halves_for_the_text_encoders_are_carried(tmp_path):
    random = torch.Generator().manual_seed(0)
    unet = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
    file, products = {}, {}
    for stem in (unet, *HALVES):
        a, b = torch.randn(2, 8, generator=random), torch.randn(16, 2, generator=random)
        file |= {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b, f"{stem}.alpha": torch.tensor(1.0)}
        products[stem] = 0.5 * b @ a
    save_file(file, tmp_path / "start.safetensors")
    source = tmp_path / "start.safetensors"
    for place, layout in ((0, "diffusers"), (1, "comfyui"), (None, "kohya")):
        out = tmp_path / f"{layout}.safetensors"
        answer = convert(source, out, layout, "sdxl", None)
        assert (answer["modules"], answer["unused"]) == (4, {})
        written = load_file(out)
        for stem, others in HALVES.items():
            name = stem if place is None else others[place]
            down, up = ("lora_down", "lora_up") if layout == "kohya" else ("lora_A", "lora_B")
            scale = written.get(f"{name}.alpha", torch.tensor(2.0)) / 2
            product = scale * written[f"{name}.{up}.weight"] @ written[f"{name}.{down}.weight"]
            assert torch.allclose(product, products[stem], atol=1e-6), (layout, stem)
        source = out
