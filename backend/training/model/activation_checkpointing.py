"""Gradient checkpointing: a block's activations are computed again in the backward pass; what it began from may wait in RAM."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

LEAST_BYTES = 2**20  # what is smaller stays: moving it would take longer than it is worth


def turn_on(module: torch.nn.Module, *, offload: bool) -> None:
    """Checkpoints every block of a diffusers or transformers network. With `offload` the blocks' inputs are kept in RAM."""
    again = Checkpoints().recompute if offload else _plain
    if hasattr(module, "enable_gradient_checkpointing"):
        module.enable_gradient_checkpointing(again)
    else:
        module._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=again)


def _plain(block: Callable, *arguments):
    return torch.utils.checkpoint.checkpoint(block, *arguments, use_reentrant=False)


class Checkpoints:
    """The inputs of a network's blocks, in RAM from their forward to their backward pass.

    On a card they travel on a stream of their own: they leave while their block computes, and come back while the block after it is
    computed again.
    """

    def __init__(self):
        self.waiting: list[list[Kept]] = []  # of each block that has run forwards, in order
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
        return _Recomputed.apply(self, run, anchor, *[arguments[place] for place in places])

    def keep(self, tensors: Sequence[torch.Tensor]) -> list[Kept]:
        card = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        if self.stream is None and card is not None:
            self.stream = torch.cuda.Stream(card)
        kept = [Kept(tensor, self.stream) for tensor in tensors]
        self.waiting.append(kept)
        return kept

    def take(self, kept: list[Kept]) -> list[torch.Tensor]:
        """The inputs of a block as they were; those of the block before it set out."""
        values = [one.take() for one in kept]
        self.waiting = [other for other in self.waiting if other is not kept]
        for one in self.waiting[-1] if self.waiting else ():
            one.fetch()
        return values


class Kept:
    """A tensor that waits: in pinned RAM where it is of a card and large, else where it is."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None):
        self.device, self.wants = tensor.device, tensor.requires_grad
        moves = tensor.device.type == "cuda" and tensor.nbytes >= LEAST_BYTES
        self.stream = stream if moves else None
        self.here: torch.Tensor | None = self._leave(tensor.detach()) if moves else tensor.detach()
        self.coming: torch.Tensor | None = None

    def _leave(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return copy

    def fetch(self) -> None:
        """Sets out for the card, if it is not there."""
        if self.stream is not None and self.coming is None:
            with torch.cuda.stream(self.stream):
                self.coming = self.here.to(self.device, non_blocking=True)

    def take(self) -> torch.Tensor:
        """The tensor where it was made; it is not kept any longer."""
        self.fetch()
        value = self.here if self.stream is None else self.coming
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            value.record_stream(torch.cuda.current_stream(self.device))
        self.here = self.coming = None
        return value.detach().requires_grad_(self.wants)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, checkpoints: Checkpoints, run: Callable, anchor: torch.Tensor, *tensors: torch.Tensor):
        ctx.set_materialize_grads(False)  # an output that nobody uses has no gradient, not one of zeros
        ctx.checkpoints, ctx.run = checkpoints, run
        ctx.kept = checkpoints.keep(tensors)
        ctx.casting = [(kind, _casting(kind)) for kind in {"cpu", *(tensor.device.type for tensor in tensors)}]
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


def _casting(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
