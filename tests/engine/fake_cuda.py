"""A card without a card: memory of its own kind in RAM, and a stream whose copies run late, in any order that is legal.

The device is called `cpu:1`; whatever asks where weights lie sees that it is not RAM, and torch computes on it as on the CPU. What the main thread
computes runs at once. A copy on another stream is only put on a queue. It runs at a random moment, or when somebody must wait for it. Two things are
checked at each step, whenever it really runs (after happens-before, as NVIDIA's sanitizer does):

* what is read was waited for, and what is written over was let go of, by events between the two streams;
* memory that is freed is not named by a copy that may still run, unless the allocator was told of the stream (`record_stream`).
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from backend.engine.devices import device_memory
from backend.engine.loading import disk_reader as stream
from backend.engine.loading import pinned_copy
from backend.engine.offload import block_storage, prefetch
from backend.engine.offload import pinned_memory as pinned

CARD = torch.device("cpu", 1)


@dataclass
class Room:
    """Memory of the card that blocks are moved into."""

    ref: weakref.ref
    used: int  # the clock of the computing stream when it was last used there
    written: int = 0  # the number of the last copy into it
    recorded: bool = False  # whether the allocator knows that another stream uses it


class FakeCard:
    """Stands for `torch.cuda`. `early`: how likely a queued copy is to run before each operation; 0: all run as late as they may."""

    def __init__(self, seed: int, early: float):
        self._random, self._early = random.Random(seed), early
        self._lock = threading.RLock()
        self._rooms: dict[int, Room] = {}
        self._pinned: set[int] = set()
        self._queue: list[tuple[int, Callable[[], None]]] = []  # copies of the other stream, by number
        self._own: list[Callable[[], None]] = []  # copies from pinned RAM on the computing stream
        self.clock = self.number = 0  # of operations of the computing stream, of copies of the other
        self.computing_knows = self.host_knows = self.copying_knows = 0
        self.faults: list[str] = []
        self.num_copies = 0

    # --- what torch.cuda has

    def Stream(self, device=None) -> FakeStream:
        return FakeStream(self, copying=True)

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device=None) -> FakeStream:
        return FakeStream(self, copying=False)

    def stream(self, stream: FakeStream) -> contextlib.AbstractContextManager:
        return _Queueing(self)

    # --- memory

    def allocate(self, nbytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
        buffer = stream.allocate(nbytes, device_memory.RAM)
        storage = buffer.untyped_storage()
        key = storage._cdata
        with self._lock:
            if pinned:
                self._pinned.add(key)
                weakref.finalize(storage, self._pinned.discard, key)
            elif device == CARD and nbytes:
                self._rooms[key] = Room(weakref.ref(storage, lambda _: self._freed(key)), self.clock)
        return buffer

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def record_stream(self, tensor: torch.Tensor) -> None:
        self._rooms[tensor.untyped_storage()._cdata].recorded = True

    def _freed(self, key: int) -> None:
        with self._lock:
            room = self._rooms.pop(key)
            if not room.recorded and room.written > max(self.computing_knows, self.host_knows):
                self.faults.append("memory was freed while a copy to it may still run")

    # --- what runs

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """The computing stream reads or writes `tensors`."""
        with self._lock:
            while self._queue and self._random.random() < self._early:
                self._run(self._queue[0][0])
            self.clock += 1
            for one in tensors:
                room = self._rooms.get(one.untyped_storage()._cdata)
                if room is not None:
                    room.used = self.clock
                    if room.written > self.computing_knows:
                        self.faults.append("a block was used before it had arrived")

    def copy_behind(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy on the computing stream out of pinned RAM: the host goes on."""
        self.use([target])
        with self._lock:
            self._own.append(lambda: _copy(target, source))

    def run_own(self) -> None:
        with self._lock:
            waiting, self._own = self._own, []
        for copy in waiting:
            copy()

    def copy_aside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy on the other stream."""
        if not self.is_pinned(source):
            with _disable_current_modes():
                source = source.clone()  # such RAM is read before the call returns
        with self._lock:
            room = self._rooms.get(target.untyped_storage()._cdata)
            if room is None:
                self.faults.append("a copy goes to memory that is none of the card's")
                return
            if room.used > self.copying_knows:
                self.faults.append("a block is written over while it may still be read")
            self.number += 1
            self.num_copies += 1
            room.written = self.number
            ref, place = room.ref, (target.dtype, target.storage_offset(), target.shape)

            def copy() -> None:
                storage = ref()
                if storage is not None:
                    with _disable_current_modes():
                        there = torch.empty(0, dtype=place[0]).set_(storage, place[1], place[2])
                    _copy(there, source)

            self._queue.append((self.number, copy))

    def _run(self, number: int) -> None:
        """The copies of the other stream up to this one."""
        while self._queue and self._queue[0][0] <= number:
            self._queue.pop(0)[1]()

    def arrive(self, number: int) -> None:
        with self._lock:
            self._run(number)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with _disable_current_modes(), torch.no_grad():
        target.copy_(source)


def _tensors(values) -> Iterator[torch.Tensor]:
    """Those that an operation is given; none is given by name alone."""
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


class FakeStream:
    def __init__(self, card: FakeCard, *, copying: bool):
        self.card, self.copying = card, copying

    def wait_event(self, event: FakeEvent) -> None:
        card = self.card
        with card._lock:
            if self.copying:
                card.copying_knows = max(card.copying_knows, event.clock)
            else:
                card.computing_knows = max(card.computing_knows, event.number)
                card.arrive(event.number)

    def synchronize(self) -> None:
        if self.copying:
            with self.card._lock:
                self.card.arrive(self.card.number)
                self.card.host_knows = self.card.number
        else:
            self.card.run_own()


class FakeEvent:
    def __init__(self, card: FakeCard):
        self.card, self.clock, self.number = card, 0, 0

    def record(self, stream: FakeStream) -> None:
        with self.card._lock:
            if stream.copying:
                self.number, self.clock = self.card.number, self.card.copying_knows
            else:
                self.clock, self.number = self.card.clock, self.card.computing_knows

    def synchronize(self) -> None:
        with self.card._lock:
            self.card.run_own()
            self.card.arrive(self.number)
            self.card.host_knows = max(self.card.host_knows, self.number)


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping the compiler away takes half of the time


class _Queueing(_Mode):
    """What a thread launches on the other stream."""

    def __init__(self, card: FakeCard):
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.card.copy_aside(args[0], args[1])
            return args[0]
        assert func.is_view, f"{func} on the stream for copies"
        return func(*args, **(kwargs or {}))


class _Computing(_Mode):
    """What the main thread launches."""

    def __init__(self, card: FakeCard):
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and len(args) == 3 and args[2] and self.card.is_pinned(args[1]):
            self.card.copy_behind(args[0], args[1])
            return args[0]
        self.card.run_own()
        self.card.use(_tensors(args))
        return func(*args, **kwargs)


@contextlib.contextmanager
def fake_card(monkeypatch, seed: int, *, early: float) -> Iterator[FakeCard]:
    """While this is open, `CARD` is a device with streams, on which this thread computes."""
    card, check = FakeCard(seed, early), device_memory.check_device
    with monkeypatch.context() as patched:
        for module in (prefetch, block_storage, pinned, pinned_copy):
            patched.setattr(module, "allocate", card.allocate)
        for module in (prefetch, pinned_copy):
            patched.setattr(module, "streams_of", lambda device: card if device == CARD else None)
        patched.setattr(device_memory, "check_device", lambda name: CARD if str(name) == str(CARD) else check(name))
        patched.setattr(device_memory, "can_pin", lambda device: torch.device(device) == CARD)
        patched.setattr(device_memory, "allocated", lambda device: 0)
        patched.setattr(device_memory, "empty_cache", lambda device: None)
        patched.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: card.is_pinned(tensor))
        patched.setattr(torch.Tensor, "record_stream", lambda tensor, stream: card.record_stream(tensor))
        with _Computing(card):
            yield card
