"""Order and batches: every picture as often as it should be, one size a batch, the same for the same seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from backend.dataset.bucket_sampler import epoch_batches, of_step, size_of, steps_of_epoch
from backend.dataset.dataset import Item

SIZES = [(16, 16)] * 5 + [(16, 32)] * 3


def items(count: int, **more) -> list[Item]:
    return [Item(path=Path(str(number)), captions=("",), width=16, height=16, **more) for number in range(count)]


def epoch(some, sizes, **changes):
    settings = {"batch_size": 2, "repeat": 1, "prior_share": 0.5, "seed": 0, "epoch": 0, **changes}
    return epoch_batches(some, sizes, **settings)


def test_every_picture_comes_as_often_as_asked_in_batches_of_one_size():
    batches = epoch(items(8), SIZES, repeat=3, batch_size=1)
    assert Counter(number for batch in batches for number in batch.items) == dict.fromkeys(range(8), 3)
    batches = epoch(items(8), SIZES, repeat=3, batch_size=4)
    assert all(len({SIZES[number] for number in batch.items}) == 1 for batch in batches)
    assert all(len(batch.items) == 4 for batch in batches)


def test_places_are_never_used_twice():
    places = [
        place
        for number in range(3)
        for batch in epoch(items(8), SIZES, batch_size=4, epoch=number)
        for place in batch.places
    ]
    assert len(places) == len(set(places))


def test_order_follows_from_seed_and_epoch():
    assert epoch(items(8), SIZES) == epoch(items(8), SIZES)
    assert epoch(items(8), SIZES) != epoch(items(8), SIZES, seed=1)
    assert epoch(items(8), SIZES) != epoch(items(8), SIZES, epoch=1)


def test_weights_and_pictures_trained_along():
    own = [*items(2), *items(2, weight=2.5)]
    prior = items(3, prior=True)
    batches = epoch([*own, *prior], [(16, 16)] * 7, repeat=4, batch_size=1, prior_share=0.25)
    counts = Counter(number for batch in batches for number in batch.items)
    assert [counts[number] for number in range(4)] == [4, 4, 10, 10]
    assert sum(counts[number] for number in (4, 5, 6)) == round(28 / 3)
    assert counts[6] >= 3


def test_items_of_weight_zero_are_kept_aside():
    some = [*items(3), *items(1, weight=0.0)]
    assert 3 not in {number for batch in epoch(some, [(16, 16)] * 4) for number in batch.items}


def test_processes_share_a_step_as_turns_would():
    batches = epoch(items(8), SIZES, repeat=4, batch_size=1)
    for step in range(steps_of_epoch(len(batches), processes=2, accumulation=2)):
        spread = of_step(batches, step, processes=2, accumulation=2)
        turns = of_step(batches, step, processes=1, accumulation=4)
        assert [batch for group in spread for batch in group] == [batch for group in turns for batch in group]
    assert steps_of_epoch(5, processes=2, accumulation=2) == 2


@pytest.mark.parametrize(
    ("width", "height", "fixed", "expected"),
    [
        (1024, 768, (None, None), (432, 576)),
        (100, 60, (None, None), (48, 96)),
        (100, 60, (200, 130), (192, 128)),
        (10, 10, (None, None), (16, 16)),
    ],
)
def test_sizes_keep_proportions_below_the_limit(width, height, fixed, expected):
    item = Item(path=Path("a"), captions=("",), width=width, height=height)
    settings = {"height": fixed[0], "width": fixed[1], "max_pixels": 576 * 448, "multiple": 16}
    tall, wide = size_of(item, snap=False, **settings)
    assert (tall, wide) == expected


def test_snapped_sizes_are_few():
    sizes = {
        size_of(
            Item(Path("a"), ("",), width, height), height=None, width=None, max_pixels=2**18, multiple=16, snap=True
        )
        for width in range(500, 1500, 37)
        for height in range(500, 1500, 41)
    }
    assert len(sizes) <= 20
    assert all(tall * wide <= 2**18 for tall, wide in sizes)


def test_pictures_that_lose_most_of_themselves_are_named():
    from backend.dataset.crops import losses

    def sized(name: str, width: int, height: int) -> Item:
        return Item(path=Path(name), captions=("",), width=width, height=height)

    some = [sized("tall.png", 33, 1000), sized("plain.png", 512, 512), sized("tiny.png", 10, 10)]

    def sizes(snap: bool) -> list:
        return [size_of(one, height=None, width=None, max_pixels=256 * 256, multiple=16, snap=snap) for one in some]

    said = losses(some, sizes(True), snapped=True)
    assert len(said) == 3 and said[0].startswith("tall.png (33 x 1000) keeps ") and "is enlarged" in said[0]
    assert said[1].startswith("tiny.png (10 x 10) is enlarged") and "--batch_size 1" in said[2]
    alone = losses(some[:2], sizes(False)[:2], snapped=False)
    assert alone == []
    many = losses([some[0]] * 10, [sizes(True)[0]] * 10, snapped=True)
    assert len(many) == 5 and many[3] == "7 more pictures likewise."
