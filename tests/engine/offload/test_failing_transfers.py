"""A move of weights that fails half-way: nothing is believed that did not happen, nothing stays held, and the next try computes the right numbers."""

from __future__ import annotations

import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from backend.engine.loading.disk_reader import Reader
from backend.engine.offload import placement, transfer
from backend.schema.memory_plan import VramConfig
from tests.engine.offload.test_autograd import adapt
from tests.engine.small import inputs

pytestmark = pytest.mark.torch

CODES = "float8_e4m3fn"
DISK = {"offload_device": "disk", "onload_device": "disk", "preparing_device": "disk"}
MAY_STAY = {"offload_device": "disk", "onload_device": "disk"}
FP8 = {"offload_dtype": CODES, "onload_dtype": CODES, "preparing_dtype": CODES}
MIXED = {"offload_device": "disk", "onload_device": "disk", "preparing_dtype": CODES}
CONFIGS = {"disk": DISK, "disk, may stay": MAY_STAY, "FP8": FP8, "disk, FP8 stays": MIXED}


def put(small, config: dict, limit=None, stored=torch.bfloat16):
    part, build = small(stored)
    module = build()
    asked = VramConfig(**{"computation_dtype": "bfloat16", **config})
    placed = placement.place(module, part, asked, vram_limit_bytes=limit, device="cpu")
    return module, placed


def drawn(module) -> torch.Tensor:
    with torch.no_grad():
        return module(**inputs())


def held(placed) -> list[int]:
    return [slot.num_users for pool in (placed.transfer.fetched, placed.transfer.cast) for slot in pool.slots]


class Fails:
    """Raises at call number `at` of what it stands before, once."""

    def __init__(self, real, at: int):
        self.real, self.at, self.calls = real, at, 0

    def __call__(self, *args, **named):
        self.calls += 1
        if self.calls == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.real(*args, **named)


@pytest.mark.parametrize("at", [1, 2, 3, 7, 8, 16])
def test_a_cast_that_failed_is_made_again(small, monkeypatch, at):
    module, placed = put(small, FP8)
    placed.onload()
    want = drawn(module)
    placed.transfer.cast.slots.clear()  # as in a first pass: no layer is cast yet
    monkeypatch.setattr(transfer, "convert", Fails(transfer.convert, at))
    with pytest.raises(torch.OutOfMemoryError):
        drawn(module)
    assert not any(held(placed)) and not placed.calls
    assert torch.equal(drawn(module), want)
    placed.close()


@pytest.mark.parametrize("at", [1, 2, 9, 20])
def test_a_block_whose_layer_failed_is_let_go(small, monkeypatch, at):
    """Streamed and cast: block and layer are held together, or not at all."""
    module, placed = put(small, DISK, stored=torch.float32)
    placed.onload()
    want = drawn(module)
    monkeypatch.setattr(transfer, "convert", Fails(transfer.convert, at))
    placed.transfer.cast.slots.clear()
    with pytest.raises(torch.OutOfMemoryError):
        drawn(module)
    assert not any(held(placed))
    moved = placed.moved_bytes
    for _ in range(3):
        assert torch.equal(drawn(module), want)
    assert len(placed.transfer.fetched.slots) == 2 and placed.moved_bytes > moved
    placed.close()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("level", ["onload", "offload"])
def test_a_change_of_level_that_failed_is_made_again(small, monkeypatch, name, level):
    module, placed = put(small, CONFIGS[name], stored=torch.float32)
    placed.onload()
    drawn(module)
    if level == "offload":
        placed.offload()
    want = drawn(module)
    getattr(placed, {"onload": "offload", "offload": "onload"}[level])()
    real = placed._storage.move
    for at in range(1, 100):
        fails = Fails(real, at)
        monkeypatch.setattr(placed._storage, "move", fails)
        try:
            getattr(placed, level)()
            got = drawn(module)
        except torch.OutOfMemoryError:
            assert not any(held(placed))
        else:
            break
        monkeypatch.setattr(placed._storage, "move", real)
        getattr(placed, level)()
        got = drawn(module)
        assert torch.equal(got, want), at
        getattr(placed, {"onload": "offload", "offload": "onload"}[level])()
    assert fails.calls < at and torch.equal(got, want)
    placed.close()


@pytest.mark.parametrize("limit", [None, 170_000])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_block_that_could_not_stay_yet_does_so_in_the_next_pass(small, monkeypatch, limit, at):
    module, placed = put(small, MAY_STAY, limit, stored=torch.float32)
    want = drawn(module)
    placed.onload()
    real = placed._storage.move
    monkeypatch.setattr(placed._storage, "move", Fails(real, at))
    try:
        first = drawn(module)
    except torch.OutOfMemoryError:
        first = drawn(module)
    assert torch.equal(first, want) and torch.isfinite(first).all()
    assert limit or placed.resident_blocks() == (0, 1, 2, 3)
    placed.close()


@pytest.mark.parametrize("config", [DISK, MIXED, FP8], ids=["disk", "disk, FP8 stays", "FP8"])
@pytest.mark.parametrize("again", ["called", "offloaded"])
def test_a_backward_pass_that_failed_leaves_nothing_held(small, config, again):
    """Whether the part is called again or put away first."""
    module, placed = put(small, config, limit=0)
    placed.onload()
    added = adapt(module)

    def gradients() -> list[torch.Tensor]:
        for parameter in added:
            parameter.grad = None
        module(**inputs(2)).float().square().mean().backward()
        return [parameter.grad.clone() for parameter in added]

    want = gradients()

    def runs_out(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for block in (3, 1, 0):
        hook = module.blocks[block].register_forward_hook(lambda *_: _[2][0].register_hook(runs_out) and None)
        with pytest.raises(torch.OutOfMemoryError):
            gradients()
        hook.remove()
        if again == "offloaded":
            placed.offload()
            placed.onload()
            assert not placed.passes and not any(held(placed))
        assert all(torch.equal(got, need) for got, need in zip(gradients(), want, strict=True))
        assert not any(held(placed)) and not placed.passes
    placed.close()


class Slow(Reader):
    """Reads nothing before it may."""

    def __init__(self):
        super().__init__()
        self.may, self.reads = threading.Event(), threading.Event()
        self.may.set()

    def read(self, spans, buffer) -> None:
        self.reads.set()
        self.may.wait(20)
        super().read(spans, buffer)


def test_a_part_that_is_dropped_leaves_its_buffer_to_the_reading_thread_and_ends_it(small):
    """Two blocks of the next pass are always on their way."""
    import gc

    part, build = small()
    module, reader = build(), Slow()
    placed = placement.place(module, part, VramConfig(**DISK), device="cpu", reader=reader)
    placed.onload()
    with torch.no_grad():
        module(**inputs())
    placed.transfer.fetched.stop()
    reader.may.clear()
    reader.reads.clear()
    placed.transfer.fetched.slots.clear()  # nothing is fetched yet
    with placed.lock:
        placed.transfer.look_ahead()
    assert reader.reads.wait(20)
    slots = placed.transfer.fetched.slots
    storages = [weakref.ref(slot.buffer.untyped_storage()) for slot in slots]
    thread = next(iter(placed.transfer.prefetcher._thread._threads))
    gone = weakref.ref(placed)
    del module, placed, slots
    gc.collect()
    assert gone() is None and thread.is_alive()
    assert sum(one() is not None for one in storages) == 1  # the one that is read into; the other never is
    reader.may.set()
    thread.join(20)
    assert not thread.is_alive()
    gc.collect()
    assert [one() for one in storages] == [None, None]
