"""Frozen parts whose linear layers keep their weights in 8 or 4 bits (`--quant_options`), by Loft's own int8 or by an installed package.

Every layer goes to the device and is rounded there alone, so a part is never on the device in full. Rounding is a function of the file,
so a resumed run has the same base as before; what is saved is the adapter alone, in the form that it has beside a full base.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import Linear
from torch.nn import functional as F

from backend.catalog.hub.part_entries import parts_meant, rounding_of
from backend.catalog.spec import PartSpec
from backend.engine.devices import device_memory, out_of_memory
from backend.engine.loading.load import let_go
from backend.schema.messages import Trouble
from backend.system.text_files import ends_with


@dataclass(frozen=True)
class Quantised:
    """What `--quant_options` says of one part: the method's name, and the ends of names of layers that stay as they are."""

    method: str
    excluded: tuple[str, ...] = ()


def read_options(text: str | None, parts: Mapping[str, PartSpec]) -> dict[str, Quantised]:
    """Part -> how it is quantised, from `MODEL:METHOD[/LAYER,LAYER]`, separated by semicolons. What cannot be is `refused` before."""
    files = {name: part.files for name, part in parts.items()}
    return {
        name: Quantised(method, excluded)
        for entry, method, excluded in rounding_of(text)
        for name in parts_meant(entry, "quant_options", files)
    }


def quantise(
    module: torch.nn.Module, how: Quantised, *, part: PartSpec, maps: Mapping[Path, mmap.mmap], device: torch.device
) -> torch.nn.Module:
    """Rounds the linear layers of `module` in place, each brought to `device` by itself, and then brings the rest there.

    `maps` are those that the module was loaded from: the pages of a layer that was rounded are let go.
    """
    layers = {name: layer for name, layer in module.named_modules() if type(layer) is Linear}
    chosen = [name for name in layers if not any(ends_with(name, end) for end in how.excluded)]
    if not chosen:
        raise Trouble("bad_value", f"The part {part.name} has no linear layer to quantise (--quant_options).")
    for name in chosen:
        owner, _, leaf = name.rpartition(".")
        try:
            layer = METHODS[how.method](layers[name].to(device))
        except (ImportError, NotImplementedError, RuntimeError, AssertionError, ValueError) as error:
            if out_of_memory.is_one(error, device):  # says nothing of the method: the run goes on one rung lower
                raise
            raise Trouble(
                "not_supported",
                f"The quantisation {how.method} does not work here for {part.name}.{name}: {str(error)[:300]}",
                hint="Use int8, or another method.",
            ) from None
        setattr(module.get_submodule(owner), leaf, layer)
        layers[name] = None
        at = part.tensors.get(f"{name}.weight")
        if at is not None:
            let_go(at, maps[at.file])
    device_memory.give_back("cpu")
    return module.to(device).requires_grad_(False)


class Int8Linear(Linear):
    """A linear layer of whole numbers from -127 to 127 with a factor for each row: a byte a weight, and half a step of rounding."""

    def __init__(self, layer: Linear):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta", dtype=layer.weight.dtype)
        weight = layer.weight.detach().to(torch.float32, copy=True)
        scale = torch.maximum(weight.amax(dim=1, keepdim=True), -weight.amin(dim=1, keepdim=True))
        scale = scale.div_(127).clamp_min_(1e-7).to(layer.weight.dtype)
        codes = weight.div_(scale.float()).round_().clamp_(-128, 127).to(torch.int8)
        self.weight, self.bias = torch.nn.Parameter(codes, requires_grad=False), layer.bias
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out = _Rounded.apply(x, self.weight, self.scale)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _Rounded(torch.autograd.Function):
    """x @ weight.T; neither pass keeps the weight in full beyond the product."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.codes, ctx.scale = codes, scale
        return F.linear(x, _full(codes, scale, x.dtype))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient @ _full(ctx.codes, ctx.scale, gradient.dtype), None, None


def _full(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.to(dtype).mul_(scale.to(dtype))  # whole numbers up to 128 are exact in every dtype that computes


def _bitsandbytes_4bit(kind: str) -> Callable[[Linear], Linear]:
    def make(layer: Linear) -> Linear:
        from bitsandbytes.nn import Linear4bit, Params4bit

        weight, dtype, device = layer.weight.detach(), layer.weight.dtype, layer.weight.device
        made = Linear4bit(
            layer.in_features, layer.out_features, bias=False, device="meta", compute_dtype=dtype, quant_type=kind
        )
        made.weight, made.bias = Params4bit(weight.cpu(), requires_grad=False, quant_type=kind), layer.bias
        return made.to(device)

    return make


def _bitsandbytes_int8(layer: Linear) -> Linear:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    made = Linear8bitLt(
        layer.in_features, layer.out_features, bias=False, device="meta", has_fp16_weights=False, threshold=6.0
    )
    made.weight = Int8Params(layer.weight.detach().cpu(), requires_grad=False, has_fp16_weights=False)
    made.bias = layer.bias
    return made.to(layer.weight.device)


def _torchao(config: str, *, numbers: str = "") -> Callable[[Linear], Linear]:
    """By a configuration of torchao, stable or prototype; `numbers`: the dtype of weights and activations in blocks of 32 (MX)."""

    def make(layer: Linear) -> Linear:
        from torchao import quantization

        kind = getattr(quantization, config, None) or getattr(_prototypes(), config, None)
        dtype = getattr(torch, numbers, None) if numbers else None
        if kind is None or (numbers and dtype is None):
            raise ImportError(f"this torchao or torch has no {config if kind is None else numbers}.")
        blocks = {"block_size": 32, "activation_dtype": dtype, "weight_dtype": dtype} if numbers else {}
        held = torch.nn.ModuleList([layer])  # it replaces children of what it is given
        quantization.quantize_(held, kind(**blocks))
        return held[0]

    return make


def _prototypes():
    try:
        return importlib.import_module("torchao.prototype.mx_formats")
    except ImportError:
        return None


METHODS: dict[str, Callable[[Linear], Linear]] = {  # bytes and packages of each: `catalog.rounded`
    "int8": Int8Linear,
    "bitsandbytes_nf4": _bitsandbytes_4bit("nf4"),
    "bitsandbytes_fp4": _bitsandbytes_4bit("fp4"),
    "bitsandbytes_int8": _bitsandbytes_int8,
    "torchao_int8_w8a16": _torchao("Int8WeightOnlyConfig"),
    "torchao_fp8_w8a16": _torchao("Float8WeightOnlyConfig"),
    "torchao_int4_w4a16": _torchao("Int4WeightOnlyConfig"),
    "torchao_int8_w8a8": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao_fp8_w8a8": _torchao("Float8DynamicActivationFloat8WeightConfig"),
    "torchao_nvfp4_w4a16": _torchao("NVFP4WeightOnlyConfig"),
    "torchao_nvfp4_w4a4": _torchao("NVFP4DynamicActivationNVFP4WeightConfig"),
    "torchao_mxfp4_w4a4": _torchao("MXDynamicActivationMXWeightConfig", numbers="float4_e2m1fn_x2"),
    "torchao_mxfp8_w8a8": _torchao("MXDynamicActivationMXWeightConfig", numbers="float8_e4m3fn"),
    "torchao_int4_w4a8": _torchao("Float8DynamicActivationInt4WeightConfig"),
}
