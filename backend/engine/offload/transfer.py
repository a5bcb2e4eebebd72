"""Weight transfer of offloaded parts: block prefetch, and per-layer casting and dequantization into reused buffers.

A block is fetched as a whole (from disk, or from RAM to an accelerator) ahead of its turn, and held while it computes;
what has the computation's dtype is used from the fetched buffer. What is stored otherwise, FP8 above all, is cast
layer by layer into one reused buffer right before that layer computes: a whole block in bfloat16 would be a large part
of what FP8 has saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from backend.engine.loading.dequantize import Dequantizer
from backend.engine.loading.disk_reader import Layout, Reader, Span, lay_out, views
from backend.engine.loading.fp8_storage import has_nonfinite, is_float8
from backend.engine.loading.gguf_dequantize import GgufBlocks
from backend.engine.offload.blocks import Factor, Source, Unit, convert, stored_layout
from backend.engine.offload.prefetch import BufferPool, Prefetcher, PrefetchOrder, Slot

FP8_SCALE = "_fp8_scale"  # the attribute of a layer that multiplies in FP8 (`fp8_matmul`): its weight's scale
_KEYS = itertools.count()  # of layers: unique within the process


@dataclass(eq=False)
class Layer:
    """A module that owns tensors of a unit (or a whole block, where blocks are cast as a whole)."""

    module: nn.Module
    unit: Unit
    leaves: dict[int, str]  # a tensor's index in the unit -> its attribute ("weight")
    key: int  # of its slot in the cast buffer


class WeightTransfer:
    """Prefetched and cast weights of one offloaded part. Not thread-safe: the placement locks.

    `staging`: number of prefetch buffers.
    """

    def __init__(self, reader: Reader, device: torch.device, dtype: torch.dtype, staging: int):
        self.device, self.dtype, self.staging = device, dtype, staging
        self.prefetcher = Prefetcher(reader, device)
        self.fetched, self.cast = BufferPool(0, 0, device), BufferPool(0, 0, device)
        self._order = PrefetchOrder([])
        self._streamed: dict[int, Unit] = {}
        self._placeholders: dict[tuple[torch.dtype, tuple[int, ...]], torch.Tensor] = {}
        self._casts: dict[int, tuple[Source, list[int], Layout]] = {}  # by layer, for that source
        # scales on the device by (block, tensor), for that source: one a row; and single numbers, for FP8 matmuls
        self._factors: dict[tuple[int, int], tuple[Source, torch.Tensor]] = {}
        self._numbers: dict[tuple[int, int], tuple[Source, torch.Tensor]] = {}

    def plan(self, streamed: Iterable[Unit], cast_bytes: int) -> None:
        """Sizes the buffers: for prefetching the blocks `streamed`, and `cast_bytes` for the largest layer that is
        cast. Nothing is allocated before it is needed."""
        self._streamed = {unit.position: unit for unit in streamed}
        positions = sorted(self._streamed)
        if positions != self._order.positions:
            self._order = PrefetchOrder(positions)
        self._order.restart()
        largest = max((source_of(unit).layout.nbytes for unit in self._streamed.values()), default=0)
        self.fetched = BufferPool(
            largest, min(self.staging, len(positions)), self.device, self.prefetcher.record_stream
        )
        self.cast = BufferPool(cast_bytes, 1, self.device)

    def staging_bytes(self) -> int:
        """Bytes of the buffers allocated now, for prefetching and for casting."""
        return sum(slot.buffer.numel() for pool in (self.fetched, self.cast) for slot in pool.slots)

    def streams(self, unit: Unit) -> bool:
        """Whether `unit` is fetched each time that it is used."""
        return unit.position in self._streamed

    def cast_layout(self, layer: Layer) -> Layout:
        """The tensors of `layer` that must be cast or dequantized before its forward, in the computation's dtype."""
        return self._to_cast(layer)[1]

    def _to_cast(self, layer: Layer) -> tuple[list[int], Layout]:
        source = source_of(layer.unit)
        known = self._casts.get(layer.key)
        if known is None or known[0] is not source:
            indices = [index for index in layer.leaves if layer.unit.casts(source, index)]
            fields = [layer.unit.computing.fields[index] for index in indices]
            known = self._casts[layer.key] = (source, indices, lay_out((field.dtype, field.shape) for field in fields))
        return known[1], known[2]

    def acquire(self, unit: Unit, direction: int = 1) -> Slot:
        """Waits for the prefetched bytes of `unit` and keeps them until `release`; starts prefetching the next blocks.
        The first of several calls binds the tensors that need no cast to their modules. `direction`: -1 in backward."""
        slot = self.fetched.find(unit.position)
        if slot is not None and slot.num_users:
            slot.num_users += 1
            return slot
        self._order.note(unit.position, direction)
        if slot is None:
            slot = self.fetched.take(unit.position, keep=self._ahead(), required=True)
            self._fill(slot, unit)
        self.prefetcher.wait(slot)
        self.fetched.touch(slot)
        slot.num_users = 1
        try:
            self.bind_uncast(unit, self.tensors(unit))
            self.look_ahead()
        except BaseException:  # the caller will not release what it did not get
            slot.num_users = 0
            self._unbind_all(unit, slot)
            raise
        return slot

    def is_held(self, unit: Unit) -> bool:
        """Whether `unit` was acquired and not yet released."""
        slot = self.fetched.find(unit.position)
        return slot is not None and slot.num_users > 0

    def release(self, unit: Unit, *, look_ahead: bool = True) -> None:
        """Ends an `acquire`; after the last one the buffer may be overwritten, and the next blocks are prefetched."""
        slot = self.fetched[unit.position]
        slot.num_users -= 1
        if slot.num_users == 0:
            self._unbind_all(unit, slot)
            if look_ahead:
                self.look_ahead()

    def tensors(self, unit: Unit) -> list[torch.Tensor]:
        """The stored (not yet cast) tensors of `unit` on the computing device, in the shapes and dtypes of
        `source_of(unit).layout`; a streamed unit must be acquired."""
        if not self.streams(unit):
            assert unit.stored is not None, "a unit that is not streamed lies in memory"
            return unit.stored.tensors
        slot, layout = self.fetched[unit.position], source_of(unit).layout
        if layout not in slot.views:
            slot.views[layout] = views(slot.buffer, layout)
        return slot.views[layout]

    def acquire_layer(self, layer: Layer) -> Slot:
        """Casts or dequantizes the weights of `layer` into the cast buffer (unless they are still there), and binds
        them to the module until `release_layer`."""
        slot = self.cast.find(layer.key)
        if slot is None:
            slot = self.cast.take(layer.key, required=True)
            try:
                self._cast_into(slot, layer)
            except BaseException:  # else the next call would take the buffer for complete
                slot.key = None
                raise
        self.cast.touch(slot)
        slot.num_users += 1
        if slot.num_users == 1:
            indices, layout = self._to_cast(layer)
            for index, tensor in zip(indices, slot.views[layout], strict=True):
                self.bind(layer.unit, index, tensor)
        return slot

    def release_layer(self, layer: Layer) -> None:
        """Ends an `acquire_layer`: the module gets placeholders, and the cast buffer may be overwritten."""
        slot = self.cast[layer.key]
        slot.num_users -= 1
        if slot.num_users == 0:
            for index in self._to_cast(layer)[0]:
                self.unbind(layer.unit, index)
            self.cast.trim()

    def bind_uncast(self, unit: Unit, tensors: list[torch.Tensor]) -> None:
        """Binds those of `tensors` (all of `unit`'s, as stored) that need no cast to the modules."""
        source = source_of(unit)
        for index, tensor in enumerate(tensors):
            if not unit.casts(source, index):
                self.bind(unit, index, tensor)
                if index in unit.fp8_codes:
                    self._set_fp8_scale(unit, source, index)

    def bind(self, unit: Unit, index: int, tensor: torch.Tensor) -> None:
        """Makes `tensor` the data of the parameters or buffers that are tensor `index` of `unit`, in their shape."""
        for owner, leaf in unit.targets[index]:
            parameter = owner._parameters.get(leaf)
            if parameter is not None:
                parameter.data = tensor
            else:
                owner._buffers[leaf] = tensor

    def _set_fp8_scale(self, unit: Unit, source: Source, index: int) -> None:
        """Gives a layer that multiplies in FP8 its weight's scale: float32, of shape (1,) or one a row."""
        factor = self._factor(unit, source, index)
        assert not isinstance(factor, GgufBlocks | Dequantizer), "only plain FP8 codes are multiplied"
        if not isinstance(factor, torch.Tensor):
            known = self._numbers.get((unit.position, index))
            if known is None or known[0] is not source:
                number = torch.full((1,), factor, dtype=torch.float32, device=self.device)
                known = self._numbers[unit.position, index] = (source, number)
            factor = known[1]
        for owner, _ in unit.targets[index]:
            owner.__dict__[FP8_SCALE] = factor

    def _factor(self, unit: Unit, source: Source, index: int) -> Factor:
        """The scale or dequantizer of tensor `index`; scales per row are copied to the computing device once."""
        known = self._factors.get((unit.position, index))
        if known is not None and known[0] is source:
            return known[1]
        factor = source.factors[index]
        if isinstance(factor, torch.Tensor):
            factor = factor.to(self.device)
            self._factors[unit.position, index] = (source, factor)
        return factor

    def unbind(self, unit: Unit, index: int) -> None:
        """Binds a placeholder instead of tensor `index`."""
        self.bind(unit, index, self.placeholder(unit, index))

    def placeholder(self, unit: Unit, index: int) -> torch.Tensor:
        """A tensor of the computation's shape, dtype and device, all NaN (0 for integers), that takes no memory: one
        number, expanded."""
        field = unit.computing.fields[index]
        key = (field.dtype, field.shape)
        if key not in self._placeholders:
            with torch.inference_mode(False):
                nothing = torch.full(
                    (), float("nan") if field.dtype.is_floating_point else 0, dtype=field.dtype, device=self.device
                )
                self._placeholders[key] = nothing.expand(field.shape)
        return self._placeholders[key]

    def make_parameters(self, units: Iterable[Unit], device: str | None = None) -> None:
        """Gives the modules new parameters of the computation's shape, dtype and device (or on `device`, "meta"),
        without numbers."""
        for unit in units:
            for index, places in enumerate(unit.targets):
                field = unit.computing.fields[index]
                with torch.inference_mode(False):
                    if device is None:
                        nothing = self.placeholder(unit, index)
                    else:
                        nothing = torch.empty(field.shape, dtype=field.dtype, device=device)
                    parameter = nn.Parameter(nothing, requires_grad=False)
                for owner, leaf in places:
                    if leaf in owner._parameters:
                        owner._parameters[leaf] = parameter
                    else:
                        owner._buffers[leaf] = nothing

    def look_ahead(self) -> None:
        """Starts prefetching the next blocks, as far as buffers are free."""
        for position in self._ahead():
            if self.fetched.find(position) is None:
                slot = self.fetched.take(position, keep=self._ahead())
                if slot is None:
                    return
                self._fill(slot, self._streamed[position])

    def _fill(self, slot: Slot, unit: Unit) -> None:
        """Starts fetching `unit` into `slot`."""
        try:
            self.prefetcher.start(slot, _bytes_of(unit), source_of(unit).layout.nbytes)
        except BaseException:
            slot.key = None
            raise

    def _unbind_all(self, unit: Unit, slot: Slot) -> None:
        """After the last user of `unit`: what is launched later may overwrite its slot."""
        self.prefetcher.record_use(slot)
        for index in range(len(unit.names)):
            self.unbind(unit, index)
        self.fetched.trim()

    def empty(self) -> None:
        """Frees the buffers, once transfers under way have ended."""
        for pool in (self.fetched, self.cast):
            pool.stop()
        self.prefetcher.synchronize()
        for pool in (self.fetched, self.cast):
            pool.slots.clear()
        self._casts.clear()  # they would keep weights alive that were offloaded

    def close(self) -> None:
        """Frees the buffers and ends the reader thread."""
        self.empty()
        self.prefetcher.close()
        self._placeholders.clear()
        self._factors.clear()
        self._numbers.clear()

    def _ahead(self) -> tuple[int, ...]:
        return tuple(self._order.ahead(self.fetched.count))

    def _cast_into(self, slot: Slot, layer: Layer) -> None:
        source, stored = source_of(layer.unit), self.tensors(layer.unit)
        indices, layout = self._to_cast(layer)
        if layout not in slot.views:
            slot.views[layout] = views(slot.buffer, layout)
        for index, out in zip(indices, slot.views[layout], strict=True):
            # only the CPU's cast needs to know of NaN and Inf codes; an accelerator's casts them rightly
            if source.nonfinite[index] is None and stored[index].device.type == "cpu":
                source.nonfinite[index] = is_float8(stored[index].dtype) and has_nonfinite(stored[index])
            convert(stored[index], out, self._factor(layer.unit, source, index), source.nonfinite[index])


def source_of(unit: Unit) -> Source:
    """How the weights of `unit` are stored now: in memory, else on disk."""
    return unit.stored if unit.stored is not None else unit.on_disk


def _bytes_of(unit: Unit) -> torch.Tensor | tuple[Span, ...]:
    if unit.stored is None:
        return unit.spans
    assert unit.stored.buffer is not None, "a unit that is fetched lies in one buffer"
    return unit.stored.buffer


def find_layers(units: list[Unit], whole: bool = False) -> list[Layer]:
    """The modules that own tensors, unit by unit; with `whole`, each block as one layer (cast as a whole)."""
    found: list[Layer] = []
    for unit in units:
        if whole and unit.block:
            found.append(Layer(unit.module, unit, dict.fromkeys(range(len(unit.names)), ""), next(_KEYS)))
            continue
        owned: dict[nn.Module, dict[int, str]] = {}
        for index, places in enumerate(unit.targets):
            for owner, leaf in places:
                owned.setdefault(owner, {})[index] = leaf
        for owner, leaves in owned.items():
            found.append(Layer(owner, unit, leaves, next(_KEYS)))
    return found


def cast_bytes(layer: Layer, stored: Layout) -> int:
    """Bytes that casting `layer` takes when its unit is stored as `stored`."""
    computing, factors = layer.unit.computing.fields, layer.unit.on_disk.factors
    changed = [
        index
        for index in layer.leaves
        if stored.fields[index].dtype != computing[index].dtype
        or isinstance(factors[index], torch.Tensor)
        or factors[index] != 1.0
    ]
    return lay_out((computing[index].dtype, computing[index].shape) for index in changed).nbytes


def cast_before_storing_bytes(blocks: list[Unit], dtype: torch.dtype) -> int:
    """Bytes of the largest tensor of the file that is cast on the computing device before it stays there as `dtype`."""
    pairs = [pair for unit in blocks for pair in zip(unit.raw.fields, stored_layout(unit, dtype).fields, strict=True)]
    return max((raw.nbytes for raw, stored in pairs if raw.dtype != stored.dtype), default=0)
