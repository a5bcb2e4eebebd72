"""Bytes on their way to a device that computes, by way of two small pinned buffers: one is filled while the other's copy is under way."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from backend.catalog.spec import TensorAt
from backend.engine.devices import device_memory
from backend.engine.loading.dequantize import TORCH_DTYPES
from backend.engine.loading.disk_reader import Reader, Span, allocate, cut, lay_out, spans_of

BOUNCE_BYTES = 32 << 20  # of each of the two buffers


def streams_of(device: torch.device) -> ModuleType | None:
    """torch.cuda, torch.xpu, ...: the module whose streams copy to `device` while it computes. None for RAM and for Apple's GPUs, which run
    everything in one queue, and which no second thread may use (https://github.com/pytorch/pytorch/issues/197805)."""
    if device_memory.is_ram(device) or device.type == "mps":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") else None


class Pump:
    """Moves spans of files, or RAM that is not pinned, piece by piece to `device`. For one thread at a time."""

    def __init__(self, reader: Reader, device: torch.device, *, bounce_bytes: int = BOUNCE_BYTES):
        self.reader, self.device, self.bounce_bytes = reader, device, bounce_bytes
        self._streams = streams_of(device)
        self._bounce: list[list] = []  # of buffer and the event after which it may be filled again

    def move(
        self, source: torch.Tensor | tuple[Span, ...], copy: Callable[[int, torch.Tensor], object | None]
    ) -> object | None:
        """Calls `copy(offset, piece)` for one piece of the bytes after the other, which begins to copy it and answers the event after which that is
        done (None: it is done already). Answers the last one's."""
        event = None
        for index, (offset, nbytes, spans) in enumerate(self._pieces(source)):
            bounce = self._free(index)
            if spans is None:
                bounce[:nbytes].copy_(source[offset : offset + nbytes])
            else:
                self.reader.read(spans, bounce)
            event = self._bounce[index % 2][1] = copy(offset, bounce[:nbytes])
        return event

    def fill(self, source: torch.Tensor | tuple[Span, ...], target: torch.Tensor) -> None:
        """Moves the bytes to `target` (uint8 on the device), in the order of what is launched there now."""
        self.move(source, lambda offset, piece: self._copy(target[offset : offset + piece.numel()], piece))

    def load(self, source: tuple[Span, ...], target: torch.Tensor, stored: torch.dtype) -> None:
        """Moves numbers that the file has as `stored` to `target` (contiguous, on the device), in whose dtype they arrive."""
        if stored == target.dtype:
            self.fill(source, target.view(-1).view(torch.uint8))
            return
        flat, size = target.view(-1), stored.itemsize

        def copy(offset: int, piece: torch.Tensor) -> object | None:
            raw = torch.empty(piece.numel(), dtype=torch.uint8, device=self.device)
            event = self._copy(raw, piece)
            flat[offset // size : (offset + piece.numel()) // size].copy_(raw.view(stored))
            return event

        self.move(source, copy)

    def _copy(self, target: torch.Tensor, piece: torch.Tensor) -> object | None:
        target.copy_(piece, non_blocking=self._streams is not None)
        if self._streams is None:
            return None
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event

    def _pieces(self, source: torch.Tensor | tuple[Span, ...]) -> list[tuple[int, int, tuple[Span, ...] | None]]:
        if not isinstance(source, torch.Tensor):
            return cut(source, self.bounce_bytes)
        starts = range(0, source.numel(), self.bounce_bytes)
        return [(start, min(self.bounce_bytes, source.numel() - start), None) for start in starts]

    def _free(self, index: int) -> torch.Tensor:
        """One of the two buffers, when its last copy has left it."""
        while len(self._bounce) < 2:
            self._bounce.append([self._new(), None])
        buffer, copied = self._bounce[index % 2]
        if copied is not None:
            copied.synchronize()
        return buffer

    def _new(self) -> torch.Tensor:
        if self._streams is not None:
            try:
                return allocate(self.bounce_bytes, device_memory.RAM, pinned=True)
            except (RuntimeError, MemoryError, OSError):
                pass  # no more RAM may be pinned: copies from other pages are right too, only slower
        return allocate(self.bounce_bytes, device_memory.RAM)


class Upload:
    """Tensors of files straight to `device`, read into pinned RAM and cast over there: several times as fast as out of a mapping, whose pages the
    driver touches one by one and copies once more."""

    def __init__(self, device: torch.device):
        self.device, self._reader = device, Reader()
        self._pump = Pump(self._reader, device)

    def tensor(self, at: TensorAt, dtype: torch.dtype | None) -> torch.Tensor:
        """The tensor at `at` (plain numbers) on the device; a float in `dtype` where one is given."""
        layout = lay_out([(TORCH_DTYPES[at.dtype], at.shape)])
        stored = layout.fields[0].dtype
        wanted = dtype if dtype is not None and stored.is_floating_point else stored
        found = torch.empty(at.shape, dtype=wanted, device=self.device)
        self._pump.load(spans_of([at], layout), found, stored)
        return found

    def close(self) -> None:
        """Closes the files. (The copies go on; what is launched next on the device comes after them.)"""
        self._reader.close()
