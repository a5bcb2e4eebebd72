"""A tape of every tensor storage that a piece of torch code makes and drops, as a CUDA device would see it.

The code runs on fake CPU tensors (sizes without contents), so it needs neither weights nor a card. Fake CUDA tensors
are of no use: their backward aborts in a build without CUDA. What a card does otherwise than the CPU is put in its
place while the tape runs:

* attention: the fused kernel keeps q, k, v, its output and one float32 per row; its backward needs a float32
  accumulator for dq;
* `rms_norm`: one kernel that keeps its input and one float32 per row;
* convolutions in 16 bits: cuDNN turns input, output and filter into channels-last copies in its workspace.

These are replaced functions, not a torch function mode: a mode is left during `backward`, and recomputation under
checkpointing would then run another kernel than the forward did.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))


@dataclass
class Tape:
    """`sizes[i]` bytes of storage i; `events` in order: i for its making, ~i for its end. `marks` name positions in
    `events`."""

    sizes: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)  # storages that exist only inside one kernel of CUDA's
    linear_flops: int = 0  # multiply-adds of matrix products and convolutions, times two
    attention_flops: int = 0

    def mark(self, name: str) -> None:
        self.marks[name] = len(self.events)

    def transient(self, nbytes: int) -> None:
        """Bytes that exist only inside one kernel."""
        self.sizes.append(int(nbytes))
        self.inside.add(len(self.sizes) - 1)
        self.events += (len(self.sizes) - 1, ~(len(self.sizes) - 1))

    def outside(self) -> Tape:
        """The same without what exists only inside a kernel of CUDA's."""
        return Tape(self.sizes, [event for event in self.events if max(event, ~event) not in self.inside])


def rounded(nbytes: int) -> int:
    """As torch's allocator rounds a block."""
    return -(-nbytes // 512) * 512


def live(tape: Tape) -> Iterator[int]:
    """Bytes alive after each event."""
    now = 0
    for event in tape.events:
        now += rounded(tape.sizes[event]) if event >= 0 else -rounded(tape.sizes[~event])
        yield now


def peak(tape: Tape) -> int:
    """The most bytes alive at once."""
    return max(live(tape), default=0)


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape, workspace: bool):
        super().__init__()
        self.tape, self.workspace, self.known = tape, workspace, WeakIdKeyDictionary()

    def watch(self, storage) -> None:
        if storage in self.known:
            return
        tape, index = self.tape, len(self.tape.sizes)
        self.known[storage] = index
        tape.sizes.append(storage.nbytes())
        tape.events.append(index)
        weakref.finalize(storage, tape.events.append, ~index).atexit = False

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count this tensor's storage: it is accounted for elsewhere (weights)."""
        self.known[tensor.untyped_storage()] = -1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            for tensor in item if isinstance(item, tuple | list) else (item,):
                if isinstance(tensor, torch.Tensor):
                    self.watch(tensor.untyped_storage())
        name = func.overloadpacket.__name__
        if name in PRODUCTS and isinstance(result, torch.Tensor):
            self.tape.linear_flops += 2 * result.numel() * args[-2].shape[-1]
        elif name == "convolution":
            self._convolution(args, result)
        return result

    def _convolution(self, args, result) -> None:
        source, weight = args[0], args[1]
        self.tape.linear_flops += 2 * result.numel() * math.prod(weight.shape[1:])
        if self.workspace and source.element_size() == 2:
            self.tape.transient(source.nbytes + result.nbytes + weight.nbytes)


class _Attention(torch.autograd.Function):
    """Shapes and lifetimes of flash attention; its numbers mean nothing."""

    @staticmethod
    def forward(ctx, query, key, value, tape):
        batch, heads, length, _ = query.shape
        width = value.shape[-1]
        out = query.new_empty((batch, length, heads, width)).transpose(1, 2)
        row_sums = query.new_empty((batch, heads, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, row_sums)
        ctx.tape = tape
        tape.attention_flops += 2 * batch * heads * length * key.shape[-2] * (query.shape[-1] + width)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, row_sums = ctx.saved_tensors
        dots = torch.empty_like(row_sums)
        accumulator = query.new_empty(query.shape, dtype=torch.float32)
        # one repeated forward and four more products of the same size
        ctx.tape.attention_flops += 5 * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * query.shape[3]
        del dots
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del accumulator
        return *grads, None


class _RmsNorm(torch.autograd.Function):
    """Shapes and lifetimes of the fused kernel."""

    @staticmethod
    def forward(ctx, source, weight):
        scale = source.new_empty((*source.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(source, weight, scale)
        return torch.empty_like(source)

    @staticmethod
    def backward(ctx, grad):
        source, weight, _ = ctx.saved_tensors
        return torch.empty_like(source), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


@contextlib.contextmanager
def _as_on_cuda(tape: Tape):
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        return _Attention.apply(query, key, value, tape)

    def rms_norm(input, normalized_shape, weight=None, eps=None):
        if weight is None:
            weight = input.new_ones(normalized_shape)
        return _RmsNorm.apply(input, weight)

    kept = F.scaled_dot_product_attention, F.rms_norm
    F.scaled_dot_product_attention, F.rms_norm = attention, rms_norm
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.rms_norm = kept


def record(work: Callable[[Tape], object], *, weights=(), workspace: bool = True, fake: bool = True) -> Tape:
    """Run `work(tape)` and return what it made and dropped; `weights` (tensors) are not counted.

    With `fake` the code must run under a `FakeTensorMode` that the caller holds (see `fakes`) and is counted as on
    CUDA; without, real tensors are counted as they are, which is how the prediction is held against the truth.
    """
    tape = Tape()
    recorder = _Recorder(tape, workspace)
    for tensor in weights:
        recorder.ignore(tensor)
    with _as_on_cuda(tape) if fake else contextlib.nullcontext(), recorder:
        result = work(tape)
    tape.mark("end")
    del result
    return tape


def fakes() -> FakeTensorMode:
    """A mode in which new tensors have sizes and no contents."""
    return FakeTensorMode(allow_non_fake_inputs=True)
