"""What a rounded layer is planned to take is what a real one takes, method by method, for those whose packages are there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from backend.planner.costs import quantized_bytes
from backend.training.model import quantization

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
)


def stored(layer: torch.nn.Module) -> int:
    """Bytes of every storage that the layer keeps, quantisation states and tables included."""
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
        "backend",
    ):
        _visit(vars(value), seen, known)


def _inner(tensor: torch.Tensor) -> list[str]:
    """The names of the tensors that a subclass such as torchao's is made of."""
    own = type(tensor) not in (torch.Tensor, torch.nn.Parameter) and type(tensor).__module__.startswith("torchao")
    return list(tensor.__tensor_flatten__()[0]) if own else []


@pytest.mark.parametrize("method", MEASURABLE)
@pytest.mark.parametrize(("rows", "columns"), [(96, 160), (512, 384)])
def test_a_rounded_layer_takes_what_is_planned(method, rows, columns):
    package = quantized_bytes.package_of(method)
    if package:
        pytest.importorskip(package)
    layer = torch.nn.Linear(columns, rows, bias=False).to(torch.bfloat16).requires_grad_(False)
    assert stored(quantization.METHODS[method](layer)) == quantized_bytes.METHODS[method](rows, columns, 2)


def test_the_plan_knows_every_method_of_the_trainer():
    assert quantized_bytes.METHODS.keys() == quantization.METHODS.keys()
