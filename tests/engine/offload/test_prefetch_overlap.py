"""Streaming overlaps: a step costs the longer of computing and moving, not their sum.

Time here is counted, not measured: computing and reading "sleep" on a clock that moves on only when every thread that has something to do
sleeps. So the test says what the order of things allows, on a busy machine too; `benchmarks/engine.py` measures.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from backend.engine.loading.disk_reader import Reader
from backend.engine.offload import placement
from backend.engine.offload.prefetch import Prefetcher
from backend.schema.memory_plan import VramConfig

pytestmark = pytest.mark.torch

COMPUTE = 1.0  # seconds of the clock that each block computes
NUM_BLOCKS = 8
ON_DISK = {"offload_device": "disk", "onload_device": "disk"}


class Clock:
    """Moves to the next awakening when the main thread sleeps or waits for the reader, and the reader sleeps or has nothing to read."""

    def __init__(self):
        self.now, self.changed = 0.0, threading.Condition()
        self.awake_at: dict[str, float] = {}
        self.reading: list = []  # slots that are still to be filled
        self.waits_for = None  # the slot that the main thread cannot go on without
        self.over = False

    def sleep(self, who: str, seconds: float) -> None:
        with self.changed:
            until = self.awake_at[who] = self.now + seconds
            self._move()
            assert self.changed.wait_for(lambda: self.now >= until or self.over, timeout=20)
            del self.awake_at[who]

    def stop(self) -> None:
        """Nobody sleeps any longer."""
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def submitted(self, slot) -> None:
        with self.changed:
            self.reading.append(slot)

    def filled(self, slot) -> None:
        with self.changed:
            self.reading.remove(slot)
            if self.waits_for is slot and slot not in self.reading:
                self.waits_for = None
            self._move()

    @contextmanager
    def waiting(self, slot):
        with self.changed:
            self.waits_for = slot if slot in self.reading else None
            self._move()
        yield

    def _move(self) -> None:
        main_rests = "main" in self.awake_at or self.waits_for is not None
        reader_rests = "reader" in self.awake_at or not self.reading
        if main_rests and reader_rests and self.awake_at:
            self.now = max(self.now, min(self.awake_at.values()))
            self.changed.notify_all()


class Throttled(Reader):
    """A disk that gives so many bytes a second of the clock."""

    def __init__(self, clock: Clock, rate: float):
        super().__init__()
        self.clock, self.rate = clock, rate

    def read(self, spans, buffer) -> None:
        super().read(spans, buffer)
        self.clock.sleep("reader", sum(span.nbytes for span in spans) / self.rate)


class Watched(Prefetcher):
    """Tells the clock what is asked of the reading thread."""

    def start(self, slot, source, nbytes) -> None:
        if slot.pending_read is not None and slot.pending_read.cancel():
            self.reader.clock.filled(slot)
        self.reader.clock.submitted(slot)
        super().start(slot, source, nbytes)

    def wait(self, slot) -> None:
        with self.reader.clock.waiting(slot):
            super().wait(slot)

    def _through_thread(self, slot, source) -> None:
        super()._through_thread(slot, source)
        self.reader.clock.filled(slot)


class Computes(torch.nn.Linear):
    clock: Clock

    def forward(self, x):
        self.clock.sleep("main", COMPUTE)
        return super().forward(x)


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Computes(64, 64) for _ in range(NUM_BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def placed_stack(part, config: dict, ratio: float, **options):
    """A module whose blocks take `ratio` times as long to read as to compute, its placement and the clock."""
    clock = Clock()
    reader = Throttled(clock, part.nbytes / (ratio * COMPUTE * NUM_BLOCKS))
    with torch.device("meta"):
        module = Stack()
    for block in module.blocks:
        block.clock = clock
    placed = placement.place(module, part, VramConfig(**config), device="cpu", reader=reader, **options)
    placed.transfer.prefetcher = Watched(reader, placed.device)
    placed.onload()
    return module, placed, clock


def step_seconds(module, clock: Clock, steps: int) -> list[float]:
    x, found = torch.randn(1, 64, dtype=torch.bfloat16), []
    with torch.no_grad():
        for _ in range(steps):
            begin = clock.now
            module(x)
            found.append(clock.now - begin)
    return found


@pytest.mark.parametrize("staging", [2, 3])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 1.0, 1.1, 2.0, 8.0])
def test_a_step_costs_the_longer_of_computing_and_reading(write_part, ratio, staging):
    part = write_part(Stack(), dtype=torch.bfloat16)
    module, placed, clock = placed_stack(part, {**ON_DISK, "preparing_device": "disk"}, ratio, staging=staging)
    before = placed.moved_bytes
    found = step_seconds(module, clock, 6)
    longer = max(1.0, ratio) * COMPUTE * NUM_BLOCKS
    assert placed.moved_bytes - before >= 6 * part.nbytes  # nothing was kept from step to step
    assert sum(found[2:]) / 4 <= 1.10 * longer, f"{found} against {longer}"
    assert sum(found[2:]) / 4 >= 0.99 * longer
    clock.stop()
    placed.close()


@pytest.mark.parametrize(("ratio", "longer"), [(1.8, 1.0), (2.0, 1.0), (3.0, 1.5)])
def test_blocks_that_stay_hide_the_reading_of_the_others(write_part, ratio, longer):
    """Every second block stays, so half is to be read: hidden up to twice the time of computing."""
    part = write_part(Stack(), dtype=torch.bfloat16)
    module, placed, clock = placed_stack(part, ON_DISK, ratio, resident=(1, 3, 5, 7))
    found = step_seconds(module, clock, 6)
    assert placed.resident_blocks() == (1, 3, 5, 7)
    assert sum(found[2:]) / 4 <= 1.10 * longer * COMPUTE * NUM_BLOCKS
    clock.stop()
    placed.close()


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_a_training_step_overlaps_there_and_back(write_part, ratio):
    """Forwards and, recomputing, backwards: two passes over the blocks, each at the speed of the slower. Two blocks are still there when
    the direction turns."""
    from torch.utils.checkpoint import checkpoint

    part = write_part(Stack(), dtype=torch.bfloat16)
    module, placed, clock = placed_stack(part, {**ON_DISK, "preparing_device": "disk"}, ratio)
    x, found = torch.randn(1, 64, dtype=torch.bfloat16, requires_grad=True), []
    for _ in range(5):
        begin, moved = clock.now, placed.moved_bytes
        y = x
        for block in module.blocks:
            y = checkpoint(block, y, use_reentrant=False)
        y.float().sum().backward()
        found.append(clock.now - begin)
    longer = 2 * max(1.0, ratio) * COMPUTE * NUM_BLOCKS
    assert sum(found[2:]) / 3 <= 1.10 * longer, f"{found} against {longer}"
    assert placed.moved_bytes - moved <= 2 * part.nbytes
    clock.stop()
    placed.close()
