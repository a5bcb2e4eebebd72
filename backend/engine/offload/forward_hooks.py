"""What happens before and after a block or a layer of a placed module is called: its weights come, and they go again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from backend.engine.offload.autograd import Pass
from backend.engine.offload.blocks import Unit
from backend.engine.offload.transfer import Layer, Motion
from backend.schema import measured_choices


@dataclass(eq=False)
class Call:
    """One call under way: what it holds, and its way back if there are gradients."""

    module: nn.Module
    unit: Unit
    layer: Layer | None
    block_held: bool
    layer_held: bool
    way_back: Pass | None = None

    def hold(self, motion: Motion, direction: int = 1) -> None:
        """All of it or, where that fails, nothing."""
        if self.block_held:
            motion.hold(self.unit, direction)
        if self.layer_held:
            try:
                motion.hold_layer(self.layer)
            except BaseException:
                if self.block_held:
                    motion.let_go(self.unit, look_ahead=False)
                raise

    def let_go(self, motion: Motion) -> None:
        if self.layer_held:
            motion.let_go_layer(self.layer)
        if self.block_held:
            motion.let_go(self.unit)

    def buffers(self, motion: Motion) -> list[torch.Tensor]:
        slots = [motion.fetched.find(self.unit.position)] * self.block_held
        slots += [motion.cast.find(self.layer.key)] * self.layer_held if self.layer else []
        return [slot.buffer for slot in slots]


def watch(placement) -> list[RemovableHandle]:
    """Before each use of a block or a layer its weights are brought, and after it they go, until the hooks are removed."""
    hooks = []
    for unit in placement.units:
        own = [layer for layer in placement.layers if layer.unit is unit]
        if unit.block and measured_choices.chosen().hooks == "casts":
            own = [layer for layer in own if placement.may_cast(layer)]
        watched = [(unit.module, None)] * unit.block + [(layer.module, layer) for layer in own]
        for module, layer in watched:
            hooks.append(module.register_forward_pre_hook(partial(before, placement, unit, layer), with_kwargs=True))
        for module, layer in reversed(watched):
            hook = partial(after, placement, unit, layer)
            hooks.append(module.register_forward_hook(hook, with_kwargs=True, always_call=True))
    return hooks


def before(placement, unit: Unit, layer: Layer | None, module: nn.Module, args: tuple, kwargs: dict):
    """A forward pre-hook: `unit`'s weights (and, with `layer`, those of that one module) are there when it returns."""
    if unit.ready is not None:
        return None
    motion = placement.motion
    with placement.lock:
        if placement.passes and torch._C._current_graph_task_id() == -1:
            _forget_broken(placement)
        if not placement.enter_use(unit):
            return None
        streams = motion.streams(unit)
        casts = layer is not None and unit.block and bool(motion.cast_layout(layer).fields)
        if not casts and not (streams and (layer is None or not motion.is_held(unit))):
            return None
        call = Call(module, unit, layer, streams, casts)
        call.hold(motion)
        placement.calls.append(call)
        if not torch.is_grad_enabled():
            return None
        call.way_back = _way_back(placement, call)
        return call.way_back.enter(args, kwargs)


def after(placement, unit: Unit, layer: Layer | None, module: nn.Module, args: tuple, kwargs: dict, output):
    """A forward hook, called also when the module raised: lets go what `before` held for this call."""
    with placement.lock:
        calls = placement.calls
        if not calls or calls[-1].module is not module or calls[-1].layer is not layer or calls[-1].unit is not unit:
            return None
        call = calls.pop()
        way_back, call.way_back = call.way_back, None
        if way_back is not None:
            way_back.leave()
            output = way_back.outputs(output)
        call.let_go(placement.motion)
        return output if way_back is not None else None


def _way_back(placement, call: Call) -> Pass:
    motion = placement.motion

    def hold(way_back: Pass) -> None:
        with placement.lock:
            call.hold(motion, -1)
            placement.passes.add(way_back)

    def let_go(way_back: Pass) -> None:
        with placement.lock:
            placement.passes.discard(way_back)
            call.let_go(motion)

    return Pass(hold, let_go, lambda: call.buffers(motion))


def _forget_broken(placement) -> None:
    """Lets go of what a backward pass that raised has left held."""
    for way_back in list(placement.passes):
        way_back.end_backward()
