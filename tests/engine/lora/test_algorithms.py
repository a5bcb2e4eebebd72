"""Every algorithm, alpha rule and spelling, against arithmetic in numpy that shares nothing with the code under test."""

from __future__ import annotations

import json
import math

import numpy
import pytest
import torch
from safetensors.torch import save_file

from backend.engine.lora import adapters
from backend.schema.messages import Trouble
from tests.lora_models import assert_acts_as, assert_changed_by, same, shared, snapshot

pytestmark = pytest.mark.torch
Q, K = "transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_k"
CONV, PROJECTION = "down_blocks.0.resnets.0.conv1", "down_blocks.1.attentions.0.proj_in"
QWEN, UNET, FLUX = "tiny_qwen_image", "tiny_unet", "tiny_flux"


@pytest.fixture
def random():
    return numpy.random.default_rng(5)


def draw(random, *shape, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor(random.standard_normal(shape) * 0.3).to(dtype)


def numbers(tensor: torch.Tensor) -> numpy.ndarray:
    return tensor.double().numpy()


def check(name, source, expected, *, tolerance=2e-5, applied=None, strength=1.0):
    """`source` changes the model as `expected` says, in the weights and beside them, and can be taken off again."""
    model = shared(name)
    before = snapshot(model)
    expected = {key: torch.tensor(numpy.asarray(value, dtype=float)) * strength for key, value in expected.items()}
    receipt = adapters.load(model, source, hot=False, strength=strength)
    try:
        assert_changed_by(model, before, expected, tolerance)
    finally:
        adapters.clear(model)
    assert same(model, before)
    adapters.load(model, source, hot=True, strength=strength)
    try:
        assert_acts_as(model, expected, 10 * tolerance)
        assert same(model, before)
    finally:
        adapters.clear(model)
    if applied is not None:
        assert receipt.layers_applied == applied
    return receipt


def rebuilt(core, a, b):
    """Tucker: core (m, n, kh, kw), a (m, out), b (n, in)."""
    return numpy.einsum("mnyx,mo,ni->oiyx", core, a, b)


def test_loha_convolution_flat_and_tucker(random):
    flat = {"hada_w1_a": (8, 2), "hada_w1_b": (2, 72), "hada_w2_a": (8, 2), "hada_w2_b": (2, 72)}
    factors = {key: draw(random, *shape) for key, shape in flat.items()}
    n = {key: numbers(tensor) for key, tensor in factors.items()}
    delta = 0.5 * (n["hada_w1_a"] @ n["hada_w1_b"]) * (n["hada_w2_a"] @ n["hada_w2_b"])
    file = {f"lora_unet_{CONV.replace('.', '_')}.{key}": tensor for key, tensor in factors.items()}
    file[f"lora_unet_{CONV.replace('.', '_')}.alpha"] = torch.tensor(1.0)
    check(UNET, file, {f"{CONV}.weight": delta.reshape(8, 8, 3, 3)})

    shapes = {"w1_a": (3, 8), "w1_b": (3, 8), "t1": (3, 3, 3, 3), "w2_a": (3, 8), "w2_b": (3, 8), "t2": (3, 3, 3, 3)}
    factors = {f"hada_{key}": draw(random, *shape) for key, shape in shapes.items()}
    n = {key: numbers(tensor) for key, tensor in factors.items()}
    one = rebuilt(n["hada_t1"], n["hada_w1_a"], n["hada_w1_b"])
    two = rebuilt(n["hada_t2"], n["hada_w2_a"], n["hada_w2_b"])
    check(UNET, {f"{CONV}.{key}": tensor for key, tensor in factors.items()}, {f"{CONV}.weight": one * two})


def test_locon_with_a_core(random):
    down, mid, up = draw(random, 3, 8, 1, 1), draw(random, 3, 3, 3, 3), draw(random, 8, 3, 1, 1)
    delta = 2.0 * numpy.einsum("om,mnyx,ni->oiyx", numbers(up)[:, :, 0, 0], numbers(mid), numbers(down)[:, :, 0, 0])
    stem = "lora_unet_" + CONV.replace(".", "_")
    file = {
        f"{stem}.lora_down.weight": down,
        f"{stem}.lora_mid.weight": mid,
        f"{stem}.lora_up.weight": up,
        f"{stem}.alpha": torch.tensor([6.0]),
    }
    check(UNET, file, {f"{CONV}.weight": delta})


@pytest.mark.parametrize("parts", ["reads_done", "right", "both", "none"])
def test_lokr(random, parts):
    o1, i1, o2, i2, rank, alpha = 4, 6, 12, 8, 2, 3.0
    left, right = draw(random, o1, i1), draw(random, o2, i2)
    file, scale = {f"diffusion_model.{Q}.alpha": torch.tensor(alpha)}, 1.0
    if parts in ("reads_done", "both"):
        a, b = draw(random, o1, rank), draw(random, rank, i1)
        file |= {f"diffusion_model.{Q}.lokr_w1_a": a, f"diffusion_model.{Q}.lokr_w1_b": b}
        left, scale = a.double() @ b.double(), alpha / rank
    else:
        file[f"diffusion_model.{Q}.lokr_w1"] = left
    if parts in ("right", "both"):
        a, b = draw(random, o2, rank), draw(random, rank, i2)
        file |= {f"diffusion_model.{Q}.lokr_w2_a": a, f"diffusion_model.{Q}.lokr_w2_b": b}
        right, scale = a.double() @ b.double(), alpha / rank
    else:
        file[f"diffusion_model.{Q}.lokr_w2"] = right
    check(QWEN, file, {f"{Q}.weight": scale * numpy.kron(numbers(left), numbers(right))})


@pytest.mark.parametrize("form", ["whole", "flat", "tucker"])
def test_lokr_convolution(random, form):
    stem, left, scale = f"lycoris_{CONV.replace('.', '_')}", draw(random, 2, 4), 1.0
    file = {f"{stem}.lokr_w1": left, f"{stem}.alpha": torch.tensor(1.0)}
    if form == "whole":
        right = draw(random, 4, 2, 3, 3)
        file[f"{stem}.lokr_w2"] = right
        right = numbers(right)
    elif form == "flat":
        a, b, scale = draw(random, 4, 3), draw(random, 3, 18), 1 / 3
        file |= {f"{stem}.lokr_w2_a": a, f"{stem}.lokr_w2_b": b}
        right = (numbers(a) @ numbers(b)).reshape(4, 2, 3, 3)
    else:
        core, a, b, scale = draw(random, 3, 3, 3, 3), draw(random, 3, 4), draw(random, 3, 2), 1 / 3
        file |= {f"{stem}.lokr_t2": core, f"{stem}.lokr_w2_a": a, f"{stem}.lokr_w2_b": b}
        right = rebuilt(numbers(core), numbers(a), numbers(b))
    delta = numpy.einsum("ab,cdyx->acbdyx", numbers(left), right).reshape(8, 8, 3, 3) * scale
    check(UNET, file, {f"{CONV}.weight": delta})


def dora(weight: numpy.ndarray, delta: numpy.ndarray, magnitude: numpy.ndarray, axis: int) -> numpy.ndarray:
    """m * (W + delta) / |W + delta| - W, a norm for every index of `axis`."""
    whole = weight + delta
    others = tuple(dim for dim in range(whole.ndim) if dim != axis)
    shape = [1] * whole.ndim
    shape[axis] = -1
    return magnitude.reshape(shape) * whole / numpy.sqrt((whole**2).sum(others, keepdims=True)) - weight


@pytest.mark.parametrize(
    ("suffix", "shape"),
    [
        ("dora_scale", (48, 1)),
        ("lora_magnitude_vector", (48,)),
        ("lora_magnitude_vector.weight", (48,)),
        ("lora_magnitude_vector.default.weight", (48,)),
        ("magnitude", (48,)),
    ],
)
def test_dora_spellings_by_row(random, suffix, shape):
    base = numbers(shared(QWEN).get_parameter(f"{Q}.weight"))
    a, b = draw(random, 3, 48), draw(random, 48, 3)
    magnitude = torch.tensor(numpy.linalg.norm(base, axis=1) * random.uniform(0.5, 1.5, 48)).float()
    file = {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b, f"{Q}.{suffix}": magnitude.reshape(shape)}
    expected = dora(base, numbers(b) @ numbers(a), numbers(magnitude), 0)
    check(QWEN, file, {f"{Q}.weight": expected})
    check(QWEN, file, {f"{Q}.weight": expected}, strength=0.4)


@pytest.mark.parametrize(
    ("suffix", "shape", "axis"),
    [("dora_scale", (8, 1, 1, 1), 0), ("dora_scale", (1, 8, 1, 1), 1), ("lora_magnitude_vector", (1, 8, 1, 1), 0)],
)
def test_dora_convolution(random, suffix, shape, axis):
    base = numbers(shared(UNET).get_parameter(f"{CONV}.weight"))
    a, b = draw(random, 2, 8, 3, 3), draw(random, 8, 2, 1, 1)
    magnitude = torch.tensor(random.uniform(0.5, 1.5, 8)).float()
    file = {
        f"unet.{CONV}.lora_A.weight": a,
        f"unet.{CONV}.lora_B.weight": b,
        f"unet.{CONV}.{suffix}": magnitude.reshape(shape),
    }
    delta = numpy.einsum("or,riyx->oiyx", numbers(b)[:, :, 0, 0], numbers(a))
    check(UNET, file, {f"{CONV}.weight": dora(base, delta, numbers(magnitude), axis)})


def test_dora_of_loha_and_lokr(random):
    base = numbers(shared(QWEN).get_parameter(f"{Q}.weight"))
    magnitude = torch.tensor(random.uniform(0.5, 1.5, 48)).float()
    halves = {"hada_w1_a": (48, 2), "hada_w1_b": (2, 48), "hada_w2_a": (48, 2), "hada_w2_b": (2, 48)}
    file = {f"{Q}.{key}": draw(random, *shape) for key, shape in halves.items()}
    n = {key.rpartition(".")[2]: numbers(tensor) for key, tensor in file.items()}
    delta = (n["hada_w1_a"] @ n["hada_w1_b"]) * (n["hada_w2_a"] @ n["hada_w2_b"])
    file[f"{Q}.dora_scale"] = magnitude.reshape(1, 48)
    check(QWEN, file, {f"{Q}.weight": dora(base, delta, numbers(magnitude), 1)})
    left, right = draw(random, 4, 4), draw(random, 12, 12)
    file = {f"{Q}.lokr_w1": left, f"{Q}.lokr_w2": right, f"{Q}.dora_scale": magnitude.reshape(48, 1)}
    delta = numpy.kron(numbers(left), numbers(right))
    check(QWEN, file, {f"{Q}.weight": dora(base, delta, numbers(magnitude), 0)})


@pytest.mark.parametrize("axis", [0, 1])
def test_dora_on_a_fused_projection(random, axis):
    """By rows it splits; by columns the norm runs over q, k and v together."""
    names = [f"transformer_blocks.0.attn.to_{letter}.weight" for letter in "qkv"]
    base = numpy.concatenate([numbers(shared(FLUX).get_parameter(name)) for name in names])
    a, b = draw(random, 4, 32), draw(random, 96, 4)
    magnitude = torch.tensor(random.uniform(0.5, 1.5, 96 if axis == 0 else 32)).float()
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    file = {
        f"{stem}.lora_down.weight": a,
        f"{stem}.lora_up.weight": b,
        f"{stem}.alpha": torch.tensor(2.0),
        f"{stem}.dora_scale": magnitude.reshape((96, 1) if axis == 0 else (1, 32)),
    }
    change = dora(base, 0.5 * numbers(b) @ numbers(a), numbers(magnitude), axis)
    check(FLUX, file, dict(zip(names, numpy.split(change, 3), strict=True)))


def pair(random, stem: str, rank=4, size=48, *, down="lora_A.weight", up="lora_B.weight", dtype=torch.float32):
    return {
        f"{stem}.{down}": draw(random, rank, size, dtype=dtype),
        f"{stem}.{up}": draw(random, size, rank, dtype=dtype),
    }


def product(file: dict, stem: str) -> numpy.ndarray:
    down, up = (next(t for key, t in file.items() if key.startswith(stem) and mark in key) for mark in ("down", "up"))
    return numbers(up) @ numbers(down)


@pytest.mark.parametrize(
    ("alpha", "scale"),
    [
        (torch.tensor(9999999999, dtype=torch.int64), 9999999999 / 4),
        (torch.tensor([2], dtype=torch.int64), 0.5),
        (torch.tensor([3.0], dtype=torch.bfloat16), 0.75),
        (torch.tensor(-8.0, dtype=torch.float16), -2.0),
        (torch.tensor(1e10, dtype=torch.float64), 2.5e9),
    ],
)
def test_alpha_tensors(random, alpha, scale):
    file = pair(random, f"lora_unet_{Q.replace('.', '_')}", down="lora_down.weight", up="lora_up.weight")
    expected = scale * product(file, "lora_unet")
    file[f"lora_unet_{Q.replace('.', '_')}.alpha"] = alpha
    check(QWEN, file, {f"{Q}.weight": expected}, tolerance=3e-5)


def test_alpha_of_zero_does_nothing_and_says_so(random):
    model, file = shared(QWEN), pair(random, Q)
    before = snapshot(model)
    receipt = adapters.load(model, {**file, f"{Q}.alpha": torch.tensor(0.0)}, hot=False)
    assert same(model, before) and any("alpha" in note for note in receipt.notes)
    adapters.clear(model)


def _metadata_file(tmp_path, random, metadata, *, prefix="transformer.", modules=(Q, K)):
    file = {}
    for module in modules:
        file |= pair(random, prefix + module, down="lora_down.weight", up="lora_up.weight")
    path = tmp_path / "said.safetensors"
    save_file(file, path, metadata=metadata)
    return path, {f"{module}.weight": product(file, prefix + module) for module in modules}


@pytest.mark.parametrize(
    ("said", "scales"),
    [
        ({"transformer.lora_alpha": 12, "transformer.r": 4}, (3.0, 3.0)),
        ({"transformer.lora_alpha": 12, "transformer.r": 64, "transformer.use_rslora": True}, (6.0, 6.0)),
        ({"transformer.lora_alpha": 4, "transformer.alpha_pattern": {"attn.to_q": 16}}, (4.0, 1.0)),
        (
            {"transformer.lora_alpha": 4, "transformer.alpha_pattern": {r"^transformer_blocks\.0\.attn\.to_q": 2}},
            (0.5, 1.0),
        ),
        ({"transformer.lora_alpha": 8, "text_encoder.lora_alpha": 100}, (2.0, 2.0)),
        ({"lora_alpha": 2}, (0.5, 0.5)),
    ],
)
def test_alpha_in_metadata(random, tmp_path, said, scales):
    path, products = _metadata_file(tmp_path, random, {"lora_adapter_metadata": json.dumps(said)})
    check(QWEN, path, {name: scale * value for (name, value), scale in zip(products.items(), scales, strict=True)})


def test_alpha_of_the_whole_file_and_of_a_folder(random, tmp_path):
    path, products = _metadata_file(tmp_path, random, {"lora_alpha": "8"})
    check(QWEN, path, {name: 2.0 * value for name, value in products.items()})
    path, products = _metadata_file(
        tmp_path, random, {"lora_adapter_metadata": "{broken", "ss_network_alpha": "Dynamic"}
    )
    check(QWEN, path, products)
    folder = tmp_path / "peft"
    folder.mkdir()
    path, products = _metadata_file(folder, random, {}, prefix="base_model.model.")
    path.rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8, "use_rslora": True}))
    check(QWEN, folder, {name: 4.0 * value for name, value in products.items()})


def test_a_tensor_is_nearer_evidence_than_metadata(random, tmp_path):
    said = json.dumps({"transformer.lora_alpha": 400})
    file = pair(random, f"transformer.{Q}", down="lora_down.weight", up="lora_up.weight")
    expected = 0.25 * product(file, "transformer.")
    save_file(
        {**file, f"transformer.{Q}.alpha": torch.tensor(1.0)},
        tmp_path / "a.safetensors",
        metadata={"lora_adapter_metadata": said},
    )
    check(QWEN, tmp_path / "a.safetensors", {f"{Q}.weight": expected})


def test_several_dialects_in_one_file(random):
    k, v, o = (f"transformer_blocks.0.attn.{name}" for name in ("to_k", "to_v", "to_out.0"))
    one = pair(random, f"lora_unet_{Q.replace('.', '_')}", down="lora_down.weight", up="lora_up.weight")
    two = pair(random, f"transformer.{k}", dtype=torch.bfloat16)
    three = pair(random, v, down="lora_A.default.weight", up="lora_B.default.weight", dtype=torch.float16)
    four = pair(random, f"base_model.model.{o}", down="lora.down.weight", up="lora.up.weight")
    files = {Q: one, k: two, v: three, o: four}
    expected = {}
    for module, file in files.items():
        down, up = file.values()
        expected[f"{module}.weight"] = numbers(up) @ numbers(down)
    both = {key: tensor for file in files.values() for key, tensor in file.items()}
    check(QWEN, both, expected, applied=4)


def test_one_module_described_twice(random):
    one = pair(random, Q, down="lora_A.first.weight", up="lora_B.first.weight")
    two = pair(random, Q, down="lora_A.second.weight", up="lora_B.second.weight", rank=2)
    three = pair(random, "lora_unet_" + Q.replace(".", "_"), down="lora_down.weight", up="lora_up.weight")
    for file, keys in (({**one, **two}, "first.*second"), ({**two, **three}, "lora_down|lora_A")):
        with pytest.raises(Trouble, match=f"twice and differently.*{keys}") as caught:
            adapters.load(shared(QWEN), file)
        assert caught.value.kind == "repeated" and not adapters.of(shared(QWEN)).loaded


def test_factors_of_four_dimensions_for_a_linear_layer(random):
    file = {f"{Q}.lora_down.weight": draw(random, 4, 48, 1, 1), f"{Q}.lora_up.weight": draw(random, 48, 4, 1, 1)}
    down, up = (numbers(tensor)[:, :, 0, 0] for tensor in file.values())
    check(QWEN, file, {f"{Q}.weight": up @ down})
    stem = "lora_unet_" + PROJECTION.replace(".", "_")
    file = {f"{stem}.lora_down.weight": draw(random, 4, 16), f"{stem}.lora_up.weight": draw(random, 16, 4)}
    down, up = (numbers(tensor) for tensor in file.values())
    check(UNET, file, {f"{PROJECTION}.weight": (up @ down)[:, :, None, None]})


def test_split_qkv_of_sd_scripts(random):
    """Three downs stacked, a block-diagonal up: the ordinary rule gives the right product."""
    downs, ups = [draw(random, 2, 32) for _ in range(3)], [draw(random, 32, 2) for _ in range(3)]
    stem = "lora_unet_double_blocks_1_img_attn_qkv"
    file = {
        f"{stem}.lora_down.weight": torch.cat(downs),
        f"{stem}.lora_up.weight": torch.block_diag(*ups),
        f"{stem}.alpha": torch.tensor(6.0),
    }
    expected = {
        f"transformer_blocks.1.attn.to_{letter}.weight": numbers(up) @ numbers(down)
        for letter, up, down in zip("qkv", ups, downs, strict=True)
    }
    check(FLUX, file, expected)


def test_processors(random):
    file = {}
    expected = {}
    for key, modules in {
        "double_blocks.0.processor.qkv_lora1": [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"],
        "double_blocks.0.processor.qkv_lora2": [f"transformer_blocks.0.attn.add_{x}_proj" for x in "qkv"],
        "double_blocks.0.processor.proj_lora1": ["transformer_blocks.0.attn.to_out.0"],
        "double_blocks.0.processor.proj_lora2": ["transformer_blocks.0.attn.to_add_out"],
        "single_blocks.1.processor.qkv_lora": [f"single_transformer_blocks.1.attn.to_{x}" for x in "qkv"],
    }.items():
        file[f"{key}.down.weight"], file[f"{key}.up.weight"] = draw(random, 2, 32), draw(random, 32 * len(modules), 2)
        change = numbers(file[f"{key}.up.weight"]) @ numbers(file[f"{key}.down.weight"])
        expected |= {
            f"{name}.weight": part for name, part in zip(modules, numpy.split(change, len(modules)), strict=True)
        }
    check(FLUX, file, expected, applied=5)
    block = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"
    file, expected = {}, {}
    for name, ours in (("to_q_lora", "to_q"), ("to_out_lora", "to_out.0")):
        down, up = draw(random, 2, 16), draw(random, 16, 2)
        file |= {f"unet.{block}.processor.{name}.down.weight": down, f"unet.{block}.processor.{name}.up.weight": up}
        expected[f"{block}.{ours}.weight"] = numbers(up) @ numbers(down)
    check(UNET, file, expected)


def test_bias_of_the_factors(random):
    bias = draw(random, 48)
    file = {**pair(random, Q), f"{Q}.lora_B.bias": bias, f"{Q}.alpha": torch.tensor(2.0)}
    down, up = numbers(file[f"{Q}.lora_A.weight"]), numbers(file[f"{Q}.lora_B.weight"])
    check(QWEN, file, {f"{Q}.weight": 0.5 * up @ down, f"{Q}.bias": 0.5 * numbers(bias)})


def test_a_replaced_weight(random):
    new = draw(random, 48, 48)
    base = numbers(shared(QWEN).get_parameter(f"{Q}.weight"))
    check(QWEN, {f"diffusion_model.{Q}.set_weight": new}, {f"{Q}.weight": numbers(new) - base})


def test_rank_of_one_and_of_more_than_the_layer(random):
    check(
        QWEN,
        (one := pair(random, Q, rank=1)),
        {f"{Q}.weight": numpy.outer(*map(numpy.ravel, map(numbers, reversed(one.values()))))},
    )
    down, up = (many := pair(random, Q, rank=200)).values()
    check(QWEN, many, {f"{Q}.weight": numbers(up) @ numbers(down)})
    assert math.isfinite(float(down.sum()))


def test_alpha_in_our_own_metadata_is_for_people(random, tmp_path):
    """A module trained at alpha = rank has no tensor for it, whatever the largest alpha of the file is."""
    path, products = _metadata_file(tmp_path, random, {"software": "Loft 0.1.0", "alpha": "16.0", "rank": "16"})
    check(QWEN, path, products)


def test_a_core_of_another_rank_is_refused(random):
    stem, model = CONV, shared(UNET)
    file = {f"{stem}.lora_down.weight": draw(random, 4, 8, 1, 1), f"{stem}.lora_up.weight": draw(random, 8, 4, 1, 1)}
    with pytest.raises(Trouble, match="core"):
        adapters.load(model, {**file, f"{stem}.lora_mid.weight": draw(random, 3, 4, 3, 3)})


def test_factors_that_lie_turned_in_memory(random):
    left, right = draw(random, 4, 6).t(), draw(random, 12, 8).t()
    file = {f"{Q}.lokr_w1": left, f"{Q}.lokr_w2": right}
    check(QWEN, {**file}, {f"{Q}.weight": numpy.kron(numbers(left), numbers(right))})
