"""Whether a layer keeps its weight quantized, and that weight in full."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn

from backend.engine.quantization.backend_type import Backend
from backend.engine.quantization.methods import BACKENDS

_DISTINCT = tuple({backend.owns: backend for backend in BACKENDS.values()}.values())


def backend_of(layer: nn.Module) -> Backend | None:
    """Whose quantized layer it is; None for any other module."""
    if not isinstance(layer, nn.Linear):
        return None
    return next((backend for backend in _DISTINCT if backend.owns(layer)), None)


def is_quantized(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `layer` is a linear layer whose `weight` holds codes and not its numbers."""
    return backend_of(layer) is not None


def holds_quantized(module: nn.Module) -> bool:
    """Whether some layer of `module` is quantized."""
    return any(is_quantized(layer) for layer in module.modules())


def weight_shape(layer: nn.Module) -> tuple[int, ...] | None:
    """The shape that the weight of any module has in full; None where it has none. A quantized one may be stored in another."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return None
    return (layer.out_features, layer.in_features) if is_quantized(layer) else tuple(weight.shape)


def computing_dtype(layer: nn.Linear) -> torch.dtype:
    """What a quantized layer's weight is dequantized to."""
    return _backend_of_quantized(layer).computing_dtype(layer)


@torch.no_grad()
def full_weight(layer: nn.Linear) -> torch.Tensor:
    """The weight (out, in) that a quantized layer computes with, in its computing dtype, in memory of its own."""
    return _backend_of_quantized(layer).full_weight(layer).detach()


def _backend_of_quantized(layer: nn.Linear) -> Backend:
    backend = backend_of(layer)
    assert backend is not None, "only a quantized layer has a backend"
    return backend


@torch.no_grad()
def dequantized(layer: nn.Linear, dtype: torch.dtype | None = None) -> nn.Linear:
    """A plain layer with the quantized one's weight, error included."""
    weight = full_weight(layer)
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(weight.to(dtype or weight.dtype), requires_grad=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().to(made.weight.device, made.weight.dtype), requires_grad=False)
    return made
