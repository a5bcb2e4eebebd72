"""Host-to-device copies through two pinned (page-locked) bounce buffers: one is filled while the other is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

import torch

from backend.catalog.spec import TensorAt
from backend.engine.devices import device_memory
from backend.engine.loading.dequantize import TORCH_DTYPES
from backend.engine.loading.disk_reader import Reader, Span, allocate, cut, lay_out, spans_of

BOUNCE_BYTES = 32 << 20  # of each of the two buffers


def streams_of(device: torch.device) -> ModuleType | None:
    """torch.cuda, torch.xpu, ...: the module whose streams copy to `device` while it computes. None for RAM and for
    Apple's GPUs (MPS), which run everything in one queue, and which no second thread may use
    (https://github.com/pytorch/pytorch/issues/197805)."""
    if device_memory.is_ram(device) or device.type == "mps":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") else None


class PinnedCopy:
    """Copies spans of files, or pageable (not pinned) RAM, piece by piece to `device`. Not thread-safe."""

    def __init__(self, reader: Reader, device: torch.device, *, bounce_bytes: int = BOUNCE_BYTES):
        self.reader, self.device, self.bounce_bytes = reader, device, bounce_bytes
        self._streams = streams_of(device)
        self._bounce: list[list] = []  # of buffer and the event after which it may be filled again

    def move(
        self, source: torch.Tensor | tuple[Span, ...], copy: Callable[[int, torch.Tensor], object | None]
    ) -> object | None:
        """Calls `copy(offset, piece)` for one piece of the bytes after the other (uint8, shape (n,)): it starts an
        asynchronous copy and returns the event after which that is done (None: done already). Returns the last one."""
        event = None
        for index, (offset, nbytes, piece) in enumerate(self._pieces(source)):
            bounce = self._free(index)
            if isinstance(piece, torch.Tensor):
                bounce[:nbytes].copy_(piece)
            else:
                self.reader.read(piece, bounce)
            event = self._bounce[index % 2][1] = copy(offset, bounce[:nbytes])
        return event

    def fill(self, source: torch.Tensor | tuple[Span, ...], target: torch.Tensor) -> None:
        """Copies the bytes to `target` (uint8 on the device, shape (nbytes,)), on the current stream."""
        self.move(source, lambda offset, piece: self._copy(target[offset : offset + piece.numel()], piece))

    def load(self, source: tuple[Span, ...], target: torch.Tensor, stored: torch.dtype) -> None:
        """Copies numbers that the file has in the dtype `stored` to `target` (contiguous, any shape, on the device),
        cast there to its dtype."""
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

    def _pieces(
        self, source: torch.Tensor | tuple[Span, ...]
    ) -> Iterable[tuple[int, int, torch.Tensor | tuple[Span, ...]]]:
        """(offset, bytes, what to read) of each piece."""
        if not isinstance(source, torch.Tensor):
            return cut(source, self.bounce_bytes)
        pieces = source.split(self.bounce_bytes)
        return [(index * self.bounce_bytes, piece.numel(), piece) for index, piece in enumerate(pieces)]

    def _free(self, index: int) -> torch.Tensor:
        """One of the two bounce buffers, once its last copy has ended."""
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
                pass  # no more RAM may be pinned: copies from pageable RAM are right too, only slower
        return allocate(self.bounce_bytes, device_memory.RAM)


class Upload:
    """Loads tensors of files straight to `device`, through pinned RAM, and casts them there: several times as fast as
    from a memory mapping, whose pages the driver touches one by one and copies once more."""

    def __init__(self, device: torch.device):
        self.device, self._reader = device, Reader()
        self._pump = PinnedCopy(self._reader, device)

    def tensor(self, at: TensorAt, dtype: torch.dtype | None) -> torch.Tensor:
        """The tensor at `at` (not quantized), of shape `at.shape` on the device; a float in `dtype` where one is
        given."""
        layout = lay_out([(TORCH_DTYPES[at.dtype], at.shape)])
        stored = layout.fields[0].dtype
        wanted = dtype if dtype is not None and stored.is_floating_point else stored
        found = torch.empty(at.shape, dtype=wanted, device=self.device)
        self._pump.load(spans_of([at], layout), found, stored)
        return found

    def close(self) -> None:
        """Closes the files. (Copies under way go on; what is launched next on the device comes after them.)"""
        self._reader.close()
