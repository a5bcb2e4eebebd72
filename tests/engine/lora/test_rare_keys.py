"""Rarer spellings, against arithmetic in numpy: adapter names, scalars, whole parameters by their own name, PEFT's pickles."""

from __future__ import annotations

import json

import numpy
import pytest
import torch

from backend.engine.lora import adapters
from backend.schema.messages import Trouble
from tests.engine.lora.test_algorithms import FLUX, QWEN, K, Q, check, draw, numbers, random
from tests.lora_models import shared

__all__ = ["random"]  # the fixture
pytestmark = pytest.mark.torch
NORM = "double_blocks.0.img_attn.norm.query_norm"


@pytest.mark.parametrize("adapter", ["default_0", "my-style", "style v1.5"])
def test_adapter_names_may_be_anything(random, adapter):
    down, up = draw(random, 3, 48), draw(random, 48, 3)
    file = {f"{Q}.lora_A.{adapter}.weight": down, f"{Q}.lora_B.{adapter}.weight": up}
    check(QWEN, file, {f"{Q}.weight": numbers(up) @ numbers(down)}, applied=1)


def test_a_wrapper_around_a_block_is_no_part_of_its_name(random):
    down, up = draw(random, 3, 48), draw(random, 48, 3)
    inside = Q.replace(".attn", "._orig_mod.attn")
    file = {f"{inside}.lora_A.weight": down, f"{inside}.lora_B.weight": up}
    check(QWEN, file, {f"{Q}.weight": numbers(up) @ numbers(down)}, applied=1)
    file |= {f"{Q}.lora_A.weight": down * 2, f"{Q}.lora_B.weight": up}
    with pytest.raises(Trouble, match="twice and differently"):
        adapters.load(shared(QWEN), file)


def test_adapter_names_on_loha_and_lokr(random):
    halves = {"w1_a": (48, 2), "w1_b": (2, 48), "w2_a": (48, 2), "w2_b": (2, 48)}
    loha = {name: draw(random, *shape) for name, shape in halves.items()}
    left, right = draw(random, 6, 6), draw(random, 8, 8)
    file = {f"base_model.model.{Q}.hada_{name}.default": tensor for name, tensor in loha.items()}
    file |= {f"base_model.model.{K}.lokr_w1.default": left, f"base_model.model.{K}.lokr_w2.default": right}
    a, b, c, d = map(numbers, loha.values())
    expected = {f"{Q}.weight": (a @ b) * (c @ d), f"{K}.weight": numpy.kron(numbers(left), numbers(right))}
    check(QWEN, file, expected, applied=2)


def test_a_learnt_scalar(random):
    down, up, stem = draw(random, 4, 48), draw(random, 48, 4), "lycoris_" + Q.replace(".", "_")
    file = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
    file |= {f"{stem}.alpha": torch.tensor(2.0), f"{stem}.scalar": torch.tensor(0.25)}
    check(QWEN, file, {f"{Q}.weight": 0.125 * numbers(up) @ numbers(down)}, applied=1)


def test_the_alpha_of_a_processor(random):
    down, up, stem = draw(random, 4, 48), draw(random, 48, 4), "transformer_blocks.0.attn.processor.to_q_lora"
    file = {f"{stem}.down.weight": down, f"{stem}.up.weight": up, f"{stem}.alpha": torch.tensor(2.0)}
    check(QWEN, file, {f"{Q}.weight": 0.5 * numbers(up) @ numbers(down)}, applied=1)


def test_a_shape_that_is_the_models_own_is_no_obstacle(random):
    down, up = draw(random, 2, 48), draw(random, 48, 2)
    file = {f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up, f"{Q}.reshape_weight": torch.tensor([48, 48])}
    check(QWEN, file, {f"{Q}.weight": numbers(up) @ numbers(down)})


@pytest.mark.parametrize("stem", [f"diffusion_model.{NORM}.scale", f"lora_unet_{NORM.replace('.', '_')}_scale", NORM])
def test_a_parameter_by_its_own_name(random, stem):
    change = draw(random, 16)
    check(FLUX, {f"{stem}.diff": change}, {"transformer_blocks.0.attn.norm_q.weight": numbers(change)})


def test_replaced_weights_of_fused_and_of_swapped_modules(random):
    qkv, scale, last = draw(random, 96, 32), draw(random, 16), draw(random, 64, 32)
    file = {
        "diffusion_model.double_blocks.0.img_attn.qkv.set_weight": qkv,
        f"diffusion_model.{NORM}.scale.set_weight": scale,
        "diffusion_model.final_layer.adaLN_modulation.1.set_weight": last,
    }
    wanted = {
        f"transformer_blocks.0.attn.to_{name}.weight": numbers(part)
        for name, part in zip("qkv", qkv.split(32), strict=True)
    }
    wanted["transformer_blocks.0.attn.norm_q.weight"] = numbers(scale)
    wanted["norm_out.linear.weight"] = numpy.concatenate([numbers(last)[32:], numbers(last)[:32]])
    check(FLUX, file, {name: new - numbers(shared(FLUX).get_parameter(name)) for name, new in wanted.items()})


def test_the_configuration_beside_a_pickle_of_peft(random, tmp_path):
    down, up = draw(random, 4, 48), draw(random, 48, 4)
    stem = f"base_model.model.{Q}"
    torch.save({f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    for source in (tmp_path / "adapter_model.bin", tmp_path):
        check(QWEN, source, {f"{Q}.weight": 2 * numbers(up) @ numbers(down)})


def test_a_file_for_both_transformers_of_wan(random):
    module = "blocks.0.attn1.to_q"
    (a, b), (c, d) = [(draw(random, 2, 32), draw(random, 32, 2)) for _ in range(2)]
    first = {f"transformer.{module}.lora_A.weight": a, f"transformer.{module}.lora_B.weight": b}
    second = {f"transformer_2.{module}.lora_A.weight": c, f"transformer_2.{module}.lora_B.weight": d}
    receipt = check("wan", first | second, {f"{module}.weight": numbers(b) @ numbers(a)}, applied=1)
    assert receipt.unused == {f"transformer_2.{module}": "belongs to the second transformer"}
    check("wan", second, {f"{module}.weight": numbers(d) @ numbers(c)}, applied=1)
