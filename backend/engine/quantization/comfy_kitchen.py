"""INT8 and FP8 with quantized inputs by the package comfy-kitchen, in ComfyUI's stored form (`weight`, `weight_scale`, `comfy_quant`).

Source of the form: comfy_kitchen/tensor of comfy-kitchen 0.2 and comfy/ops.py of ComfyUI.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module

import torch
from torch.nn import Linear, Module, Parameter
from torch.nn import functional as F

from backend.engine.quantization.backend_type import Backend, State
from backend.schema.messages import Trouble
from backend.schema.untrusted import name_of, parsed

INT8 = {"per_channel": True, "convrot": True, "convrot_groupsize": 256}
LAYOUTS = {"TensorWiseINT8Layout": "int8_tensorwise", "TensorCoreFP8Layout": "float8_e4m3fn"}


def is_of_comfy_kitchen(tensor: object) -> bool:
    """Whether `tensor` is comfy-kitchen's, without importing the package."""
    return isinstance(tensor, torch.Tensor) and type(tensor).__module__.startswith("comfy_kitchen")


@lru_cache(maxsize=1)
def _tensors():
    """The package's module of tensors. Its CUDA functions are for CUDA 13 and later; it has others for the rest."""
    kitchen, found = import_module("comfy_kitchen"), import_module("comfy_kitchen.tensor")
    version = torch.version.cuda
    if version is None or int(version.partition(".")[0]) < 13:
        kitchen.registry.disable("cuda")
    return found


class KitchenLinear(Linear):
    """A linear layer whose weight is comfy-kitchen's. Inputs are quantized by it, those of FP8 here, in rows of two dimensions."""

    def __init__(self, layer: Linear, dtype: torch.dtype):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta", dtype=dtype)
        self.weight.requires_grad_(False)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        flat = x.reshape(-1, x.shape[-1])
        return _Product.apply(flat, self.weight, self.bias).reshape(*x.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """The quantized product; backward by the dequantized weight."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.weight = weight
        if weight._layout_cls == "TensorCoreFP8Layout":
            x = _tensors().QuantizedTensor.from_float(x, weight._layout_cls)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.dequantize().to(gradient.dtype), None, None


def _group(columns: int, settings: Mapping) -> int:
    """The largest power of four up to `convrot_groupsize` that divides `columns`; below 4 nothing is rotated."""
    group = settings["convrot_groupsize"]
    if type(group) is not int or group < 4 or group & (group - 1) or group.bit_length() % 2 == 0:
        raise Trouble(
            "bad_value", f"convrot_groupsize is {group!r:.40}.", hint="It is a power of four from 4 on, such as 256."
        )
    while group >= 4 and columns % group:
        group //= 4
    return group


def _quantize(layout: str):
    def quantize(layer: Linear, settings: Mapping) -> Linear:
        weight, options = layer.weight.detach(), {}
        if settings:
            group = _group(layer.in_features, settings) if settings["convrot"] else 0
            options = {"is_weight": True, "per_channel": bool(settings["per_channel"]), "convrot": group >= 4}
            options |= {"convrot_groupsize": group} if group >= 4 else {}
        made = KitchenLinear(layer, weight.dtype)
        made.weight = Parameter(_tensors().QuantizedTensor.from_float(weight, layout, **options), requires_grad=False)
        return made

    return quantize


def _flatten(state: State) -> tuple[State, dict[str, str]]:
    flat = {}
    for key, value in state.items():
        if not is_of_comfy_kitchen(value):
            flat[key] = value
            continue
        said = value._params
        flat |= value.state_dict(prefix=key)
        marker = {"format": LAYOUTS[value._layout_cls]}
        if value._layout_cls == "TensorWiseINT8Layout":
            marker |= {"convrot": bool(said.convrot)} | (
                {"convrot_groupsize": said.convrot_groupsize} if said.convrot else {}
            )
        text = json.dumps(marker).encode()
        flat[f"{key.removesuffix('weight')}comfy_quant"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return flat, {}


def _unflatten(flat: State, metadata: Mapping[str, str]) -> State:
    state = dict(flat)
    for key in [key for key in flat if key.endswith(".comfy_quant")]:
        module = key.removesuffix(".comfy_quant")
        said = parsed(bytes(state.pop(key).flatten().to(torch.uint8).tolist()), dict, where=key)
        layout = next((name for name, form in LAYOUTS.items() if form == said.get("format")), None)
        if layout is None or f"{module}.weight_scale" not in state or f"{module}.weight" not in flat:
            raise Trouble(
                "damaged", f"{name_of(key)} says that the layer is {said.get('format')!r}, which cannot be read."
            )
        scale, codes = state.pop(f"{module}.weight_scale"), flat[f"{module}.weight"]
        options = {}
        if layout == "TensorWiseINT8Layout":
            options = {
                "is_weight": True,
                "convrot": bool(said.get("convrot")),
                "convrot_groupsize": said.get("convrot_groupsize", 256),
            }
            scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
        params = (
            _tensors()
            .get_layout_class(layout)
            .Params(scale=scale, orig_dtype=torch.bfloat16, orig_shape=tuple(codes.shape), **options)
        )
        state[f"{module}.weight"] = _tensors().QuantizedTensor(codes, layout, params)
    return state


def _owns(module: Module) -> bool:
    return isinstance(module, KitchenLinear)


def method(layout: str) -> Backend:
    """By a layout's name."""
    return Backend(
        settings=INT8 if layout == "TensorWiseINT8Layout" else {},
        quantize=_quantize(layout),
        empty=lambda layer, dtype, settings: KitchenLinear(layer, dtype),
        owns=_owns,
        computing_dtype=lambda layer: layer.weight._params.orig_dtype,
        full_weight=lambda layer: layer.weight.dequantize(),
        flatten=_flatten,
        unflatten=_unflatten,
        takes=lambda weight: is_of_comfy_kitchen(weight) and weight._layout_cls == layout,
    )
