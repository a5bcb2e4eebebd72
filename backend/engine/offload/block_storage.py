"""A unit's weights moved into an offload state: memory-mapped, read, cast to FP8 or copied to a device.

Where the CPU computes, a tensor that the file holds in the wanted dtype is a copy-on-write view of the mapped file.
Everything else goes through one scratch buffer of the size of the largest tensor, so that loading never needs more
memory than what is to stay and that buffer.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import torch

from backend.engine.devices import device_memory
from backend.engine.loading import load
from backend.engine.loading.disk_reader import Layout, Reader, allocate, lay_out, spans_of, views
from backend.engine.loading.pinned_copy import PinnedCopy
from backend.engine.offload.blocks import Stored, Unit, convert, stored_layout
from backend.engine.offload.pinned_memory import PinnedPool
from backend.engine.offload.prefetch import WaitForCopy
from backend.engine.offload.vram_states import State

PINNED_SCRATCH = 256 << 20  # bytes; larger tensors (an embedding's) are few, and torch would pin up to twice as much


class BlockStorage:
    """Makes `Stored`s for a part of `nbytes` that computes on the device `computing`.

    `finish` after a run of `move`s frees the scratch buffers and mappings.
    """

    def __init__(self, reader: Reader, computing: torch.device, nbytes: int):
        self.reader, self.computing = reader, computing
        self._maps: dict[Path, mmap.mmap] = {}
        self._scratch: torch.Tensor | None = None
        self._nbytes = nbytes
        self._pinned_pool: PinnedPool | None = None
        self._pump: PinnedCopy | None = None
        self._prefetched: dict[tuple[int, State], tuple[torch.Tensor, WaitForCopy]] = {}

    def move(self, unit: Unit, state: State, source: Stored | None) -> Stored | None:
        """The weights of `unit` in `state`: prefetched, copied from `source` (its present ones) where that has the same
        layout, else read from the file; None where `state` is on disk."""
        if state.on_disk:
            return None
        dtype, device = state.in_memory
        layout = stored_layout(unit, dtype)
        prefetched = self._prefetched.pop((unit.position, state), None)
        if prefetched is not None:
            buffer, wait = prefetched
            wait()
            assert source is not None, "only what waits in RAM is prefetched"
            return Stored(layout, source.factors, source.nonfinite, state, views(buffer, layout), buffer, layout.nbytes)
        if device_memory.is_ram(device) and device_memory.is_ram(self.computing):
            return self._in_ram(unit, state, device, layout)
        buffer = self._buffer(layout.nbytes, device)
        if source is not None and source.layout == layout and source.buffer is not None:
            # no synchronization for a copy to the device: what uses it is launched on the same stream behind it, and
            # pinned RAM is not reused before the copy has ended
            buffer.copy_(source.buffer, non_blocking=not device_memory.is_ram(device))
            return Stored(layout, source.factors, source.nonfinite, state, views(buffer, layout), buffer, layout.nbytes)
        return self._read_into(unit, state, device, layout, buffer)

    def prefetch(
        self, unit: Unit, state: State, copy_async: Callable[[torch.Tensor, torch.Tensor], WaitForCopy | None]
    ) -> None:
        """Prefetch for `move`: starts copying the weights of `unit`, which wait in pinned RAM in the layout that
        `state` wants, to the device while it computes. `copy_async(source, target)`, both uint8 of shape (nbytes,),
        is `Prefetcher.copy_async`."""
        dtype, device = state.in_memory
        source = unit.stored
        if source is None or source.buffer is None or source.layout != stored_layout(unit, dtype):
            return
        if device_memory.is_ram(device) or (unit.position, state) in self._prefetched or not source.buffer.is_pinned():
            return
        buffer = allocate(source.layout.nbytes, device)
        wait = copy_async(source.buffer, buffer)
        if wait is not None:
            self._prefetched[unit.position, state] = buffer, wait

    def drop_prefetched(self) -> None:
        """Drops copies that were started by `prefetch` and not used."""
        self._prefetched.clear()

    def finish(self) -> None:
        """Frees the scratch buffers and the mappings; views of a mapping keep it alive."""
        self._maps.clear()
        self._scratch = self._pinned_pool = self._pump = None

    def _in_ram(self, unit: Unit, state: State, device: torch.device, layout: Layout) -> Stored:
        """Views of the mapped file where the dtype is right, and one buffer for the others."""
        kept = [
            raw.dtype == wanted.dtype and load.dequantizer_of(at) is None
            for raw, wanted, at in zip(unit.raw.fields, layout.fields, unit.tensors, strict=True)
        ]
        others = lay_out((field.dtype, field.shape) for field, same in zip(layout.fields, kept) if not same)
        buffer = allocate(others.nbytes, device)
        cast = iter(views(buffer, others))
        tensors, factors, nonfinite = [], list(unit.on_disk.factors), list(unit.on_disk.nonfinite)
        for index, (at, same) in enumerate(zip(unit.tensors, kept, strict=True)):
            if same:
                with torch.inference_mode(False):
                    tensors.append(load.view(at, self._map(at.file)))
            else:
                tensors.append(next(cast))
                raw = self.read_one(unit, index)
                factors[index], nonfinite[index] = convert(
                    raw, tensors[-1], unit.on_disk.factors[index], unit.on_disk.nonfinite[index]
                )
        return Stored(layout, tuple(factors), nonfinite, state, tensors, None, others.nbytes)

    def _read_into(
        self, unit: Unit, state: State, device: torch.device, layout: Layout, buffer: torch.Tensor
    ) -> Stored:
        tensors, factors, nonfinite = views(buffer, layout), list(unit.on_disk.factors), list(unit.on_disk.nonfinite)
        in_ram = device_memory.is_ram(device)
        if unit.raw == layout:
            self.reader.read(unit.spans, buffer) if in_ram else self._to_device().fill(unit.spans, buffer)
            return Stored(layout, tuple(factors), nonfinite, state, tensors, buffer, layout.nbytes)
        for index, tensor in enumerate(tensors):
            raw = self.read_one(unit, index) if in_ram else self._read_there(unit, index, device)
            factors[index], nonfinite[index] = convert(
                raw, tensor, unit.on_disk.factors[index], unit.on_disk.nonfinite[index]
            )
        return Stored(layout, tuple(factors), nonfinite, state, tensors, buffer, layout.nbytes)

    def read_one(self, unit: Unit, index: int) -> torch.Tensor:
        """Tensor `index` of `unit`, of the dtype and shape of `unit.raw`, in the scratch buffer: valid until the next
        read."""
        layout = lay_out([(unit.raw.fields[index].dtype, unit.raw.fields[index].shape)])
        if self._scratch is None or self._scratch.numel() < layout.nbytes:
            self._scratch = None
            pinned = layout.nbytes <= PINNED_SCRATCH and device_memory.can_pin(self.computing)
            self._scratch = allocate(layout.nbytes, torch.device("cpu"), pinned=pinned)
        if layout.nbytes:
            self.reader.read_tensors([unit.tensors[index]], layout, self._scratch)
        return views(self._scratch, layout)[0]

    def _read_there(self, unit: Unit, index: int, device: torch.device) -> torch.Tensor:
        """Tensor `index` in the file's dtype, on `device`, where it is cast."""
        layout = lay_out([(unit.raw.fields[index].dtype, unit.raw.fields[index].shape)])
        buffer = allocate(layout.nbytes, device)
        self._to_device().fill(spans_of([unit.tensors[index]], layout), buffer)
        return views(buffer, layout)[0]

    def _to_device(self) -> PinnedCopy:
        self._pump = self._pump or PinnedCopy(self.reader, self.computing)
        return self._pump

    def _buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if device_memory.is_ram(device) and device_memory.can_pin(self.computing):
            self._pinned_pool = self._pinned_pool or PinnedPool(self.computing, self._nbytes)
            found = self._pinned_pool.take(nbytes)
            if found is not None:
                return found
        return allocate(nbytes, device)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            self._maps.update(load.open_maps([file]))
        return self._maps[file]
