"""Memory-efficient LoRA linear layer for training: autograd saves only the layer's own input, uncopied.

peft casts each input to the adapter's float32 (and autocast casts that back), and a graph keeps such a copy for every
adapter. Here the input itself is kept, which layers that read the same tensor share, besides one number a token and
rank.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch.autograd.function import once_differentiable


class _Added(torch.autograd.Function):
    """`result + scale * x A^T B^T`, computed in the dtype of `result`. x (..., in), result (..., out), A (rank, in), B
    (out, rank)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        dtype = result.dtype
        inner = x.to(dtype) @ a.to(dtype).t()
        ctx.save_for_backward(x, inner, a, b)
        ctx.scale = scale
        flat = torch.addmm(result.reshape(-1, len(b)), inner.reshape(-1, len(a)), b.to(dtype).t(), alpha=scale)
        return flat.view(result.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        x, inner, a, b = ctx.saved_tensors
        dtype, flat = grad.dtype, grad.reshape(-1, len(b))
        of_inner = (flat @ b.to(dtype)).mul_(ctx.scale)
        of_b = (flat.t() @ inner.reshape(-1, len(a))).mul_(ctx.scale) if ctx.needs_input_grad[3] else None
        of_a = of_inner.t() @ x.reshape(-1, a.shape[1]).to(dtype) if ctx.needs_input_grad[2] else None
        of_x = (of_inner @ a.to(dtype)).view(x.shape).to(x.dtype) if ctx.needs_input_grad[0] else None
        return of_x, grad, _as(of_a, a), _as(of_b, b), None


def _as(gradient: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | None:
    return None if gradient is None else gradient.to(weight.dtype)


class LeanLinear(Linear):
    """peft's layer of one plain adapter, with the same weights, names and gradients."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x (..., in) to (..., out), in the base layer's dtype."""
        if self.disable_adapters or self.merged or args or kwargs:
            return super().forward(x, *args, **kwargs)
        name = self.active_adapters[0]
        result = self.base_layer(x)
        return _Added.apply(x, result, self.lora_A[name].weight, self.lora_B[name].weight, float(self.scaling[name]))


def make_lean(module: torch.nn.Module) -> int:
    """Makes every layer of `module` that has one plain LoRA (no dropout, no variant such as DoRA, no bias) keep less;
    returns how many.

    Weights, their names and what is saved stay as they are.
    """
    count = 0
    for layer in module.modules():
        if type(layer) is Linear and _is_plain(layer):
            layer.__class__ = LeanLinear
            count += 1
    return count


def _is_plain(layer: Linear) -> bool:
    if len(layer.active_adapters) != 1 or layer.lora_variant or not isinstance(layer.base_layer, torch.nn.Linear):
        return False
    name = layer.active_adapters[0]
    return isinstance(layer.lora_dropout[name], torch.nn.Identity) and layer.lora_B[name].bias is None


def computes_alone(module: torch.nn.Module) -> bool:
    """Whether everything that trains in `module` belongs to lean layers: it then computes in its weights' dtype,
    without autocast."""
    lean = {id(weight) for layer in module.modules() if isinstance(layer, LeanLinear) for weight in layer.parameters()}
    return all(id(weight) in lean for weight in module.parameters() if weight.requires_grad)
