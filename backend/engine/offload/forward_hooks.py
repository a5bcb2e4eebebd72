"""Forward hooks of offloaded modules: weights of a block or layer are fetched before its forward, released after."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from backend.engine.offload.autograd import OffloadedPass
from backend.engine.offload.blocks import Unit
from backend.engine.offload.transfer import Layer, WeightTransfer
from backend.schema import measured_choices


class Hooked(Protocol):
    """What the hooks use of a `Placement`."""

    units: list[Unit]
    layers: list[Layer]
    transfer: WeightTransfer
    lock: threading.RLock
    calls: list[Call]
    passes: set[OffloadedPass]

    def may_cast(self, layer: Layer) -> bool: ...

    def enter_use(self, unit: Unit) -> bool: ...


@dataclass(eq=False)
class Call:
    """One forward call under way: which weights it holds, and its backward pass if there are gradients."""

    module: nn.Module
    unit: Unit
    block_held: bool  # the fetched weights of `unit`
    layer: Layer | None  # called: this layer of the block, or the whole block
    cast: Layer | None  # whose cast weights are held
    backward_pass: OffloadedPass | None = None

    def acquire(self, transfer: WeightTransfer, direction: int = 1) -> None:
        """Fetches and casts the weights: all of them or, where that raises, none."""
        if self.block_held:
            transfer.acquire(self.unit, direction)
        if self.cast is not None:
            try:
                transfer.acquire_layer(self.cast)
            except BaseException:
                if self.block_held:
                    transfer.release(self.unit, look_ahead=False)
                raise

    def release(self, transfer: WeightTransfer) -> None:
        """The buffers may be overwritten."""
        if self.cast is not None:
            transfer.release_layer(self.cast)
        if self.block_held:
            transfer.release(self.unit)

    def buffers(self, transfer: WeightTransfer) -> list[torch.Tensor]:
        """The buffers (uint8, shape (nbytes,)) that hold its weights, while they are acquired."""
        slots = [transfer.fetched[self.unit.position]] if self.block_held else []
        slots += [transfer.cast[self.cast.key]] if self.cast is not None else []
        return [slot.buffer for slot in slots]


def attach_hooks(placement: Hooked) -> list[RemovableHandle]:
    """Forward hooks on every streamed block and every layer whose weights are cast: fetched before, released after.

    Remove the hooks to stop.
    """
    hooks: list[RemovableHandle] = []
    for unit in placement.units:
        own = [layer for layer in placement.layers if layer.unit is unit]
        if unit.block and measured_choices.chosen().hooks == "casts":
            own = [layer for layer in own if placement.may_cast(layer)]
        watched: list[tuple[nn.Module, Layer | None]] = [(unit.module, None)] if unit.block else []
        watched += [(layer.module, layer) for layer in own]
        for module, layer in watched:
            hooks.append(
                module.register_forward_pre_hook(partial(pre_forward, placement, unit, layer), with_kwargs=True)
            )
        for module, layer in reversed(watched):
            hook = partial(post_forward, placement, unit, layer)
            hooks.append(module.register_forward_hook(hook, with_kwargs=True, always_call=True))
    return hooks


def pre_forward(
    placement: Hooked, unit: Unit, layer: Layer | None, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict] | None:
    """Forward pre-hook: `unit`'s weights (and, with `layer`, that layer's cast ones) are present when it returns."""
    if unit.ready is not None:
        return None
    transfer = placement.transfer
    with placement.lock:
        if placement.passes and torch._C._current_graph_task_id() == -1:  # no backward pass is running
            _release_failed_passes(placement)
        if not placement.enter_use(unit):
            return None
        streams = transfer.streams(unit)
        casts = layer is not None and unit.block and bool(transfer.cast_layout(layer).fields)
        if not casts and not (streams and (layer is None or not transfer.is_held(unit))):
            return None
        call = Call(module, unit, streams, layer, layer if casts else None)
        call.acquire(transfer)
        placement.calls.append(call)
        if not torch.is_grad_enabled():
            return None
        call.backward_pass = _backward_pass(placement, call)
        return call.backward_pass.enter(args, kwargs)


def post_forward(
    placement: Hooked, unit: Unit, layer: Layer | None, module: nn.Module, args: tuple, kwargs: dict, output: Any
) -> Any:
    """Forward hook, called also when the module raised: releases what `pre_forward` acquired for this call."""
    with placement.lock:
        calls = placement.calls
        if not calls or calls[-1].module is not module or calls[-1].layer is not layer or calls[-1].unit is not unit:
            return None
        call = calls.pop()
        backward_pass, call.backward_pass = call.backward_pass, None
        if backward_pass is not None:
            backward_pass.leave()
            output = backward_pass.outputs(output)
        call.release(placement.transfer)
        return output if backward_pass is not None else None


def _backward_pass(placement: Hooked, call: Call) -> OffloadedPass:
    transfer = placement.transfer

    def acquire(backward_pass: OffloadedPass) -> None:
        with placement.lock:
            call.acquire(transfer, -1)
            placement.passes.add(backward_pass)

    def release(backward_pass: OffloadedPass) -> None:
        with placement.lock:
            placement.passes.discard(backward_pass)
            call.release(transfer)

    return OffloadedPass(acquire, release, lambda: call.buffers(transfer))


def _release_failed_passes(placement: Hooked) -> None:
    """Releases weights that a backward pass that raised has left held."""
    for backward_pass in list(placement.passes):
        backward_pass.end_backward()
