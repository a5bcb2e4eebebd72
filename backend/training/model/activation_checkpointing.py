"""Activation (gradient) checkpointing, with the checkpoints (block inputs) offloaded to RAM on request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

MIN_OFFLOAD_BYTES = 2**20  # what is smaller stays: moving it would take longer than it is worth


def enable_activation_checkpointing(module: torch.nn.Module, *, offload: bool) -> None:
    """Turns on activation (gradient) checkpointing for every block of a diffusers or transformers network. With
    `offload` the blocks' inputs are kept in RAM."""
    again = OffloadedCheckpoints().recompute if offload else _plain
    if hasattr(module, "enable_gradient_checkpointing"):
        cast(Any, module).enable_gradient_checkpointing(again)
    else:
        cast(Any, module)._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=again)


def _plain(block: Callable, *arguments):
    return checkpoint(block, *arguments, use_reentrant=False)


class OffloadedCheckpoints:
    """The inputs of a network's blocks, in RAM from their forward to their backward pass.

    On a card they travel on a stream of their own: they leave while their block computes, and come back while the block
    after it is computed again.
    """

    def __init__(self):
        self.pending: list[list[Kept]] = []  # of each block that has run forwards, in order
        self.stream: torch.cuda.Stream | None = None

    def recompute(self, block: Callable, *arguments):
        """`block(*arguments)`, of which only the tensors in `arguments` are kept until the backward pass."""
        places = [place for place, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
        rest = [None if isinstance(value, torch.Tensor) else value for value in arguments]

        def run(values: list[torch.Tensor]):
            filled = list(rest)
            for place, value in zip(places, values, strict=True):
                filled[place] = value
            return block(*filled)

        anchor = torch.empty(0, requires_grad=True)  # weights inside train even where no input needs a gradient
        return _Recompute.apply(self, run, anchor, *[arguments[place] for place in places])

    def keep(self, tensors: Sequence[torch.Tensor]) -> list[Kept]:
        card = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        if self.stream is None and card is not None:
            self.stream = torch.cuda.Stream(card)
        kept = [Kept(tensor, self.stream) for tensor in tensors]
        self.pending.append(kept)
        return kept

    def take(self, kept: list[Kept]) -> list[torch.Tensor]:
        """The inputs of a block as they were; those of the block before it set out."""
        values = [one.take() for one in kept]
        self.pending = [other for other in self.pending if other is not kept]
        for one in self.pending[-1] if self.pending else ():
            one.prefetch()
        return values


class Kept:
    """A tensor that waits: in pinned RAM where it is of a card and large, else where it is."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None):
        self.device, self.wants = tensor.device, tensor.requires_grad
        moves = tensor.device.type == "cuda" and tensor.nbytes >= MIN_OFFLOAD_BYTES
        self.stream = stream if moves else None
        self.here: torch.Tensor | None = tensor.detach()
        if self.stream is not None:
            self.here = self._offload(tensor.detach(), self.stream)
        self.coming: torch.Tensor | None = None

    def _offload(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
        """Starts the copy of `tensor` to pinned RAM on `stream`."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return copy

    def prefetch(self) -> None:
        """Starts the copy back to the device, unless it has been started."""
        if self.stream is not None and self.coming is None and self.here is not None:
            with torch.cuda.stream(self.stream):
                self.coming = self.here.to(self.device, non_blocking=True)

    def take(self) -> torch.Tensor:
        """The tensor where it was made; it is not kept any longer."""
        self.prefetch()
        value = self.here if self.stream is None else self.coming
        assert value is not None, "a checkpoint is taken once"
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            value.record_stream(torch.cuda.current_stream(self.device))
        self.here = self.coming = None
        return value.detach().requires_grad_(self.wants)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, checkpoints: OffloadedCheckpoints, run: Callable, anchor: torch.Tensor, *tensors: torch.Tensor):
        ctx.set_materialize_grads(False)  # an output that nobody uses has no gradient, not one of zeros
        ctx.checkpoints, ctx.run = checkpoints, run
        ctx.kept = checkpoints.keep(tensors)
        ctx.casting = [(kind, _autocast_state(kind)) for kind in {"cpu", *(tensor.device.type for tensor in tensors)}]
        ctx.random = torch.get_rng_state()
        ctx.device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        ctx.card = None if ctx.device is None else torch.cuda.get_rng_state(ctx.device)
        with torch.no_grad():
            return run(list(tensors))

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        inputs = ctx.checkpoints.take(ctx.kept)
        ctx.kept = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[] if ctx.device is None else [ctx.device]))
            torch.set_rng_state(ctx.random)
            if ctx.card is not None:
                assert ctx.device is not None
                torch.cuda.set_rng_state(ctx.card, ctx.device)
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
        return (None, None, None, *(value.grad if value.requires_grad else None for value in inputs))


def _autocast_state(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
