"""Autograd for offloaded weights: saved-tensor hooks keep buffer offsets; the backward pass fetches the weights again.

A block's weights (or a layer's, cast from FP8) lie in a prefetch buffer that the next block overwrites, so autograd
must neither save views of it (it would compute with other numbers) nor keep it alive. Three things make that true
for any module, whatever it is built from:

* saved-tensor hooks store what lies in such a buffer as a `BufferView` (buffer, offset, shape), not as memory;
* an identity `Function` on each output of the module fetches or casts its weights again before its backward begins;
* an identity `Function` on its inputs releases them when its backward is done.

So an FP8 or streamed block costs a training step one more cast and one more transfer, and no memory. Works with
activation checkpointing (`torch.utils.checkpoint`, reentrant or not): the recomputation is one more call of the block
while it is held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from torch.autograd import Function, Variable
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class BufferView:
    """A saved tensor that is a view of a prefetch buffer. `buffer()` is that buffer (uint8), filled again, in the
    backward pass."""

    buffer: Callable[[], torch.Tensor]
    offset: int  # bytes
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """The view, of shape `size`."""
        flat = self.buffer()
        whole = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.size, self.stride, self.offset // self.dtype.itemsize)


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor that is no offloaded weight, and its version counter when it was saved."""

    value: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        """The tensor as saved, in its own shape. Raises RuntimeError where it was changed in place since, as autograd
        does."""
        if self.value._version != self.version:
            raise RuntimeError("A tensor that the backward pass needs was changed in place after it was saved.")
        return self.value


@dataclass(frozen=True)
class PackedByOuterHooks:
    """What saved-tensor hooks around the module (of a block around this layer, activation checkpointing, activation
    offload) made of a saved tensor. It is freed with the graph's node, unlike the pass itself: those hooks hold a
    checkpoint's inputs."""

    unpack: Callable[[object], torch.Tensor]
    packed: object

    def tensor(self) -> torch.Tensor:
        """The tensor in its own shape, unpacked by those hooks."""
        return self.unpack(self.packed)


class OffloadedPass:
    """One call, with gradients, of a module with offloaded weights: its forward, and later its backward.

    `acquire(pass)` fetches the weights, `release(pass)` lets their buffers be overwritten; `buffers()` lists, while
    they are held, the buffers that they lie in, always in the same order. None of the three may refer to the pass, and
    while weights are held the placement must: what the graph keeps has to be freed the moment that the graph is.
    """

    def __init__(
        self,
        acquire: Callable[[OffloadedPass], None],
        release: Callable[[OffloadedPass], None],
        buffers: Callable[[], list[torch.Tensor]],
    ):
        self._acquire, self._release, self._buffers = acquire, release, buffers
        self.held = False
        self._addresses: dict[int, int] = {}  # of a buffer's memory to its index
        self._hooks: saved_tensors_hooks | None = None
        self._outer: tuple[Callable, Callable] | None = None  # pack and unpack of the hooks around this call

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Called before the module's forward, its weights being held; the arguments to call it with."""
        self._addresses = {buffer.untyped_storage().data_ptr(): index for index, buffer in enumerate(self._buffers())}
        autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]  (private, not in the stubs)
        self._outer = autograd._top_saved_tensors_default_hooks(False)
        args, kwargs = _wrap_inputs(self, args, kwargs)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return args, kwargs

    def leave(self) -> None:
        """Called after the module's forward, also when it raised."""
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = self._outer = None

    def outputs(self, output: Any) -> Any:
        """The module's `output` (a tensor, or tuples, lists and dicts of them), wrapped so that the weights are
        fetched again when a gradient arrives. Each tensor is wrapped by itself: the backward pass then does not enter
        what leads only to an unused one, as it would not without this."""
        return _map_tensors(output, lambda tensor: _Outputs.apply(self, tensor))

    def begin_backward(self) -> None:
        """Fetches the weights again, and registers their release at the end of the whole backward pass."""
        if not self.held:
            self._acquire(self)
            self.held = True
            Variable._execution_engine.queue_callback(_if_alive(self.end_backward))

    def end_backward(self) -> None:
        """Releases the weights. Also called at the end of the whole backward pass: `_Inputs.backward` never runs where
        no input needs a gradient."""
        if self.held:
            self.held = False
            self._release(self)

    def _pack(self, tensor: torch.Tensor):
        index = self._addresses.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
        if index is not None:
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return BufferView(
                lambda: self._buffer(index), offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
            )
        if self._outer is not None:
            pack, unpack = self._outer
            return PackedByOuterHooks(unpack, pack(tensor))
        return SavedTensor(tensor.detach(), tensor._version)

    def _unpack(self, saved: BufferView | SavedTensor | PackedByOuterHooks) -> torch.Tensor:
        return saved.tensor()

    def _buffer(self, index: int) -> torch.Tensor:
        self.begin_backward()
        return self._buffers()[index]


def _if_alive(method: Callable[[], None]) -> Callable[[], None]:
    """Calls `method` later without keeping its object (and what that pass saved) alive until then."""
    reference = WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    return call


class _Inputs(Function):
    """Identity on the inputs; its backward runs when the module's backward is done.

    (A detached alias may be changed in place by the module, a view might not.)
    """

    @staticmethod
    def forward(ctx, owner: OffloadedPass, *tensors):
        ctx.set_materialize_grads(False)  # an unused input has no gradient (None), rather than one of zeros
        ctx.owner = owner
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.owner.end_backward()
        return None, *gradients


class _Outputs(Function):
    """Identity on one output; its backward runs right before the module's backward begins."""

    @staticmethod
    def forward(ctx, owner: OffloadedPass, tensor: torch.Tensor):
        ctx.owner = owner
        return tensor.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.owner.begin_backward()
        return None, gradient


def _wrap_inputs(owner: OffloadedPass, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with every tensor that needs a gradient passed through one `_Inputs`: the module's backward is
    done when all of them have their gradients."""
    found: list[torch.Tensor] = []
    _map_tensors((args, kwargs), lambda tensor: found.append(tensor) or tensor)
    if not found:
        return args, kwargs
    replaced = iter(_Inputs.apply(owner, *found))
    return _map_tensors((args, kwargs), lambda tensor: next(replaced))


def _map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`tree` (tuples, named tuples, lists, dicts) with `change` applied to each tensor that needs a gradient."""
    if isinstance(tree, torch.Tensor):
        return change(tree) if tree.requires_grad else tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map_tensors(item, change) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_map_tensors(item, change) for item in tree)
    if type(tree) is dict:
        return {key: _map_tensors(item, change) for key, item in tree.items()}
    return tree
