"""LoRAs of every algorithm beside quantized layers act as on plain layers with the dequantized weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.quantization.methods import METHODS
from backend.engine.lora import adapters
from backend.engine.quantization.config import QuantizeConfig
from backend.engine.quantization.layers import full_weight, is_quantized
from backend.schema.messages import Trouble
from tests.lora_models import CASES, build

pytestmark = pytest.mark.torch
FILES = sorted(path for path in CASES.glob("qwen_*.safetensors") if "expected" not in path.name)


def quantized(method: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A tiny transformer with quantized layers, and a plain one with the weights that it computes with."""
    dtype = torch.float32 if method == "int8" else torch.bfloat16
    model, plain = (build("tiny_qwen_image").to(dtype) for _ in range(2))
    QuantizeConfig(method=method).quantize_model(model)
    for name, layer in model.named_modules():
        if is_quantized(layer):
            plain.get_submodule(name).weight.data.copy_(full_weight(layer))
    return model, plain


@pytest.mark.parametrize("method", ["int8", "bitsandbytes_nf4", "torchao_int8_w8a16"])
def test_every_algorithm_acts_on_the_dequantized_weight(method):
    if METHODS[method].package:
        pytest.importorskip(METHODS[method].package)
    model, plain = quantized(method)
    dtype = torch.float32 if method == "int8" else torch.bfloat16
    worst = {}
    for path in FILES:
        receipt = adapters.load(model, path, strength=0.7)
        adapters.load(plain, path, strength=0.7, hot=True)
        assert receipt.mode == "hot"
        torch.manual_seed(0)
        for name, layer in model.named_modules():
            if not is_quantized(layer) or "_adapters" not in layer.__dict__:
                continue
            x = torch.randn(5, layer.in_features).to(dtype)
            got, wanted = layer(x).float(), plain.get_submodule(name)(x).float()
            error = float((got - wanted).norm() / wanted.norm())
            worst[path.stem] = max(worst.get(path.stem, 0.0), error)
        adapters.clear(model), adapters.clear(plain)
    assert len(worst) >= 15
    assert max(worst.values()) < (1e-5 if method == "int8" else 0.03), worst
    assert not any("_adapters" in layer.__dict__ for layer in model.modules())


def test_several_together_and_never_fused():
    model, plain = quantized("int8")
    for path in FILES[:6]:
        adapters.load(model, path, strength=0.5), adapters.load(plain, path, strength=0.5, hot=True)
    x = torch.randn(3, 48)
    for name, layer in model.named_modules():
        if is_quantized(layer) and layer.in_features == 48:
            assert torch.allclose(layer(x), plain.get_submodule(name)(x), rtol=1e-4, atol=1e-4), name
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(Trouble, match="are quantized"):
        adapters.load(model, FILES[0], hot=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
