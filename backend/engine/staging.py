"""Buffers that blocks pass through, and what is fetched into them ahead of time.

`Order` learns in which order blocks are asked for. It remembers who followed each run of *three*, so that forwards (2, 3, 4 -> 5),
backwards (6, 5, 4 -> 3) and the turn (6, 7, 7 -> 6) are told apart, whatever the sequence. `Buffers` are a few buffers of equal size on the computing device, used again and again.
`Fetcher` fills one: from disk in a reader's thread, from RAM to an accelerator on a stream of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from backend.engine.stream import Span, allocate, cut

START = (None, None, None)
BOUNCE_BYTES = 32 << 20  # of each of two pinned buffers between disk and accelerator


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
    views: dict = field(default_factory=dict)  # per layout, made once

    @property
    def address(self) -> int:
        return self.buffer.untyped_storage().data_ptr()


class Buffers:
    """At most `count` slots of `nbytes` each; more only while more than that are in use at the same time."""

    def __init__(self, nbytes: int, count: int, device: torch.device):
        self.nbytes, self.count, self.device = nbytes, count, device
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
            spare = next((slot for slot in self.slots if slot.num_users == 0 and slot.filling is None), None)
            if spare is None:
                return
            self.slots.remove(spare)

    def stop(self) -> None:
        """Returns when no thread writes into a slot any more."""
        for slot in self.slots:
            if slot.filling is not None and not slot.filling.cancel():
                slot.filling.exception()


class Fetcher:
    """Moves bytes to `device`: `from_disk` by a thread, `from_memory` by a copy on a stream of its own where the device has streams."""

    def __init__(self, reader, device: torch.device):
        self.reader, self.device = reader, device
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._bounce: list[list] = []
        module = torch.get_device_module(device) if device.type != "cpu" else None
        self._module = module if hasattr(module, "Stream") else None
        self._stream = self._module.Stream(device) if self._module else None

    def start(self, slot: Slot, source: torch.Tensor | tuple[Span, ...], nbytes: int) -> None:
        """Begins to fill `slot` with a block: spans of files, or bytes in RAM. `wait` before it is read."""
        self.num_bytes += nbytes
        if slot.filling is not None:
            slot.filling.cancel()  # nobody came for it; if it has begun, the one thread ends it before it takes up the new one
        slot.arrived = None
        if slot.left is None:
            self.leave(slot)  # its memory may just have been freed by what still runs
        pinned = isinstance(source, torch.Tensor) and (self.device.type == "cpu" or source.is_pinned())
        if pinned:
            if slot.filling is not None and not slot.filling.cancelled():
                slot.filling.exception()
            slot.filling = None
            self._copy(slot.buffer[:nbytes], source[:nbytes], slot)
        else:
            slot.filling = self._executor().submit(self._through_thread, slot, source)

    def wait(self, slot: Slot) -> None:
        """Returns when the filling of `slot` is done (on an accelerator: ordered before what is launched next). Raises what went wrong."""
        if slot.filling is not None:
            filling, slot.filling = slot.filling, None
            try:
                filling.result()
            except BaseException:
                slot.key = None
                raise
        if slot.arrived is not None:
            self._module.current_stream(self.device).wait_event(slot.arrived)
            slot.arrived = None

    def leave(self, slot: Slot) -> None:
        """Notes that everything launched so far may still read `slot`."""
        if self._module:
            slot.left = self._module.Event()
            slot.left.record(self._module.current_stream(self.device))

    def settle(self) -> None:
        """Returns when no copy is under way any more: buffers may be freed. (The thread's work is waited for slot by slot.)"""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Ends the thread; what it is doing is waited for."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        self._bounce.clear()

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        return self._thread

    def _through_thread(self, slot: Slot, source: torch.Tensor | tuple[Span, ...]) -> None:
        if self.device.type == "cpu":
            self.reader.read(source, slot.buffer)
            return
        if isinstance(source, torch.Tensor):
            step = range(0, source.numel(), BOUNCE_BYTES)
            pieces = [(start, min(BOUNCE_BYTES, source.numel() - start), None) for start in step]
        else:
            pieces = cut(source, BOUNCE_BYTES)
        for index, (offset, nbytes, spans) in enumerate(pieces):
            bounce = self._free_bounce(index)
            if spans is None:
                bounce[:nbytes].copy_(source[offset : offset + nbytes])
            else:
                self.reader.read(spans, bounce)
            self._copy(slot.buffer[offset : offset + nbytes], bounce[:nbytes], slot)
            self._bounce[index % 2][1] = slot.arrived

    def _free_bounce(self, index: int) -> torch.Tensor:
        """One of two pinned buffers, when its last copy has left it."""
        while len(self._bounce) < 2:
            self._bounce.append([allocate(BOUNCE_BYTES, torch.device("cpu"), pinned=bool(self._module)), None])
        buffer, copied = self._bounce[index % 2]
        if copied is not None:
            copied.synchronize()
        return buffer

    def _copy(self, target: torch.Tensor, source: torch.Tensor, slot: Slot) -> None:
        if not self._module:
            target.copy_(source)
            return
        with self._lock, self._on_stream():
            if slot.left is not None:
                self._stream.wait_event(slot.left)
            target.copy_(source, non_blocking=True)
            slot.arrived = self._module.Event()
            slot.arrived.record(self._stream)

    def _on_stream(self) -> contextlib.AbstractContextManager:
        return self._module.stream(self._stream)


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
