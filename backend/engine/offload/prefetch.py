"""Buffers that blocks pass through, and what is fetched into them ahead of time.

`Order` learns in which order blocks are asked for. It remembers who followed each run of *three*, so that forwards (2, 3, 4 -> 5),
backwards (6, 5, 4 -> 3) and the turn (6, 7, 7 -> 6) are told apart, whatever the sequence. `Buffers` are a few buffers of equal size on the computing device, used again and again.
`Fetcher` fills one: from disk in a reader's thread, from RAM to an accelerator on a stream of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from backend.engine.devices import device_memory
from backend.engine.loading.disk_reader import Span, allocate
from backend.engine.loading.pinned_copy import Pump, streams_of

START = (None, None, None)
Arrival = Callable[[], None]  # orders what is launched next behind a copy


class Order:
    """Who comes next, among `positions` (the streamed blocks' numbers, ascending). Until it has seen more: the next in line."""

    def __init__(self, positions: list[int]):
        self.positions = positions
        self._place = {position: index for index, position in enumerate(positions)}
        self._after: dict[tuple, int] = {}
        self._seen: tuple = START
        self._direction = 1

    def note(self, position: int, direction: int = 1) -> None:
        """`position` is wanted now; `direction` is -1 in a backward pass."""
        self._after[self._seen] = position
        self._seen = (*self._seen[1:], position)
        self._direction = direction

    def ahead(self, count: int) -> list[int]:
        """The next `count` distinct positions as far as known, nearest first; the last noted may be wanted again."""
        found: list[int] = []
        seen = self._seen
        for _ in range(3 * count):
            position = self._after.get(seen)
            position = self._in_line(seen[-1]) if position is None else position
            seen = (*seen[1:], position)
            if position not in found:
                found.append(position)
            if len(found) == count:
                break
        return found

    def restart(self) -> None:
        """A new pass begins, by whatever was first the last time."""
        self._seen, self._direction = START, 1

    def _in_line(self, position: int | None) -> int:
        if position is None:
            return self.positions[0]
        return self.positions[abs(self._place[position] + self._direction) % len(self.positions)]


@dataclass(eq=False)
class Slot:
    """One buffer and the block that lies in it."""

    buffer: torch.Tensor
    key: int | None = None  # the block's number; None while empty
    num_users: int = 0
    filling: Future | None = None
    arrived: object | None = None  # the event after which an accelerator may read it
    left: object | None = None  # the event after which it may be written again
    last_used: int = 0
    landed: torch.Tensor | None = None  # bytes in RAM that are still to be copied, where the device has no streams
    aside: torch.Tensor | None = None  # RAM that the thread reads a file into there
    views: dict = field(default_factory=dict)  # per layout, made once

    @property
    def is_still(self) -> bool:
        """Whether nobody uses it and nothing is on its way to it."""
        return self.num_users == 0 and self.filling is None and self.arrived is None

    @property
    def address(self) -> int:
        return self.buffer.untyped_storage().data_ptr()


class Buffers:
    """At most `count` slots of `nbytes` each; more only while more than that are in use at the same time. `on_new` is told of each one's memory."""

    def __init__(
        self, nbytes: int, count: int, device: torch.device, on_new: Callable[[torch.Tensor], None] = lambda _: None
    ):
        self.nbytes, self.count, self.device, self._on_new = nbytes, count, device, on_new
        self.slots: list[Slot] = []
        self._clock = 0

    def find(self, key: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.key == key), None)

    def at(self, address: int) -> Slot | None:
        """The slot whose memory begins at `address`."""
        return next((slot for slot in self.slots if slot.address == address), None)

    def take(self, key: int, *, keep: tuple[int, ...] = (), must: bool = False) -> Slot | None:
        """A slot for block `key`: a new one while there are fewer than `count`, else the free one that was used longest ago and does not hold
        one of `keep`. None if there is none, unless `must`."""
        free = [slot for slot in self.slots if slot.num_users == 0]
        spare = [slot for slot in free if slot.key not in keep]
        if len(self.slots) < self.count or (must and not free):
            slot = Slot(allocate(self.nbytes, self.device))
            self._on_new(slot.buffer)
            self.slots.append(slot)
        elif spare or (must and free):
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
        """Gives back what went beyond `count` once it is free."""
        while len(self.slots) > self.count:
            spare = next((slot for slot in self.slots if slot.is_still), None)
            if spare is None:
                return
            self.slots.remove(spare)

    def stop(self) -> None:
        """Returns when no thread writes into a slot any more."""
        for slot in self.slots:
            if slot.filling is not None and not slot.filling.cancel():
                slot.filling.exception()


class Fetcher:
    """Moves bytes to `device` ahead of time: from a file by a thread, from RAM by a copy on a stream of its own. Where the device has no streams the
    thread fills RAM, and whoever needs the block copies it: only one thread uses the device then."""

    def __init__(self, reader, device: torch.device):
        self.reader, self.device = reader, device
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._pump = Pump(reader, device)
        self._streams = streams_of(device)
        self._stream = self._streams.Stream(device) if self._streams else None

    def claim(self, buffer: torch.Tensor) -> None:
        """The memory of `buffer` is handed on, once nothing refers to it, only when the copies to it that are under way have ended: the allocator
        knows of itself only what the stream does that the buffer was made on."""
        if self._stream is not None:
            buffer.record_stream(self._stream)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Arrival | None:
        """Begins to copy `source`, bytes in RAM, to `target`, which was just made on the device. None, with nothing done, where that would not run beside
        what computes."""
        if self._stream is None or not source.is_pinned():
            return None
        self.claim(target)
        event = self._copy(target, source, self._now())
        return lambda: self._streams.current_stream(self.device).wait_event(event)

    def start(self, slot: Slot, source: torch.Tensor | tuple[Span, ...], nbytes: int) -> None:
        """Begins to fill `slot` with a block: spans of files, or bytes in RAM. `wait` before it is read."""
        self.num_bytes += nbytes
        if slot.filling is not None:
            slot.filling.cancel()  # nobody came for it; if it has begun, the one thread ends it before it takes up the new one
        slot.arrived = slot.landed = None
        if slot.left is None:
            self.leave(slot)  # its memory may just have been freed by what still runs
        in_ram = isinstance(source, torch.Tensor)
        if in_ram and (self._stream is None or source.is_pinned()):
            if slot.filling is not None and not slot.filling.cancelled():
                slot.filling.exception()
            slot.filling = None
            if device_memory.is_ram(self.device):
                slot.buffer[:nbytes].copy_(source[:nbytes])
            elif self._stream is None:
                slot.landed = source[:nbytes]
            else:
                slot.arrived = self._copy(slot.buffer[:nbytes], source[:nbytes], slot.left)
        else:
            if self._stream is None and not device_memory.is_ram(self.device):
                slot.aside = allocate(slot.buffer.numel(), device_memory.RAM) if slot.aside is None else slot.aside
                slot.landed = slot.aside[:nbytes]
            slot.filling = self._executor().submit(self._through_thread, slot, source)

    def wait(self, slot: Slot) -> None:
        """Returns when the filling of `slot` is done (on an accelerator: ordered before what is launched next). Raises what went wrong."""
        if slot.filling is not None:
            filling, slot.filling = slot.filling, None
            try:
                slot.arrived = filling.result()
            except BaseException:
                slot.key = slot.landed = None
                raise
        if slot.landed is not None:
            landed, slot.landed = slot.landed, None
            slot.buffer[: landed.numel()].copy_(landed)
        if slot.arrived is not None:
            self._streams.current_stream(self.device).wait_event(slot.arrived)
            slot.arrived = None

    def leave(self, slot: Slot) -> None:
        """Notes that everything launched so far may still read `slot`."""
        if self._stream is not None:
            slot.left = self._now()

    def _now(self) -> object:
        """The event that everything launched so far is done."""
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event

    def settle(self) -> None:
        """Returns when no copy is under way any more: buffers may be freed. (The thread's work is waited for slot by slot.)"""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Ends the thread; what it is doing is waited for."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        self._pump = Pump(self.reader, self.device)

    def abandon(self) -> None:
        """Ends the thread after the block that it is moving, which keeps its buffer until then. For whoever may not wait."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        return self._thread

    def _through_thread(self, slot: Slot, source: torch.Tensor | tuple[Span, ...]) -> object | None:
        if self._stream is None:
            self.reader.read(source, slot.buffer if slot.aside is None else slot.aside)
            return None

        def copy(offset: int, piece: torch.Tensor) -> object:
            return self._copy(slot.buffer[offset : offset + piece.numel()], piece, slot.left)

        return self._pump.move(source, copy)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, left: object) -> object:
        """Begins the copy, after the event `left`; the event after which it is done."""
        with self._lock, self._streams.stream(self._stream):
            self._stream.wait_event(left)
            target.copy_(source, non_blocking=True)
            event = self._streams.Event()
            event.record(self._stream)
            return event


def spread(count: int, chosen: int) -> set[int]:
    """`chosen` of the numbers below `count`, evenly spaced: transfers then hide behind the blocks in between."""
    return {index for index in range(count) if (index + 1) * chosen // count > index * chosen // count}


def most_that_fit(sizes: list[int], limit_bytes: int, others_bytes: Callable[[int], int]) -> set[int]:
    """The largest evenly spread choice of blocks whose sizes, and `others_bytes(number chosen)` beside them, stay within the limit."""
    for chosen in range(len(sizes), 0, -1):
        picked = spread(len(sizes), chosen)
        if sum(sizes[index] for index in picked) + others_bytes(chosen) <= limit_bytes:
            return picked
    return set()
