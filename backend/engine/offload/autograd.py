"""Weights that do not stay, under autograd: the graph keeps nothing of a staging buffer, and the backward pass finds the weights again.

A block's (or, cast from FP8, a layer's) weights lie in a buffer that the next one overwrites, so autograd must neither keep views of it (it would compute with
other numbers) nor keep it alive. Three things make that true for any module, whatever it is built from:

* what autograd saves inside the module and what lies in such a buffer is kept as a *place* (buffer, offset, shape), not as memory;
* an identity on each of the module's outputs fetches or casts its weights again before its backward begins;
* an identity on its inputs lets them go when its backward is done.

So an FP8 or streamed block costs a training step one more cast and one more transfer, and no memory. Works with `torch.utils.checkpoint` in both
forms: the recomputation is one more call of the block within the same holding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch.autograd import Function, Variable
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class Place:
    """Where in a buffer a saved tensor lies. `buffer()` gives that buffer with the right contents, in the backward pass."""

    buffer: Callable[[], torch.Tensor]
    offset: int  # bytes
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        flat = self.buffer()
        whole = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.size, self.stride, self.offset // self.dtype.itemsize)


@dataclass(frozen=True)
class Kept:
    """A saved tensor that is no weight, and its version when it was saved."""

    value: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        if self.value._version != self.version:
            raise RuntimeError("A tensor that the backward pass needs was changed in place after it was saved.")
        return self.value


@dataclass(frozen=True)
class Elsewhere:
    """What hooks around the module (a block around this layer, checkpointing, activations kept in RAM) made of a saved tensor. It goes with the graph's
    node, as the pass itself does not: those hooks hold a checkpoint's inputs."""

    unpack: Callable
    packed: object

    def tensor(self) -> torch.Tensor:
        return self.unpack(self.packed)


class Pass:
    """One call, with gradients, of a module whose weights do not stay: from its inputs to its outputs, and back.

    `hold` brings the weights, `let_go` releases them, each told of this pass; `buffers` gives, while they are held, the buffers that they lie in, and
    always in the same order. None of them may refer to the pass, and while its
    weights are held somebody else must: what the graph keeps has to go the moment that the graph goes.
    """

    def __init__(
        self, hold: Callable[[Pass], None], let_go: Callable[[Pass], None], buffers: Callable[[], list[torch.Tensor]]
    ):
        self._hold, self._let_go, self._buffers = hold, let_go, buffers
        self.held = False
        self._addresses: dict[int, int] = {}
        self._hooks = self._outer = None

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Called before the module, its weights being held; answers the arguments to call it with."""
        self._addresses = {buffer.untyped_storage().data_ptr(): index for index, buffer in enumerate(self._buffers())}
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        args, kwargs = _watched(self, (args, kwargs))
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return args, kwargs

    def leave(self) -> None:
        """Called after the module, also when it raised."""
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = self._outer = None

    def outputs(self, output):
        """What the module answers, made to fetch the weights again when a gradient arrives. Each tensor by itself: the backward pass then never
        enters what leads only to one that nobody uses, as it would not without this."""
        return _visit(output, lambda tensor: _Outputs.apply(self, tensor))

    def begin_backward(self) -> None:
        if not self.held:
            self._hold(self)
            self.held = True
            Variable._execution_engine.queue_callback(_if_alive(self.end_backward))

    def end_backward(self) -> None:
        """Also called at the end of the whole backward pass: inputs without a gradient never tell."""
        if self.held:
            self.held = False
            self._let_go(self)

    def _pack(self, tensor: torch.Tensor):
        index = self._addresses.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
        if index is not None:
            offset = tensor.storage_offset() * tensor.element_size()
            return Place(lambda: self._buffer(index), offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        if self._outer is not None:
            pack, unpack = self._outer
            return Elsewhere(unpack, pack(tensor))
        return Kept(tensor.detach(), tensor._version)

    def _unpack(self, saved: Place | Kept | Elsewhere) -> torch.Tensor:
        return saved.tensor()

    def _buffer(self, index: int) -> torch.Tensor:
        self.begin_backward()
        return self._buffers()[index]


def _if_alive(method: Callable[[], None]) -> Callable[[], None]:
    """A call of `method` that does not keep its object, and with it what that pass saved, until then."""
    reference = WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    return call


class _Inputs(Function):
    """The tensors themselves; in the backward pass the module is done. (A detached alias may be changed in place, a view might not.)"""

    @staticmethod
    def forward(ctx, owner: Pass, *tensors):
        ctx.set_materialize_grads(False)  # an input that nothing reads has no gradient, not one of zeros
        ctx.owner = owner
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.owner.end_backward()
        return None, *gradients


class _Outputs(Function):
    """A tensor itself; in the backward pass the module is about to begin."""

    @staticmethod
    def forward(ctx, owner: Pass, tensor: torch.Tensor):
        ctx.owner = owner
        return tensor.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.owner.begin_backward()
        return None, gradient


def _watched(owner: Pass, tree):
    """`tree` with every tensor in it that needs a gradient passed through `_Inputs`, all at once: the module is done when all have theirs."""
    found: list[torch.Tensor] = []
    _visit(tree, lambda tensor: found.append(tensor) or tensor)
    if not found:
        return tree
    replaced = iter(_Inputs.apply(owner, *found))
    return _visit(tree, lambda tensor: next(replaced))


def _visit(tree, change: Callable[[torch.Tensor], torch.Tensor]):
    """`tree` (tuples, lists, dicts and named results of them) with `change` applied to each tensor that needs a gradient."""
    if isinstance(tree, torch.Tensor):
        return change(tree) if tree.requires_grad else tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_visit(item, change) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_visit(item, change) for item in tree)
    if type(tree) is dict:
        return {key: _visit(item, change) for key, item in tree.items()}
    return tree
