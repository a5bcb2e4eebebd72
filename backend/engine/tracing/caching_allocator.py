"""torch's caching allocator, replayed on a tape: how much a device must hold beyond the bytes that are alive.

Rules as torch documents them for its native CUDA allocator: sizes in steps of 512 B; blocks up to 1 MiB come from
segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from segments of their own in steps of 2 MiB; best
fit; a block is split where the rest is useful; a freed block joins its neighbours; when the device is full, segments
that hold nothing are given back and the request is tried again. With `expandable` there is one growing segment for each
size class.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from backend.engine.tracing.allocation_recorder import Tape, rounded
from backend.schema.memory_plan import MIB

SMALL = MIB
EXPANDABLE_PAGE = {True: 2 * MIB, False: 20 * MIB}


class OutOfPool(Exception):
    """Out of memory in the simulation: the limit is too low for the trace."""


class _Block:
    """`size` bytes of a segment (its number, whether for small blocks) from `start`; neighbours `before` and `next`."""

    __slots__ = ("before", "free", "next", "segment", "size", "start")

    def __init__(self, segment: tuple[int, bool], start: int, size: int):
        self.segment, self.start, self.size, self.free = segment, start, size, True
        self.before: _Block | None = None
        self.next: _Block | None = None


class Pool:
    """The allocator's segments on one device. `reserved` bytes are held now, at most `limit`; `highest`: the peak."""

    def __init__(self, limit: int | None = None, expandable: bool = False):
        self.limit, self.expandable = limit, expandable
        self.reserved = self.highest = 0
        # small? -> sorted (size, segment, start, block)
        self.free: dict[bool, list[tuple[int, int, int, _Block]]] = {True: [], False: []}
        self.segments = 0
        self.tail: dict[bool, _Block | None] = {True: None, False: None}  # of the expandable segment

    def take(self, nbytes: int) -> _Block:
        """Allocates `nbytes`. Raises OutOfPool beyond the limit."""
        size = rounded(max(nbytes, 1))
        small = size <= SMALL
        found = self._best(size, small)
        if found is None:
            found = self._grow(size, small) if self.expandable else self._segment(size, small)
        return self._split(found, size, small)

    def give(self, block: _Block) -> None:
        """Frees a block."""
        small = block.segment[1]
        block.free = True
        for other in (block.before, block.next):
            if other is not None and other.free:
                self._drop(other, small)
                block = _joined(block, other)
        if self.tail[small] is not None and block.next is None and self.expandable:
            self.tail[small] = block
        self._keep(block, small)

    def _best(self, size: int, small: bool) -> _Block | None:
        ready = self.free[small]
        at = bisect_left(ready, (size, -1, -1))
        return ready.pop(at)[3] if at < len(ready) else None

    def _split(self, block: _Block, size: int, small: bool) -> _Block:
        rest = block.size - size
        block.free = False
        if rest >= 512 if small or self.expandable else rest > SMALL:
            tail = _Block(block.segment, block.start + size, rest)
            tail.before, tail.next = block, block.next
            if block.next is not None:
                block.next.before = tail
            block.next, block.size = tail, size
            if self.tail[small] is block:
                self.tail[small] = tail
            self._keep(tail, small)
        return block

    def _segment(self, size: int, small: bool) -> _Block:
        whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self._reserve(whole)
        self.segments += 1
        return _Block((self.segments, small), 0, whole)

    def _grow(self, size: int, small: bool) -> _Block:
        last = self.tail[small]
        free = last if last is not None and last.free else None
        spare = 0 if free is None else free.size
        page = EXPANDABLE_PAGE[small]
        more = -(-(size - spare) // page) * page
        self._reserve(more)
        if free is not None:
            self._drop(free, small)
            free.size += more
            return free
        start = 0 if last is None else last.start + last.size
        block = _Block((0, small), start, more)
        block.before = last
        if last is not None:
            last.next = block
        self.tail[small] = block
        return block

    def _reserve(self, more: int) -> None:
        if self.limit is not None and self.reserved + more > self.limit:
            self._flush()
            if self.reserved + more > self.limit:
                raise OutOfPool
        self.reserved += more
        self.highest = max(self.highest, self.reserved)

    def _flush(self) -> None:
        for ready in self.free.values():
            for entry in [one for one in ready if one[3].before is None and one[3].next is None]:
                if not self.expandable:
                    ready.remove(entry)
                    self.reserved -= entry[0]

    def _keep(self, block: _Block, small: bool) -> None:
        insort(self.free[small], (block.size, block.segment[0], block.start, block))

    def _drop(self, block: _Block, small: bool) -> None:
        ready = self.free[small]
        del ready[bisect_left(ready, (block.size, block.segment[0], block.start))]


def _joined(block: _Block, other: _Block) -> _Block:
    """The free `block` and its free neighbour as one."""
    first, second = (other, block) if other is block.before else (block, other)
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.before = first
    return first


def replay(tape: Tape, *, limit: int | None = None, expandable: bool = False, times: int = 2) -> int:
    """Peak reserved bytes when the trace runs `times` times over. Raises OutOfPool where `limit` bytes are too few."""
    pool = Pool(limit, expandable)
    for _ in range(times):
        blocks: dict[int, _Block] = {}
        for event in tape.events:
            if event >= 0:
                blocks[event] = pool.take(tape.sizes[event])
            else:
                pool.give(blocks.pop(~event))
        for block in blocks.values():
            pool.give(block)
    return pool.highest


def least(tape: Tape, peak_bytes: int) -> int:
    """The smallest pool in bytes, within 1 %, in which the trace still runs (unused segments freed when it is full)."""
    low, high = peak_bytes, replay(tape)
    while high - low > max(0.01 * peak_bytes, 2 * MIB):
        middle = (low + high) // 2
        try:
            replay(tape, limit=middle)
            high = middle
        except OutOfPool:
            low = middle
    return high
