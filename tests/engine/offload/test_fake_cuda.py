"""Copies beside the computing may run as late, or as early, as they like: answers and gradients stay those of a resident module, to the bit, and no
memory is handed on that a copy still goes to."""

from __future__ import annotations

import gc
import random

import pytest

torch = pytest.importorskip("torch")

from backend.engine.loading import load, pinned_copy
from backend.engine.offload import placement
from backend.schema.memory_plan import VramConfig
from tests.engine.fake_cuda import CARD, FakeCard, fake_card
from tests.engine.offload.test_autograd import adapt
from tests.engine.small import inputs

pytestmark = pytest.mark.torch

CODES = "float8_e4m3fn"
RAM = {"offload_device": "cpu", "onload_device": "cpu"}
DISK = {"offload_device": "disk", "onload_device": "disk"}
STORED_FP8 = {"offload_dtype": CODES, "onload_dtype": CODES, "preparing_dtype": CODES}
CONFIGS = {
    "part offload": {"offload_device": "cpu"},
    "streamed from RAM": {**RAM, "preparing_device": "cpu"},
    "streamed from disk": {**DISK, "preparing_device": "disk"},
    "disk to RAM, streamed": {"offload_device": "disk", "onload_device": "cpu", "preparing_device": "cpu"},
    "some stay": RAM,
    "some stay, the others from disk": DISK,
    "FP8 on the card": {"offload_device": "cpu", **STORED_FP8},
    "FP8 streamed": {**RAM, **STORED_FP8, "preparing_device": "cpu"},
    "disk, FP8 stays": {**DISK, "preparing_dtype": CODES},
}
NUM_SCHEDULES = 200


def backwards(module, added: list, checkpoints: bool | None) -> list[torch.Tensor]:
    module.checkpoints = checkpoints
    given = inputs(2)
    given["x"].requires_grad_(checkpoints is True)
    for parameter in added:
        parameter.grad = None
    module(**given).float().square().mean().backward()
    module.checkpoints = None
    return [parameter.grad.clone() for parameter in added]


def drawn(module) -> torch.Tensor:
    with torch.no_grad():
        return module(**inputs())


def live(part, build, seed: int) -> tuple[list, list]:
    """A part's life on the card: placed, drawn with, trained through, put away, and closed or just dropped. Answers what it computed, and
    what a resident module needs to do the same."""
    chance = random.Random(seed)
    name = chance.choice(list(CONFIGS))
    module, resident = build(), tuple(sorted(chance.sample(range(3), chance.randint(0, 3))))
    placed = placement.place(
        module,
        part,
        VramConfig(**CONFIGS[name]),
        device=CARD,
        resident=resident,
        staging=chance.choice([2, 3]),
    )
    found, added = [], []
    placed.onload()
    plain = build()
    for key in part.tensors:
        load.assign(plain, key, placed.read(key))
    plain.requires_grad_(False)
    todo = chance.choices(["draw", "train", "checkpoint", "reentrant", "away"], k=3)
    if set(todo) - {"draw", "away"}:
        added = [adapt(one) for one in (module, plain)]
    for what in todo:
        if what == "away":
            placed.offload()
            placed.onload()
        elif what == "draw":
            found.append((name, drawn(module)))
        else:
            how = {"train": None, "checkpoint": False, "reentrant": True}[what]
            found.append((name, backwards(module, added[0], how)))
    if chance.random() < 0.5:
        placed.close()
    return found, [plain, added, todo]


def expected(plain, added: list, todo: list[str]) -> list:
    wanted = []
    for what in todo:
        if what == "draw":
            wanted.append(drawn(plain))
        elif what != "away":
            wanted.append(backwards(plain, added[1], {"train": None, "checkpoint": False, "reentrant": True}[what]))
    return wanted


def run(monkeypatch, part, build, seed: int) -> FakeCard:
    early = [0.0, 0.05, 0.3, 0.9][seed % 4]
    with fake_card(monkeypatch, seed, early=early) as card:
        found, plain = live(part, build, seed)
        if seed % 2:  # what was dropped goes while copies to it are under way
            gc.collect()
    for (name, got), want in zip(found, expected(*plain), strict=True):
        pairs = zip(got, want, strict=True) if isinstance(got, list) else [(got, want)]
        assert all(torch.equal(one, other) for one, other in pairs), (seed, name)
    assert not card.faults, (seed, card.faults)
    return card


@pytest.fixture
def pieces(monkeypatch) -> None:
    """Blocks of the small network go through the pinned buffers in several pieces, as large ones do."""
    monkeypatch.setattr(pinned_copy.PinnedCopy.__init__, "__kwdefaults__", {"bounce_bytes": 8192})


@pytest.mark.parametrize("quarter", range(4))
def test_whatever_the_schedule_the_numbers_are_those_of_a_resident_module(small, monkeypatch, pieces, quarter):
    part, build = small(num_blocks=3)
    cards = [run(monkeypatch, part, build, seed) for seed in range(quarter, NUM_SCHEDULES, 4)]
    assert sum(card.num_copies for card in cards) > 8 * len(cards)


@pytest.mark.parametrize("name", ["streamed from RAM", "streamed from disk", "FP8 streamed"])
@pytest.mark.parametrize("how", ["dropped", "closed", "put away"])
def test_a_part_that_goes_leaves_its_buffers_to_the_copies_under_way(small, monkeypatch, pieces, name, how):
    """After a pass the first blocks of the next are on their way."""
    part, build = small(num_blocks=3)
    with fake_card(monkeypatch, 0, early=0.0) as card:
        module = build()
        placed = placement.place(module, part, VramConfig(**CONFIGS[name]), device=CARD)
        placed.onload()
        drawn(module)
        for slot in placed.transfer.fetched.slots:  # the thread has launched its copies; they have not run
            if slot.pending_read is not None:
                slot.pending_read.result()
        assert card._queue
        rooms = [room for room in card._rooms.values() if room.written]
        if how == "dropped":
            del module, placed, slot
        else:
            placed.close() if how == "closed" else placed.offload()
            assert not card._queue
            del slot
        gc.collect()
        assert rooms and all(room.ref() is None for room in rooms)
    assert not card.faults
