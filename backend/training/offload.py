"""Gradient checkpointing: a block's activations are computed again in the backward pass; what it began from may wait in RAM."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch


def turn_on(module: torch.nn.Module, *, offload: bool) -> None:
    """Checkpoints every block of a diffusers or transformers network. With `offload` the blocks' inputs are kept in RAM."""
    again = recompute if offload else _plain
    if hasattr(module, "enable_gradient_checkpointing"):
        module.enable_gradient_checkpointing(again)
    else:
        module._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=again)


def _plain(block: Callable, *arguments):
    return torch.utils.checkpoint.checkpoint(block, *arguments, use_reentrant=False)


def recompute(block: Callable, *arguments):
    """`block(*arguments)`, of which only the tensors in `arguments` are kept, in RAM, until the backward pass."""
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    places = [place for place, value in enumerate(arguments) if isinstance(value, torch.Tensor)]

    def run(values: list[torch.Tensor]):
        filled = list(arguments_rest)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        return block(*filled)

    arguments_rest = [None if isinstance(value, torch.Tensor) else value for value in arguments]
    anchor = torch.empty(0, requires_grad=True)  # weights inside train even where no input needs a gradient
    return _Recomputed.apply(run, anchor, *tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: Callable, anchor: torch.Tensor, *tensors: torch.Tensor):
        ctx.run = run
        ctx.devices = [tensor.device for tensor in tensors]
        ctx.wants = [tensor.requires_grad for tensor in tensors]
        ctx.kept = [_to_ram(tensor) for tensor in tensors]
        ctx.casting = [(kind, _casting(kind)) for kind in {"cpu", *(device.type for device in ctx.devices)}]
        ctx.random = torch.get_rng_state()
        ctx.card = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        with torch.no_grad():
            return run(list(tensors))

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        inputs = [
            kept.to(device, non_blocking=True).detach().requires_grad_(wants)
            for kept, device, wants in zip(ctx.kept, ctx.devices, ctx.wants, strict=True)
        ]
        ctx.kept = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(enabled=True))
            torch.set_rng_state(ctx.random)
            if ctx.card is not None:
                torch.cuda.set_rng_state(ctx.card)
            for kind, (enabled, dtype) in ctx.casting:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.enable_grad())
            found = ctx.run(inputs)
        found = found if isinstance(found, tuple) else (found,)
        pairs = [
            (out, gradient)
            for out, gradient in zip(found, gradients, strict=True)
            if out is not None and out.requires_grad and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
        return (None, None, *(value.grad if value.requires_grad else None for value in inputs))


def _to_ram(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in RAM, in pages from which the card can fetch by itself; the tensor itself where that is its place."""
    if tensor.device.type == "cpu":
        return tensor.detach()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor.detach(), non_blocking=True)


def _casting(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
