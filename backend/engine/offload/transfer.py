"""How weights that do not stay come to the modules that use them, and leave.

A block is fetched as a whole (from disk, or from RAM to an accelerator) ahead of its turn, and held while it computes; what has the
computation's dtype is used where it lies. What is stored otherwise, FP8 above all, is cast layer by layer into one reused buffer right
before that layer computes: a whole block in bfloat16 would be a large part of what FP8 has saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from backend.engine.loading.dequantize import Dequantizer
from backend.engine.loading.disk_reader import Layout, lay_out, views
from backend.engine.loading.fp8_storage import has_special, is_float8
from backend.engine.loading.gguf_dequantize import Blocks
from backend.engine.offload.blocks import Source, Unit, convert, stored_layout
from backend.engine.offload.prefetch import Buffers, Fetcher, Order, Slot

FACTOR = "_fp8_factor"  # the attribute of a layer that multiplies with codes
_KEYS = itertools.count()  # no layer's key is ever another's


@dataclass(eq=False)
class Layer:
    """A module that owns tensors of a unit, by their numbers in it."""

    module: nn.Module
    unit: Unit
    leaves: dict[int, str]
    key: int


class Motion:
    """Fetched and cast weights of one placed part. Not safe for several threads: the placement locks."""

    def __init__(self, reader, device: torch.device, dtype: torch.dtype, staging: int):
        self.device, self.dtype, self.staging = device, dtype, staging
        self.fetcher = Fetcher(reader, device)
        self.fetched = self.cast = None
        self._order = Order([])
        self._streamed: dict[int, Unit] = {}
        self._placeholders: dict[tuple, torch.Tensor] = {}
        self._casts: dict[int, tuple] = {}
        self._factors: dict[tuple[int, int], tuple[Source, torch.Tensor]] = {}  # one a row, on the device
        self._numbers: dict[
            tuple[int, int], tuple[Source, torch.Tensor]
        ] = {}  # of one number, for layers that multiply with codes

    def plan(self, streamed: Iterable[Unit], cast_bytes: int) -> None:
        """Sizes the buffers for blocks that are to be fetched and for layers that are to be cast. No memory is taken before it is needed."""
        self._streamed = {unit.position: unit for unit in streamed}
        positions = sorted(self._streamed)
        if positions != self._order.positions:
            self._order = Order(positions)
        self._order.restart()
        largest = max((source_of(unit).layout.nbytes for unit in self._streamed.values()), default=0)
        self.fetched = Buffers(largest, min(self.staging, len(positions)), self.device, self.fetcher.claim)
        self.cast = Buffers(cast_bytes, 1, self.device)

    def staging_bytes(self) -> int:
        return sum(slot.buffer.numel() for pool in (self.fetched, self.cast) if pool for slot in pool.slots)

    def streams(self, unit: Unit) -> bool:
        """Whether `unit` has to be fetched each time."""
        return unit.position in self._streamed

    def cast_layout(self, layer: Layer) -> Layout:
        """What of `layer` must be cast before it computes, as the computation takes it."""
        return self._to_cast(layer)[1]

    def _to_cast(self, layer: Layer) -> tuple[list[int], Layout]:
        source = source_of(layer.unit)
        known = self._casts.get(layer.key)
        if known is None or known[0] is not source:
            indices = [index for index in layer.leaves if layer.unit.casts(source, index)]
            fields = [layer.unit.computing.fields[index] for index in indices]
            known = self._casts[layer.key] = (source, indices, lay_out((field.dtype, field.shape) for field in fields))
        return known[1:]

    def hold(self, unit: Unit, direction: int = 1) -> Slot:
        """The slot with the bytes of `unit`, held until `let_go`; the first holder binds what needs no cast."""
        slot = self.fetched.find(unit.position)
        if slot is not None and slot.num_users:
            slot.num_users += 1
            return slot
        self._order.note(unit.position, direction)
        slot = slot or self._fetch(unit, must=True)
        self.fetcher.wait(slot)
        self.fetched.touch(slot)
        slot.num_users = 1
        try:
            self.bind_uncast(unit, self.tensors(unit))
            self.look_ahead()
        except BaseException:  # nobody will let go of what was never held
            slot.num_users = 0
            self._leave(unit, slot)
            raise
        return slot

    def is_held(self, unit: Unit) -> bool:
        slot = self.fetched.find(unit.position)
        return slot is not None and slot.num_users > 0

    def let_go(self, unit: Unit, *, look_ahead: bool = True) -> None:
        slot = self.fetched.find(unit.position)
        slot.num_users -= 1
        if slot.num_users == 0:
            self._leave(unit, slot)
            if look_ahead:
                self.look_ahead()

    def tensors(self, unit: Unit) -> list[torch.Tensor]:
        """The stored tensors of `unit` on the computing device; a streamed unit must be held."""
        if not self.streams(unit):
            return unit.stored.tensors
        slot, layout = self.fetched.find(unit.position), source_of(unit).layout
        if layout not in slot.views:
            slot.views[layout] = views(slot.buffer, layout)
        return slot.views[layout]

    def hold_layer(self, layer: Layer) -> Slot:
        """Casts what of `layer` needs it, unless that was just done, and binds it."""
        slot = self.cast.find(layer.key)
        if slot is None:
            slot = self.cast.take(layer.key, must=True)
            try:
                self._cast_into(slot, layer)
            except BaseException:  # else the next call would believe that the numbers are there
                slot.key = None
                raise
        self.cast.touch(slot)
        slot.num_users += 1
        if slot.num_users == 1:
            indices, layout = self._to_cast(layer)
            for index, tensor in zip(indices, slot.views[layout], strict=True):
                self.bind(layer.unit, index, tensor)
        return slot

    def let_go_layer(self, layer: Layer) -> None:
        slot = self.cast.find(layer.key)
        slot.num_users -= 1
        if slot.num_users == 0:
            for index in self._to_cast(layer)[0]:
                self.unbind(layer.unit, index)
            self.cast.trim()

    def bind_uncast(self, unit: Unit, tensors: list[torch.Tensor]) -> None:
        """Gives the modules what of `tensors` is as the computation takes it."""
        source = source_of(unit)
        for index, tensor in enumerate(tensors):
            if not unit.casts(source, index):
                self.bind(unit, index, tensor)
                if index in unit.codes:
                    self._give_factor(unit, source, index)

    def bind(self, unit: Unit, index: int, tensor: torch.Tensor) -> None:
        for owner, leaf in unit.targets[index]:
            if leaf in owner._parameters:
                owner._parameters[leaf].data = tensor
            else:
                owner._buffers[leaf] = tensor

    def _give_factor(self, unit: Unit, source: Source, index: int) -> None:
        """Tells a layer what its codes are to be multiplied with: a float32 tensor, of one number or of one a row."""
        factor = self._factor(unit, source, index)
        if not isinstance(factor, torch.Tensor):
            known = self._numbers.get((unit.position, index))
            if known is None or known[0] is not source:
                number = torch.full((1,), factor, dtype=torch.float32, device=self.device)
                known = self._numbers[unit.position, index] = (source, number)
            factor = known[1]
        for owner, _ in unit.targets[index]:
            owner.__dict__[FACTOR] = factor

    def _factor(self, unit: Unit, source: Source, index: int) -> float | torch.Tensor | Blocks | Dequantizer:
        """What tensor `index` is multiplied with; one a row lies on the computing device, where it was brought once."""
        known = self._factors.get((unit.position, index))
        if known is not None and known[0] is source:
            return known[1]
        factor = source.factors[index]
        if isinstance(factor, torch.Tensor):
            factor = factor.to(self.device)
            self._factors[unit.position, index] = (source, factor)
        return factor

    def unbind(self, unit: Unit, index: int) -> None:
        self.bind(unit, index, self.placeholder(unit, index))

    def placeholder(self, unit: Unit, index: int) -> torch.Tensor:
        """A tensor of the right shape, dtype and device, all NaN (False for what has none), that takes no memory."""
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
        """Gives the modules new parameters of the computation's shape, dtype and device (or on `device`) that hold no numbers yet."""
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
        """Begins to fetch what comes next, as far as buffers are free."""
        for position in self._ahead():
            if self.fetched.find(position) is None and self._fetch(self._streamed[position]) is None:
                return

    def _fetch(self, unit: Unit, *, must: bool = False) -> Slot | None:
        """A slot that `unit` is on its way to; None where none is free, unless it `must`."""
        slot = self.fetched.take(unit.position, keep=self._ahead(), must=must)
        if slot is None:
            return None
        try:
            self.fetcher.start(slot, _bytes_of(unit), source_of(unit).layout.nbytes)
        except BaseException:
            slot.key = None
            raise
        return slot

    def _leave(self, unit: Unit, slot: Slot) -> None:
        """Nobody holds `unit` any more: what follows may overwrite its slot."""
        self.fetcher.leave(slot)
        for index in range(len(unit.names)):
            self.unbind(unit, index)
        self.fetched.trim()

    def empty(self) -> None:
        """Gives the buffers back."""
        for pool in (self.fetched, self.cast):
            if pool is not None:
                pool.stop()
        self.fetcher.settle()
        for pool in (self.fetched, self.cast):
            if pool is not None:
                pool.slots.clear()
        self._casts.clear()  # they would keep weights alive that have left

    def close(self) -> None:
        self.empty()
        self.fetcher.close()
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
            if (
                source.special[index] is None and stored[index].device.type == "cpu"
            ):  # a card's own cast knows such codes
                source.special[index] = is_float8(stored[index].dtype) and has_special(stored[index])
            convert(stored[index], out, self._factor(layer.unit, source, index), source.special[index])


def source_of(unit: Unit) -> Source:
    """How the bytes that `unit` is computed from are stored now."""
    return unit.stored if unit.stored is not None else unit.on_disk


def _bytes_of(unit: Unit):
    return unit.spans if unit.stored is None else unit.stored.buffer


def find_layers(units: list[Unit], whole: bool = False) -> list[Layer]:
    """The modules that own tensors, unit by unit; with `whole`, each block as if it were one layer."""
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
    """What casting `layer` takes when its unit lies as `stored`."""
    computing, factors = layer.unit.computing.fields, layer.unit.on_disk.factors
    changed = [
        index
        for index in layer.leaves
        if stored.fields[index].dtype != computing[index].dtype
        or isinstance(factors[index], torch.Tensor)
        or factors[index] != 1.0
    ]
    return lay_out((computing[index].dtype, computing[index].shape) for index in changed).nbytes


def cast_on_the_way(blocks: list[Unit], dtype: torch.dtype) -> int:
    """The largest tensor of the file, in bytes, that is cast on the computing device before it waits there as `dtype`."""
    pairs = [pair for unit in blocks for pair in zip(unit.raw.fields, stored_layout(unit, dtype).fields, strict=True)]
    return max((raw.nbytes for raw, stored in pairs if raw.dtype != stored.dtype), default=0)
