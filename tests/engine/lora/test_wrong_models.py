"""What a LoRA may not be taken for: every family's files on every other family's model, quantized models, T5 under other numbers."""

from __future__ import annotations

import numpy
import pytest
import torch
from safetensors.torch import save_file

from backend.engine.lora import adapters as lora
from backend.schema.messages import Trouble
from tests.engine.lora.test_algorithms import QWEN, Q, check, draw, numbers, random
from tests.lora_models import assert_acts_as, assert_changed_by, same, shared, snapshot

__all__ = ["random"]  # the fixture
pytestmark = pytest.mark.torch

FILES = {  # module -> (rows, columns), as the models' published sizes have them
    "Qwen-Image": {"transformer_blocks.0.attn.to_q": (3072, 3072), "transformer_blocks.30.attn.to_k": (3072, 3072)},
    "FLUX.1": {"double_blocks.0.img_attn.qkv": (9216, 3072), "double_blocks.0.img_mlp.0": (12288, 3072)},
    "FLUX.2": {"double_blocks.0.img_attn.qkv": (9216, 3072), "single_blocks.5.linear1": (27648, 3072)},
    "Z-Image": {"layers.3.attention.qkv": (11520, 3840), "layers.3.feed_forward.w1": (10240, 3840)},
    "Wan": {"blocks.0.self_attn.q": (5120, 5120), "blocks.0.cross_attn.k": (5120, 5120)},
    "Stable Diffusion 3": {"joint_blocks.3.x_block.attn.qkv": (4608, 1536)},
    "SDXL": {"input_blocks.4.1.transformer_blocks.1.attn2.to_k": (640, 2048)},
    "Stable Diffusion 1.5": {"down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": (320, 768)},
}
MODELS = {
    "Qwen-Image": "tiny_qwen_image",
    "FLUX.1": "tiny_flux",
    "FLUX.2": "flux2",
    "Z-Image": "z_image",
    "Wan": "wan",
    "Stable Diffusion 3": "sd3",
    "SDXL": "sdxl",
    "Stable Diffusion 1.5": "sd15",
}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_the_family_is_named_and_nothing_changes(model, flat):
    module = shared(MODELS[model])
    before = snapshot(module)
    for family, modules in FILES.items():
        if family == model:
            continue
        file = {}
        for name, (rows, columns) in modules.items():
            stem = "lora_unet_" + name.replace(".", "_") if flat else "diffusion_model." + name
            file |= {f"{stem}.lora_down.weight": torch.ones(2, columns), f"{stem}.lora_up.weight": torch.ones(rows, 2)}
        with pytest.raises(Trouble, match=f"a LoRA for {family}; the model is {model}") as caught:
            lora.load(module, file)
        assert caught.value.kind in ("no_keys_match", "wrong_family")
    assert same(module, before)


def _pair(random, stem: str, size: int = 48) -> dict:
    return {f"{stem}.lora_A.weight": draw(random, 2, size), f"{stem}.lora_B.weight": draw(random, size, 2)}


def test_names_that_two_families_share_are_decided_by_metadata(random, tmp_path):
    """FLUX.1's first blocks are named as Qwen-Image's, and are as wide."""
    wide = torch.nn.Module()
    wide.transformer_blocks = torch.nn.ModuleList([torch.nn.Module()])
    wide.transformer_blocks[0].attn = torch.nn.Module()
    wide.transformer_blocks[0].attn.to_q = torch.nn.Linear(3072, 3072, device="meta")
    from backend.engine.loading.tensor_source import open_source
    from backend.engine.lora.read import read_lora
    from backend.families import FAMILIES, by_name

    path = tmp_path / "a.safetensors"

    def read(metadata):
        save_file(_pair(random, "transformer.transformer_blocks.0.attn.to_q", 3072), path, metadata)
        return read_lora(open_source(path), {"dit": wide}, by_name("qwen_image"), FAMILIES)

    assert any("FLUX.1" in note for note in read({}).notes)
    assert not read({"modelspec.architecture": "Qwen-Image/lora"}).notes
    with pytest.raises(Trouble, match=r"FLUX\.1.*Qwen-Image") as caught:
        read({"modelspec.architecture": "flux-1-dev/lora"})
    assert caught.value.kind == "wrong_family"


def test_branches_of_a_packed_model_are_no_lora():
    file = {f"{Q}.lora_down": torch.ones(48, 4), f"{Q}.lora_up": torch.ones(48, 4)}
    file |= {f"{Q}.qweight": torch.zeros(48, 24, dtype=torch.int8), f"{Q}.wscales": torch.ones(12, 48)}
    with pytest.raises(Trouble, match="quantized model") as caught:
        lora.load(shared(QWEN), file)
    assert caught.value.kind == "no_keys_match" and not lora.of(shared(QWEN)).loaded


def test_butterflies_are_called_by_their_name():
    for blocks, name in (((4, 12, 12), "uses OFT"), ((2, 4, 12, 12), "uses BOFT")):
        with pytest.raises(Trouble, match=name):
            lora.load(shared(QWEN), {f"oft_unet_{Q.replace('.', '_')}.oft_blocks": torch.ones(blocks)})


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("hot", [False, True])
def test_dora_of_one_part_of_a_fused_projection(random, axis, hot):
    """FLUX.2 keeps q, k, v and mlp in one matrix: a DoRA of k alone has its norms over k's rows, and moves no other row."""
    model, name = shared("flux2"), "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"
    before, a, b = snapshot(model), draw(random, 3, 32), draw(random, 32, 3)
    magnitude = draw(random, 32).abs() + 0.5
    file = {
        "single_transformer_blocks.0.attn.to_k.lora_A.weight": a,
        "single_transformer_blocks.0.attn.to_k.lora_B.weight": b,
    }
    file["single_transformer_blocks.0.attn.to_k.dora_scale"] = magnitude.reshape((32, 1) if axis == 0 else (1, 32))
    base = numbers(before[name])[32:64]
    whole = base + numbers(b) @ numbers(a)
    column = numbers(magnitude)[:, None] if axis == 0 else numbers(magnitude)[None]
    expected = numpy.zeros((288, 32))
    expected[32:64] = column * whole / numpy.linalg.norm(whole, axis=1 - axis, keepdims=True) - base
    lora.load(model, file, hot=hot, strength=0.7)
    try:
        change = {name: torch.tensor(0.7 * expected)}
        assert_acts_as(model, change, 1e-4) if hot else assert_changed_by(model, before, change, 2e-5)
    finally:
        lora.clear(model)
    assert same(model, before)


def test_alpha_patterns_by_the_files_own_names(random, tmp_path):
    import json

    down, up = draw(random, 4, 32), draw(random, 96, 4)
    stem = "transformer.double_blocks.0.img_attn.qkv"
    said = {"transformer.lora_alpha": 4, "transformer.alpha_pattern": {"img_attn.qkv": 12}}
    save_file(
        {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up},
        tmp_path / "a.safetensors",
        {"lora_adapter_metadata": json.dumps(said)},
    )
    change = 3.0 * numbers(up) @ numbers(down)
    names = [f"transformer_blocks.0.attn.to_{letter}.weight" for letter in "qkv"]
    check("tiny_flux", tmp_path / "a.safetensors", dict(zip(names, numpy.split(change, 3), strict=True)))


def test_whole_kronecker_factors_with_a_small_alpha_are_doubted(random, tmp_path):
    left, right = draw(random, 4, 4), draw(random, 12, 12)
    file = {f"{Q}.lokr_w1": left, f"{Q}.lokr_w2": right, f"{Q}.alpha": torch.tensor(1.0)}
    save_file(file, tmp_path / "a.safetensors", {"ss_network_dim": "32"})
    receipt = check(QWEN, tmp_path / "a.safetensors", {f"{Q}.weight": numpy.kron(numbers(left), numbers(right))})
    assert any("Kronecker" in note for note in receipt.notes)
    assert not any(
        "Kronecker" in note
        for note in check(QWEN, file, {f"{Q}.weight": numpy.kron(numbers(left), numbers(right))}).notes
    )


class Encoders(torch.nn.Module):
    """As much of T5 as names need."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Module()
        self.encoder.block = torch.nn.ModuleList([torch.nn.Module()])
        self.encoder.block[0].layer = torch.nn.ModuleList([torch.nn.Module()])
        self.encoder.block[0].layer[0].SelfAttention = torch.nn.Module()
        self.encoder.block[0].layer[0].SelfAttention.q = torch.nn.Linear(48, 48, bias=False)


@pytest.mark.parametrize("prefix", ["lora_te3_", "lora_te2_", "text_encoder_2.", "text_encoders.t5xxl.transformer."])
@pytest.mark.parametrize("part", ["text_encoder_2", "text_encoder_3"])
def test_trainers_do_not_agree_on_the_number_of_t5(random, prefix, part):
    encoder, module = Encoders(), "encoder.block.0.layer.0.SelfAttention.q"
    file = _pair(random, prefix + (module.replace(".", "_") if prefix.endswith("_") else module))
    adapters = lora.Adapters({"dit": shared(QWEN), part: encoder})
    before = encoder.state_dict()[f"{module}.weight"].clone()
    adapters.add(file, hot=False)
    a, b = file.values()
    change = encoder.state_dict()[f"{module}.weight"] - before
    assert torch.allclose(change, b @ a, atol=1e-5)
