"""Reading weights from the user's own files: byte spans, the layout of tensors in flat buffers, allocation.

`Reader` fills buffers with `preadv`: one system call for all tensors that lie side by side in the file, each to its own
aligned place, without a copy in between. Reading into a reused buffer runs at the speed of memory; fresh memory would
cost a page fault every 4 KiB.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from backend.catalog.spec import TensorAt
from backend.engine.devices import device_memory, out_of_memory
from backend.engine.loading.dequantize import pieces_of
from backend.schema.messages import Trouble

# bytes: whole cache lines; and cuBLAS chooses its kernels by alignments up to this, so that weights in a buffer compute
# exactly as others do
ALIGNMENT = 256
MOST_PIECES = 512  # of one scattered read; systems allow 1024 (IOV_MAX)


@dataclass(frozen=True)
class Field:
    """One tensor in a flat buffer; `offset` and `nbytes` in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Where tensors are in one flat buffer of `nbytes`."""

    fields: tuple[Field, ...]
    nbytes: int

    def __hash__(self) -> int:
        return hash((self.nbytes, len(self.fields)))


def lay_out(tensors: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> Layout:
    """The layout of tensors (dtype, shape) one after the other, each aligned."""
    fields, offset = [], 0
    for dtype, shape in tensors:
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        fields.append(Field(dtype, tuple(shape), offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(fields), offset)


def views(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The tensors of `layout`, in their dtypes and shapes, as views of `buffer` (uint8, shape (>= layout.nbytes,))."""
    with torch.inference_mode(False):
        return [
            buffer[field.offset : field.offset + field.nbytes].view(field.dtype).view(field.shape)
            for field in layout.fields
        ]


def allocate(nbytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Uninitialised memory (uint8, shape (nbytes,)) on `device`.

    RAM is a private mapping, in huge pages where the system has them, so that it goes back to the system the moment
    that the last tensor is freed. Raises MemoryError or OutOfMemoryError.
    """
    with torch.inference_mode(False):
        if not device_memory.is_ram(device):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        if pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        if nbytes < mmap.PAGESIZE:
            return torch.empty(nbytes, dtype=torch.uint8)
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        pages = mmap.mmap(-1, nbytes, **private)
        if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 1 << 22:
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)


@dataclass(frozen=True)
class Span:
    """Bytes of a file and their place in a buffer."""

    file: Path
    start: int
    offset: int
    nbytes: int


def spans_of(tensors: Sequence[TensorAt], layout: Layout) -> tuple[Span, ...]:
    """What to read for `layout`, whose fields are `tensors` as stored. Raises Trouble ("damaged") where the bytes of a
    tensor in its file are not those of its shape and dtype."""
    for at, field in zip(tensors, layout.fields, strict=True):
        if at.nbytes != field.nbytes:
            raise Trouble(
                "damaged",
                f"{at.file.name} holds {at.nbytes} bytes for {at.key}, but its shape and dtype need {field.nbytes}.",
                hint="Download it again.",
            )
    spans = []
    for at, field in zip(tensors, layout.fields):
        offset = field.offset
        for piece in [at] if at.packed is None else [piece for _, piece in pieces_of(at)]:
            if piece.nbytes:
                spans.append(Span(piece.file, piece.start, offset, piece.nbytes))
            offset += piece.nbytes
    return tuple(spans)


def cut(spans: Iterable[Span], piece_bytes: int) -> list[tuple[int, int, tuple[Span, ...]]]:
    """`spans` grouped into pieces of the buffer of at most `piece_bytes` each: (offset, bytes, spans with offsets
    inside the piece)."""
    pieces: dict[int, list[Span]] = {}
    for span in spans:
        done = 0
        while done < span.nbytes:
            index, inside = divmod(span.offset + done, piece_bytes)
            count = min(span.nbytes - done, piece_bytes - inside)
            pieces.setdefault(index, []).append(Span(span.file, span.start + done, inside, count))
            done += count
    return [
        (index * piece_bytes, max(span.offset + span.nbytes for span in found), tuple(found))
        for index, found in sorted(pieces.items())
    ]


class Reader:
    """Reads spans of files into memory; thread-safe. Files stay open until `close`."""

    def __init__(self):
        self._files: dict[Path, io.FileIO] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0  # read so far

    def read(self, spans: Sequence[Span], buffer: torch.Tensor) -> None:
        """Fills `buffer` (uint8 in RAM, one-dimensional (n,)) as `spans` say. Raises Trouble ("missing_file",
        "damaged") where a file is gone or too short."""
        room = memoryview(buffer.numpy())  # pyright: ignore[reportArgumentType]  (numpy's stubs hide the buffer)
        for group in _side_by_side(spans):
            file = self._open(group[0].file)
            pieces = [room[span.offset : span.offset + span.nbytes] for span in group]
            self._fill(file, group[0].file, group[0].start, pieces)

    def read_tensors(self, tensors: Sequence[TensorAt], layout: Layout, buffer: torch.Tensor) -> None:
        """Fills `buffer` (uint8 in RAM, shape (>= layout.nbytes,)) with `tensors`, laid out as `layout`."""
        self.read(spans_of(tensors, layout), buffer)

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _open(self, path: Path) -> io.FileIO:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = path.open("rb", buffering=0)
                except OSError as error:
                    if out_of_memory.is_oom(error):
                        raise
                    raise Trouble(
                        "missing_file", f"{path} cannot be read: {error.strerror}.", hint="Was it moved?"
                    ) from None
            return self._files[path]

    def _fill(self, file: io.FileIO, path: Path, start: int, pieces: list[memoryview]) -> None:
        while pieces:
            try:
                got = self._scatter(file, start, pieces)
            except OSError as error:
                if out_of_memory.is_oom(error):
                    raise
                raise Trouble(
                    "damaged", f"{path} cannot be read: {error.strerror}.", hint="Is the disk still there?"
                ) from None
            if got == 0:
                raise Trouble("damaged", f"{path} ends before its tensors do.", hint="Download it again.")
            self.num_bytes += got
            start += got
            pieces = _rest(pieces, got)

    def _scatter(self, file: io.FileIO, start: int, pieces: list[memoryview]) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), pieces[:MOST_PIECES], start)
        with self._lock:  # Windows: one position per file
            file.seek(start)
            return file.readinto(pieces[0])


def _side_by_side(spans: Sequence[Span]) -> list[list[Span]]:
    """Runs of spans that follow each other in the same file."""
    groups: list[list[Span]] = []
    for span in spans:
        last = groups[-1][-1] if groups else None
        if last and last.file == span.file and last.start + last.nbytes == span.start:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _rest(pieces: list[memoryview], done: int) -> list[memoryview]:
    """What of `pieces` is left after `done` bytes."""
    for index, piece in enumerate(pieces):
        if done < len(piece):
            return [piece[done:], *pieces[index + 1 :]]
        done -= len(piece)
    return []
