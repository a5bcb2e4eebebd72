"""Loft's own INT8: whole numbers from -127 to 127 with a factor for each row, on any device and without a package.

In a file it is ComfyUI's `int8_tensorwise`: `weight`, `weight_scale` (rows, 1), and the marker `comfy_quant`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch.nn import Linear, Module
from torch.nn import functional as F

from backend.engine.quantization.backend_type import Backend, State

MARKER = {"format": "int8_tensorwise", "convrot": False}


class Int8Linear(Linear):
    """A byte a weight and a factor a row; an error of half a step at most. `weight` holds the codes, `scale` (rows, 1) the factors."""

    def __init__(self, layer: Linear, *, empty: bool = False, dtype: torch.dtype | None = None):
        dtype = dtype or layer.weight.dtype
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta", dtype=dtype)
        if empty:
            codes = torch.empty(layer.weight.shape, dtype=torch.int8, device="meta")
            scale = torch.empty(layer.out_features, 1, dtype=dtype, device="meta")
            bias = None if layer.bias is None else torch.empty(layer.out_features, dtype=dtype, device="meta")
            self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        else:
            weight = layer.weight.detach().to(torch.float32, copy=True)
            scale = torch.maximum(weight.amax(dim=1, keepdim=True), -weight.amin(dim=1, keepdim=True))
            scale = scale.div_(127).clamp_min_(1e-7).to(dtype)
            codes = weight.div_(scale.float()).round_().clamp_(-128, 127).to(torch.int8)
            self.bias = layer.bias
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out = _Product.apply(x, self.weight, self.scale)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def _apply(self, fn, recurse=True):
        """Codes stay codes and factors keep their dtype, whatever dtype the module is cast to."""
        codes, scale = self.weight, self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.scale.device)
        if self.weight.dtype is not torch.int8:
            self.weight = torch.nn.Parameter(codes.to(self.weight.device), requires_grad=False)
        return self


class _Product(torch.autograd.Function):
    """x @ weight.T; neither pass keeps the full weight beyond the product."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.codes, ctx.scale = codes, scale
        return F.linear(x, _full(codes, scale, x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient @ _full(ctx.codes, ctx.scale, gradient.dtype), None, None


def _full(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.to(dtype).mul_(scale.to(dtype))  # whole numbers up to 128 are exact in every dtype that computes


def _flatten(state: State) -> tuple[State, dict[str, str]]:
    flat = dict(state)
    for key in [key for key in state if key.endswith(".scale")]:
        module = key.removesuffix(".scale")
        if state.get(f"{module}.weight", state[key]).dtype is torch.int8:
            flat[f"{module}.weight_scale"] = flat.pop(key).float()
            marker = json.dumps(MARKER).encode()
            flat[f"{module}.comfy_quant"] = torch.frombuffer(bytearray(marker), dtype=torch.uint8)
    return flat, {}


def _unflatten(flat: State, metadata: Mapping[str, str]) -> State:
    state = dict(flat)
    for key in [key for key in flat if key.endswith(".weight_scale")]:
        module = key.removesuffix(".weight_scale")
        state.pop(f"{module}.comfy_quant", None)
        scale, rows = state.pop(key), flat[f"{module}.weight"].shape[0]
        state[f"{module}.scale"] = scale.float().reshape(-1, 1).expand(rows, 1).contiguous()
    return state


def _owns(module: Module) -> bool:
    return isinstance(module, Int8Linear)


INT8 = Backend(
    settings={},
    quantize=lambda layer, settings: Int8Linear(layer),
    empty=lambda layer, dtype, settings: Int8Linear(layer, empty=True, dtype=dtype),
    owns=_owns,
    computing_dtype=lambda layer: layer.scale.dtype,
    full_weight=lambda layer: _full(layer.weight, layer.scale, layer.scale.dtype),
    flatten=_flatten,
    unflatten=_unflatten,
    takes=lambda weight: type(weight) is torch.Tensor and weight.dtype is torch.int8,
)
