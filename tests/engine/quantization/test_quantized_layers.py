"""Quantized layers one by one, method by method, for those whose packages are there: the bytes that are planned, numbers, gradients, files."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from backend.catalog.quantization.methods import METHODS
from backend.engine.quantization.config import MixedQuantizeConfig, QuantizeConfig, describe_quant_method
from backend.engine.quantization.layers import dequantized, full_weight, is_quantized
from backend.engine.quantization.methods import BACKENDS
from backend.schema.messages import Trouble

pytestmark = pytest.mark.torch
MEASURABLE = (
    "int8",
    "bitsandbytes_nf4",
    "bitsandbytes_fp4",
    "bitsandbytes_int8",
    "torchao_int8_w8a16",
    "torchao_fp8_w8a16",
    "torchao_int8_w8a8",
    "torchao_nvfp4_w4a16",
    "comfy_kitchen_int8_w8a8",
    "comfy_kitchen_fp8_w8a8",
)
ROUGH = {"4": 0.2, "8": 0.04}  # largest share of a product's length that is lost, by bits


def stored(layer: torch.nn.Module) -> int:
    """Bytes of every storage that the layer keeps, quantization states and tables included."""
    seen: dict[int, int] = {}
    _visit(layer, seen, set())
    return sum(seen.values())


def _visit(value, seen: dict[int, int], known: set[int]) -> None:
    if id(value) in known or isinstance(value, type):
        return
    known.add(id(value))
    if isinstance(value, torch.Tensor):
        for name in _inner(value):
            _visit(getattr(value, name, None), seen, known)
        if not hasattr(value, "__tensor_flatten__") or not _inner(value):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        _visit(vars(value), seen, known)
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            _visit(one, seen, known)
    elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] in (
        "torch",
        "bitsandbytes",
        "comfy_kitchen",
        "backend",
    ):
        _visit(vars(value), seen, known)


def _inner(tensor: torch.Tensor) -> list[str]:
    """The names of the tensors that a subclass such as torchao's is made of."""
    own = type(tensor) not in (torch.Tensor, torch.nn.Parameter) and type(tensor).__module__.startswith(
        ("torchao", "comfy_kitchen")
    )
    return list(tensor.__tensor_flatten__()[0]) if own else []


@pytest.fixture(params=MEASURABLE)
def method(request) -> str:
    if METHODS[request.param].package:
        pytest.importorskip(METHODS[request.param].package)
    return request.param


def linear(rows: int = 96, columns: int = 160, *, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(columns, rows, bias=bias).to(torch.bfloat16).requires_grad_(False)


class Two(torch.nn.Module):
    """Two kinds of layers, one of them deep inside."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.deep = (
            linear(160, 160),
            torch.nn.LayerNorm(160),
            torch.nn.ModuleDict({"0": linear()}),
        )

    def forward(self, x):
        return self.deep["0"](self.norm(self.first(x).float()).to(x.dtype))


@pytest.mark.parametrize(("rows", "columns"), [(96, 160), (512, 384)])
def test_a_quantized_layer_takes_what_is_planned(method, rows, columns):
    layer = linear(rows, columns, bias=False)
    made = QuantizeConfig(method=method).quantized(layer)
    assert stored(made) == METHODS[method].layer_bytes(rows, columns, 2)


def test_one_table_names_what_can_be_carried_out():
    assert METHODS.keys() == BACKENDS.keys()


def test_products_and_gradients_are_those_of_the_weight_in_full(method):
    layer, x = linear(), torch.randn(7, 160).to(torch.bfloat16).requires_grad_()
    wanted = layer(x.detach())
    made = QuantizeConfig(method=method).quantized(linear())
    assert is_quantized(made) and isinstance(made, torch.nn.Linear) and not is_quantized(layer)
    got = made(x.detach())
    lost = ROUGH["4" if any(bits in method for bits in ("4_w", "nf4", "fp4")) else "8"]
    assert got.dtype == torch.bfloat16 and float((got - wanted).norm() / wanted.norm()) < lost
    full = full_weight(made)
    assert full.dtype == torch.bfloat16 and full.shape == layer.weight.shape
    plain = dequantized(made)
    assert type(plain) is torch.nn.Linear and torch.equal(plain.weight, full)
    tolerance = 0.04 if METHODS[method].activations else 0.01
    assert float((plain(x.detach()) - got).norm() / got.norm()) < tolerance
    if METHODS[method].gradients:
        made(x).sum().backward()
        exact = torch.ones(7, 96, dtype=torch.bfloat16) @ full
        assert float((x.grad - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_was_saved_is_loaded_again_bit_for_bit(method, inside, tmp_path):
    config = QuantizeConfig(method=method, exclude_modules=["first"] if inside else None)
    model = config.quantize_model(Two())
    assert is_quantized(model.first) != inside and is_quantized(model.deep["0"])
    tensors, metadata = config.flatten_state_dict(model.state_dict())
    save_file(tensors, tmp_path / "a.safetensors", metadata=metadata)
    from safetensors import safe_open

    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        said = file.metadata()
    again = QuantizeConfig(method=method, exclude_modules=config.exclude_modules, load_prequantized=True)
    empty = again.prepare_for_prequantized_load(Two())
    empty.load_state_dict(again.unflatten_state_dict(load_file(tmp_path / "a.safetensors"), said), assign=True)
    assert again.quantize_model(empty) is empty  # which does nothing
    x = torch.randn(3, 160).to(torch.bfloat16)
    assert torch.equal(empty(x), model(x))
    once = QuantizeConfig(method=method, exclude_modules=config.exclude_modules, mode="dequant_once")
    assert not any(map(is_quantized, once.dequantize_model(empty).modules()))


def test_int8_needs_no_package_and_survives_casts():
    layer = QuantizeConfig(method="int8").quantized(linear())
    codes, scale = layer.weight.clone(), layer.scale.clone()
    layer.to(torch.float32).half().to(torch.bfloat16)
    assert layer.weight.dtype is torch.int8 and torch.equal(layer.weight, codes) and torch.equal(layer.scale, scale)
    error = (full_weight(layer).float() - linear().weight.float()).abs()
    assert bool((error <= 0.51 * scale.float() + 4e-3 * linear().weight.float().abs()).all())


def test_mixed_by_layer(tmp_path):
    kept = ["deep.0"]
    mixed = MixedQuantizeConfig(
        configs=[
            QuantizeConfig(method="int8", exclude_modules=kept),
            QuantizeConfig(method="int8", target_modules=kept),
        ]
    )
    assert mixed.method == "int8 + int8" and mixed.mode == "dynamic"
    model = mixed.quantize_model(Two())
    assert is_quantized(model.first) and mixed.is_quantized_linear(model.deep["0"])
    tensors, metadata = mixed.flatten_state_dict(model.state_dict())
    again = MixedQuantizeConfig(configs=mixed.configs, load_prequantized=True)
    empty = again.prepare_for_prequantized_load(Two())
    empty.load_state_dict(again.unflatten_state_dict(tensors, metadata), assign=True)
    x = torch.randn(3, 160).to(torch.bfloat16)
    assert torch.equal(empty(x), model(x))


@pytest.mark.parametrize("other", ["bitsandbytes_nf4", "torchao_int8_w8a16", "comfy_kitchen_fp8_w8a8"])
def test_mixed_with_a_package(other):
    pytest.importorskip(METHODS[other].package)
    for pair in (("int8", other), (other, "int8"), (other, "torchao_fp8_w8a16")):
        if METHODS[pair[1]].package:
            pytest.importorskip(METHODS[pair[1]].package)
        mixed = MixedQuantizeConfig(
            configs=[
                QuantizeConfig(method=pair[0], exclude_modules=["first"]),
                QuantizeConfig(method=pair[1], target_modules=["first"]),
            ],
        )
        model = mixed.quantize_model(Two())
        tensors, metadata = mixed.flatten_state_dict(model.state_dict())
        assert all(type(tensor) is torch.Tensor for tensor in tensors.values())
        empty = mixed.prepare_for_prequantized_load(Two())
        empty.load_state_dict(mixed.unflatten_state_dict(tensors, metadata), assign=True)
        x = torch.randn(3, 160).to(torch.bfloat16)
        assert torch.equal(empty(x), model(x))


def _mixed(**settings):
    return MixedQuantizeConfig(configs=[QuantizeConfig(method="int8"), QuantizeConfig(method="int8", **settings)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: QuantizeConfig(), "needs a method"),
        (lambda: QuantizeConfig(method="int9"), "no quantization method 'int9'"),
        (lambda: QuantizeConfig(method="int8", mode="static"), "neither dynamic nor dequant_once"),
        (lambda: QuantizeConfig(method="int8", target_modules="to_q"), "no list of module names"),
        (lambda: QuantizeConfig(method="int8", backend_config_kwargs={"blocksize": 64}), "'blocksize', which int8"),
        (lambda: QuantizeConfig(method="int8", backend_config_kwargs=3), "no dictionary"),
        (lambda: QuantizeConfig(method="int8", target_modules=["to_z"]).quantize_model(Two()), "'to_z'"),
        (
            lambda: QuantizeConfig(method="int8", exclude_modules=["first", "0"]).quantize_model(Two()),
            "no linear layer",
        ),
        (lambda: MixedQuantizeConfig(), "needs a list"),
        (lambda: MixedQuantizeConfig(configs=[1]), "no QuantizeConfig"),
        (lambda: _mixed(load_prequantized=True), "Set it on the MixedQuantizeConfig"),
        (lambda: _mixed(mode="dequant_once"), "differ in their mode"),
        (lambda: _mixed().quantize_model(Two()), "mean the layer"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(make, words):
    with pytest.raises(Trouble) as caught:
        make()
    assert words in str(caught.value)


def test_a_missing_package_is_said_and_methods_describe_themselves(monkeypatch, capsys):
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "comfy_kitchen" else there(name))
    with pytest.raises(Trouble, match="package comfy-kitchen") as caught:
        QuantizeConfig(method="comfy_kitchen_int8_w8a8")
    assert "pip install comfy-kitchen" in caught.value.hint
    describe_quant_method("bitsandbytes_nf4")
    said = capsys.readouterr().out
    assert "method: bitsandbytes_nf4" in said and "blocksize = None" in said
