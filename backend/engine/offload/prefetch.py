"""Block prefetch: predict the next blocks, and copy their weights ahead of time into a few reused buffers.

`PrefetchOrder` predicts which block is used next. It remembers what followed each run of *three* blocks, so that it
tells forward (2, 3, 4 -> 5), backward (6, 5, 4 -> 3) and the turn (6, 7, 7 -> 6) apart, whatever the sequence.
`BufferPool` holds a few buffers of equal size on the computing device. `Prefetcher` fills one: from disk in a reader
thread, from (pinned) RAM to an accelerator by an asynchronous copy on a stream of its own, so that the copy overlaps
with computation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, overload

import torch

from backend.engine.devices import device_memory
from backend.engine.loading.disk_reader import Layout, Reader, Span, allocate
from backend.engine.loading.pinned_copy import PinnedCopy, streams_of

START = (None, None, None)
WaitForCopy = Callable[[], None]  # makes the current stream wait for an asynchronous copy


class PrefetchOrder:
    """Predicts the next blocks among `positions` (numbers of the streamed blocks, ascending).

    A sequence that was not seen before is continued with the neighbour in the direction of the pass.
    """

    def __init__(self, positions: list[int]):
        self.positions = positions
        self._place = {position: index for index, position in enumerate(positions)}
        self._after: dict[tuple, int] = {}
        self._seen: tuple = START
        self._direction = 1

    def note(self, position: int, direction: int = 1) -> None:
        """Records that block `position` is used now; `direction` is -1 in a backward pass."""
        self._after[self._seen] = position
        self._seen = (*self._seen[1:], position)
        self._direction = direction

    def ahead(self, count: int) -> list[int]:
        """The `count` distinct positions to prefetch, nearest first; the last one noted may be among them."""
        found: list[int] = []
        seen = self._seen
        for _ in range(3 * count):
            position = self._after.get(seen)
            position = self._neighbour(seen[-1]) if position is None else position
            seen = (*seen[1:], position)
            if position not in found:
                found.append(position)
            if len(found) == count:
                break
        return found

    def restart(self) -> None:
        """A new forward pass begins: predict the block that came first the last time."""
        self._seen, self._direction = START, 1

    def _neighbour(self, position: int | None) -> int:
        if position is None:
            return self.positions[0]
        return self.positions[abs(self._place[position] + self._direction) % len(self.positions)]


@dataclass(eq=False)
class Slot:
    """One buffer (uint8 on the computing device) and the block whose weights it holds."""

    buffer: torch.Tensor
    key: int | None = None  # the block's number; None while empty
    num_users: int = 0  # calls that use it now; it is not overwritten meanwhile
    pending_read: Future | None = None  # of the reader thread
    copy_done: object | None = None  # event: the copy into it has ended, an accelerator may read it
    reads_done: object | None = None  # event: all reads launched so far have ended, it may be overwritten
    last_used: int = 0
    in_ram_bytes: torch.Tensor | None = None  # still to be copied by `wait`, where the device has no streams (MPS)
    ram_buffer: torch.Tensor | None = None  # that the thread reads a file into there
    views: dict[Layout, list[torch.Tensor]] = field(default_factory=dict)  # made once per layout

    @property
    def is_idle(self) -> bool:
        """Whether it is neither in use nor being filled."""
        return self.num_users == 0 and self.pending_read is None and self.copy_done is None

    @property
    def address(self) -> int:
        return self.buffer.untyped_storage().data_ptr()


class BufferPool:
    """At most `count` slots of `nbytes` each, allocated when first needed; more only while more are in use at once.

    `on_new(buffer)` is called with each newly allocated buffer.
    """

    def __init__(
        self, nbytes: int, count: int, device: torch.device, on_new: Callable[[torch.Tensor], None] = lambda _: None
    ):
        self.nbytes, self.count, self.device, self._on_new = nbytes, count, device, on_new
        self.slots: list[Slot] = []
        self._clock = 0

    def find(self, key: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.key == key), None)

    def __getitem__(self, key: int) -> Slot:
        """The slot of block `key`, which is known to hold one."""
        slot = self.find(key)
        assert slot is not None, f"block {key} is in no buffer"
        return slot

    def at(self, address: int) -> Slot | None:
        """The slot whose memory begins at `address`."""
        return next((slot for slot in self.slots if slot.address == address), None)

    @overload
    def take(self, key: int, *, keep: tuple[int, ...] = (), required: Literal[True]) -> Slot: ...

    @overload
    def take(self, key: int, *, keep: tuple[int, ...] = (), required: bool = False) -> Slot | None: ...

    def take(self, key: int, *, keep: tuple[int, ...] = (), required: bool = False) -> Slot | None:
        """A slot for block `key`: a new one while there are fewer than `count`, else the least recently used free one
        that does not hold one of `keep`. None if there is none, unless `required`: then one more is allocated."""
        free = [slot for slot in self.slots if slot.num_users == 0]
        spare = [slot for slot in free if slot.key not in keep]
        if len(self.slots) < self.count or (required and not free):
            slot = Slot(allocate(self.nbytes, self.device))
            self._on_new(slot.buffer)
            self.slots.append(slot)
        elif spare or (required and free):
            slot = min(spare or free, key=lambda slot: (slot.key is not None, slot.last_used))
        else:
            return None
        slot.key = key
        self.touch(slot)
        return slot

    def touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock

    def trim(self) -> None:
        """Frees slots beyond `count` once they are idle."""
        while len(self.slots) > self.count:
            spare = next((slot for slot in self.slots if slot.is_idle), None)
            if spare is None:
                return
            self.slots.remove(spare)

    def stop(self) -> None:
        """Returns when no thread writes into a slot any more."""
        for slot in self.slots:
            if slot.pending_read is not None and not slot.pending_read.cancel():
                slot.pending_read.exception()


class Prefetcher:
    """Copies bytes to `device` ahead of time: from a file by a thread, from RAM asynchronously on a stream of its own.

    Where the device has no streams the thread fills RAM, and `wait` copies from there: only one thread may use such a
    device (MPS).
    """

    def __init__(self, reader: Reader, device: torch.device):
        self.reader, self.device = reader, device
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._pump = PinnedCopy(reader, device)
        self._streams = streams_of(device)
        self._stream = self._streams.Stream(device) if self._streams else None

    def record_stream(self, buffer: torch.Tensor) -> None:
        """`Tensor.record_stream` for the copy stream: the caching allocator reuses the memory of `buffer` (uint8, shape
        (nbytes,)) only when the copies to it have ended. (By itself it knows only the stream it was allocated on.)"""
        if self._stream is not None:
            buffer.record_stream(self._stream)

    def copy_async(self, source: torch.Tensor, target: torch.Tensor) -> WaitForCopy | None:
        """Starts copying `source` (uint8 in pinned RAM) to `target`, just allocated on the device, both of shape
        (nbytes,), and returns a function that makes the current stream wait for it. None, with nothing copied, where
        the copy could not overlap with computation: no streams, or `source` is not pinned."""
        if self._stream is None or not source.is_pinned():
            return None
        self.record_stream(target)
        event = self._copy(target, source, self._now())
        return lambda: self._wait_event(event)

    def start(self, slot: Slot, source: torch.Tensor | tuple[Span, ...], nbytes: int) -> None:
        """Starts filling `slot` with the `nbytes` of a block: spans of files, or RAM (uint8, shape (>= nbytes,)).
        `wait` before use."""
        self.num_bytes += nbytes
        if slot.pending_read is not None:
            slot.pending_read.cancel()  # never used; a read that has begun ends before the thread takes up the new one
        slot.copy_done = slot.in_ram_bytes = None
        if slot.reads_done is None:
            self.record_use(slot)  # its memory may just have been freed by what still runs
        if isinstance(source, torch.Tensor) and (self._stream is None or source.is_pinned()):
            if slot.pending_read is not None and not slot.pending_read.cancelled():
                slot.pending_read.exception()
            slot.pending_read = None
            if device_memory.is_ram(self.device):
                slot.buffer[:nbytes].copy_(source[:nbytes])
            elif self._stream is None:
                slot.in_ram_bytes = source[:nbytes]
            else:
                slot.copy_done = self._copy(slot.buffer[:nbytes], source[:nbytes], slot.reads_done)
        else:
            if self._stream is None and not device_memory.is_ram(self.device):
                if slot.ram_buffer is None:
                    slot.ram_buffer = allocate(slot.buffer.numel(), device_memory.RAM)
                slot.in_ram_bytes = slot.ram_buffer[:nbytes]
            slot.pending_read = self._executor().submit(self._through_thread, slot, source)

    def wait(self, slot: Slot) -> None:
        """Waits until `slot` is filled (on an accelerator: makes the current stream wait). Raises what went wrong."""
        if slot.pending_read is not None:
            pending_read, slot.pending_read = slot.pending_read, None
            try:
                slot.copy_done = pending_read.result()
            except BaseException:
                slot.key = slot.in_ram_bytes = None
                raise
        if slot.in_ram_bytes is not None:
            in_ram_bytes, slot.in_ram_bytes = slot.in_ram_bytes, None
            slot.buffer[: in_ram_bytes.numel()].copy_(in_ram_bytes)
        if slot.copy_done is not None:
            self._wait_event(slot.copy_done)
            slot.copy_done = None

    def record_use(self, slot: Slot) -> None:
        """Records an event behind everything launched so far, which may still read `slot`."""
        if self._stream is not None:
            slot.reads_done = self._now()

    def _wait_event(self, event: object) -> None:
        assert self._streams is not None, "only a device with streams has events"
        self._streams.current_stream(self.device).wait_event(event)

    def _now(self) -> object:
        """The event that everything launched so far is done."""
        assert self._streams is not None, "only a device with streams has events"
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event

    def synchronize(self) -> None:
        """Waits for all asynchronous copies, so that buffers may be freed. (`BufferPool.stop` waits for the thread.)"""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Ends the reader thread and waits for what it is doing."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        self._pump = PinnedCopy(self.reader, self.device)

    def shutdown_nowait(self) -> None:
        """Ends the reader thread after the block that it is reading, whose buffer stays alive until then; for a
        finalizer, which may not wait."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        return self._thread

    def _through_thread(self, slot: Slot, source: torch.Tensor | tuple[Span, ...]) -> object | None:
        if self._stream is None:
            assert isinstance(source, tuple), "without streams, RAM is copied by `wait`"
            self.reader.read(source, slot.buffer if slot.ram_buffer is None else slot.ram_buffer)
            return None

        def copy(offset: int, piece: torch.Tensor) -> object:
            return self._copy(slot.buffer[offset : offset + piece.numel()], piece, slot.reads_done)

        return self._pump.move(source, copy)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, reads_done: object) -> object:
        """Starts the copy once the event `reads_done` has passed; the event after which it is done."""
        assert self._streams is not None and self._stream is not None
        with self._lock, self._streams.stream(self._stream):
            self._stream.wait_event(reads_done)
            target.copy_(source, non_blocking=True)
            event = self._streams.Event()
            event.record(self._stream)
            return event


def evenly_spaced(count: int, chosen: int) -> set[int]:
    """`chosen` of the numbers below `count`, evenly spaced: the prefetch of one block then overlaps with the
    computation of several resident ones."""
    return {index for index in range(count) if (index + 1) * chosen // count > index * chosen // count}


def most_resident_blocks(sizes: list[int], limit_bytes: int, others_bytes: Callable[[int], int]) -> set[int]:
    """Indices of as many evenly spaced blocks as can stay resident within `limit_bytes`. `sizes`: bytes of each block;
    `others_bytes(number of resident blocks)`: what else lies on the device."""
    for chosen in range(len(sizes), 0, -1):
        picked = evenly_spaced(len(sizes), chosen)
        if sum(sizes[index] for index in picked) + others_bytes(chosen) <= limit_bytes:
            return picked
    return set()
