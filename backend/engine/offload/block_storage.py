"""A unit's weights brought into a state: mapped, read, rounded to FP8 or copied to a device, without a second copy of anything.

What lies in the file as it is wanted, in RAM that computes, is a private view of the mapped file. Everything else goes through one scratch buffer
of the size of the largest tensor, so that loading never needs more than what is to stay and that buffer.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import torch

from backend.engine.devices import device_memory
from backend.engine.loading import load
from backend.engine.loading.disk_reader import Layout, allocate, lay_out, spans_of, views
from backend.engine.loading.pinned_copy import Pump
from backend.engine.offload.blocks import Stored, Unit, convert, stored_layout
from backend.engine.offload.pinned_memory import Pinned
from backend.engine.offload.prefetch import Arrival
from backend.engine.offload.vram_states import State

PINNED_SCRATCH = (
    256 << 20
)  # bytes; larger tensors (an embedding's) are few, and torch would pin up to twice as much for them


class Residence:
    """Makes `Stored`s for a part of `nbytes` that computes on `computing`. `finish` after a run of `bring`s frees what was needed for them only."""

    def __init__(self, reader, computing: torch.device, nbytes: int):
        self.reader, self.computing = reader, computing
        self._maps: dict[Path, mmap.mmap] = {}
        self._scratch: torch.Tensor | None = None
        self._nbytes = nbytes
        self._pinned: Pinned | None = None
        self._pump: Pump | None = None
        self._coming: dict[tuple[int, State], tuple[torch.Tensor, Arrival]] = {}

    def bring(self, unit: Unit, state: State, source: Stored | None) -> Stored | None:
        """The weights of `unit` in `state`, copied from `source` where that holds the same numbers, else from the file; None on disk."""
        if state.on_disk:
            return None
        layout = stored_layout(unit, state.dtype)
        buffer, arrive = self._coming.pop((unit.position, state), (None, None))
        if arrive is not None:
            arrive()
            return Stored(layout, source.factors, source.special, state, views(buffer, layout), buffer, layout.nbytes)
        if device_memory.is_ram(state.device) and device_memory.is_ram(self.computing):
            return self._in_ram(unit, state, layout)
        buffer = self._buffer(layout.nbytes, state.device)
        if source is not None and source.layout == layout and source.buffer is not None:
            # nothing waits for a copy to a card here: what uses it is launched behind it, and pinned RAM is not handed on before
            buffer.copy_(source.buffer, non_blocking=not device_memory.is_ram(state.device))
            return Stored(layout, source.factors, source.special, state, views(buffer, layout), buffer, layout.nbytes)
        return self._read_into(unit, state, layout, buffer)

    def begin(self, unit: Unit, state: State, send: Callable[[torch.Tensor, torch.Tensor], Arrival | None]) -> None:
        """The weights of `unit`, which wait in pinned RAM as `state` wants them, begin to come beside what computes; `bring` finds them."""
        source = unit.stored
        if source is None or source.buffer is None or source.layout != stored_layout(unit, state.dtype):
            return
        if (
            device_memory.is_ram(state.device)
            or (unit.position, state) in self._coming
            or not source.buffer.is_pinned()
        ):
            return
        buffer = allocate(source.layout.nbytes, state.device)
        arrive = send(source.buffer, buffer)
        if arrive is not None:
            self._coming[unit.position, state] = buffer, arrive

    def forget(self) -> None:
        """Nobody comes for what has begun to come."""
        self._coming.clear()

    def finish(self) -> None:
        """Drops the scratch buffers and the mappings; views of a mapping keep it alive."""
        self._maps.clear()
        self._scratch = self._pinned = self._pump = None

    def _in_ram(self, unit: Unit, state: State, layout: Layout) -> Stored:
        """Views of the file where the dtype is right, and one buffer for the others."""
        kept = [
            raw.dtype == wanted.dtype and load.blocks_of(at) is None
            for raw, wanted, at in zip(unit.raw.fields, layout.fields, unit.tensors, strict=True)
        ]
        others = lay_out((field.dtype, field.shape) for field, same in zip(layout.fields, kept) if not same)
        buffer = allocate(others.nbytes, state.device)
        cast = iter(views(buffer, others))
        tensors, factors, special = [], list(unit.on_disk.factors), list(unit.on_disk.special)
        for index, (at, same) in enumerate(zip(unit.tensors, kept, strict=True)):
            if same:
                with torch.inference_mode(False):
                    tensors.append(load.view(at, self._map(at.file)))
            else:
                tensors.append(next(cast))
                raw = self.read_one(unit, index)
                factors[index], special[index] = convert(
                    raw, tensors[-1], unit.on_disk.factors[index], unit.on_disk.special[index]
                )
        return Stored(layout, tuple(factors), special, state, tensors, None, others.nbytes)

    def _read_into(self, unit: Unit, state: State, layout: Layout, buffer: torch.Tensor) -> Stored:
        tensors, factors, special = views(buffer, layout), list(unit.on_disk.factors), list(unit.on_disk.special)
        in_ram = device_memory.is_ram(state.device)
        if unit.raw == layout:
            self.reader.read(unit.spans, buffer) if in_ram else self._to_device().fill(unit.spans, buffer)
            return Stored(layout, tuple(factors), special, state, tensors, buffer, layout.nbytes)
        for index, tensor in enumerate(tensors):
            raw = self.read_one(unit, index) if in_ram else self._read_there(unit, index, state.device)
            factors[index], special[index] = convert(
                raw, tensor, unit.on_disk.factors[index], unit.on_disk.special[index]
            )
        return Stored(layout, tuple(factors), special, state, tensors, buffer, layout.nbytes)

    def read_one(self, unit: Unit, index: int) -> torch.Tensor:
        """Tensor `index` as the file has it, in the scratch buffer."""
        layout = lay_out([(unit.raw.fields[index].dtype, unit.raw.fields[index].shape)])
        if self._scratch is None or self._scratch.numel() < layout.nbytes:
            self._scratch = None
            pinned = layout.nbytes <= PINNED_SCRATCH and device_memory.can_pin(self.computing)
            self._scratch = allocate(layout.nbytes, torch.device("cpu"), pinned=pinned)
        if layout.nbytes:
            self.reader.read_tensors([unit.tensors[index]], layout, self._scratch)
        return views(self._scratch, layout)[0]

    def _read_there(self, unit: Unit, index: int, device: torch.device) -> torch.Tensor:
        """Tensor `index` as the file has it, on `device`, where it is cast."""
        layout = lay_out([(unit.raw.fields[index].dtype, unit.raw.fields[index].shape)])
        buffer = allocate(layout.nbytes, device)
        self._to_device().fill(spans_of([unit.tensors[index]], layout), buffer)
        return views(buffer, layout)[0]

    def _to_device(self) -> Pump:
        self._pump = self._pump or Pump(self.reader, self.computing)
        return self._pump

    def _buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if device_memory.is_ram(device) and device_memory.can_pin(self.computing):
            self._pinned = self._pinned or Pinned(self.computing, self._nbytes)
            found = self._pinned.take(nbytes)
            if found is not None:
                return found
        return allocate(nbytes, device)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            self._maps.update(load.open_maps([file]))
        return self._maps[file]
