"""The configurations of the package torchao, stable or prototype. Its quantized weights are tensors of its own classes in plain linear layers.

Stored as `torchao.prototype.safetensors` flattens them: `<module>._weight_qdata`, `._weight_scale`, and JSON in the header.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping

import torch
from torch.nn import Linear, Module, Parameter

from backend.engine.quantization.backend_type import Backend, State
from backend.schema.messages import Trouble
from backend.schema.untrusted import parsed


def is_of_torchao(tensor: object) -> bool:
    """Whether `tensor` is of one of torchao's classes, without importing the package."""
    return isinstance(tensor, torch.Tensor) and type(tensor).__module__.startswith("torchao")


def _owns(module: Module) -> bool:
    return isinstance(module, Linear) and is_of_torchao(module._parameters.get("weight"))


def _config(name: str, numbers: str, settings: Mapping):
    from torchao import quantization

    kind = getattr(quantization, name, None) or getattr(_prototypes(), name, None)
    dtype = getattr(torch, numbers, None) if numbers else None
    if kind is None or (numbers and dtype is None):
        raise ImportError(f"this torchao or torch has no {name if kind is None else numbers}.")
    blocks = {"block_size": 32, "activation_dtype": dtype, "weight_dtype": dtype} if numbers else {}
    try:
        return kind(**{**blocks, **settings})
    except TypeError as error:
        raise Trouble(
            "bad_value", f"backend_config_kwargs {dict(settings)!r:.80} are not torchao's {name}'s: {str(error)[:200]}."
        ) from None


def _prototypes():
    try:
        return importlib.import_module("torchao.prototype.mx_formats")
    except ImportError:
        return None


def _quantize(name: str, numbers: str):
    def quantize(layer: Linear, settings: Mapping) -> Linear:
        from torchao.quantization import quantize_

        held = torch.nn.ModuleList([layer.requires_grad_(False)])  # it replaces children of what it is given
        quantize_(held, _config(name, numbers, settings))
        return held[0]

    return quantize


def _empty(layer: Linear, dtype: torch.dtype, settings: Mapping) -> Linear:
    made = Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta", dtype=dtype)
    return made.requires_grad_(False)


def _full_weight(layer: Linear) -> torch.Tensor:
    return layer.weight.dequantize()


def _flatten(state: State) -> tuple[State, dict[str, str]]:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    return flatten_tensor_state_dict(
        {key: value.data if isinstance(value, Parameter) else value for key, value in state.items()}
    )


def _unflatten(flat: State, metadata: Mapping[str, str]) -> State:
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    named = parsed(metadata.get("tensor_names", "[]"), list, where="tensor_names")
    quantized = [name for name in named if "_data" in parsed(metadata.get(name, "{}"), dict, where=name)]
    made, left = unflatten_tensor_state_dict(dict(flat), {**metadata, "tensor_names": json.dumps(quantized)})
    return {**left, **made}


def method(name: str, *, numbers: str = "") -> Backend:
    """By a configuration's name; `numbers`: the dtype of weights and activations in blocks of 32 (MX)."""
    return Backend(
        settings={},
        quantize=_quantize(name, numbers),
        empty=_empty,
        owns=_owns,
        computing_dtype=lambda layer: layer.weight.dtype,
        full_weight=_full_weight,
        flatten=_flatten,
        unflatten=_unflatten,
        takes=is_of_torchao,
        open_settings=True,
    )
