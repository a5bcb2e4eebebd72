"""Which pictures go together in which step. Everything follows from the seed and the epoch's number. No torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from random import Random

from backend.dataset.dataset import Item

RATIOS = (1.0, 5 / 4, 4 / 3, 3 / 2, 16 / 9, 2.0, 2.5, 3.0, 4.0)


@dataclass(frozen=True)
class Batch:
    """Indices of items of one shape, and of each its place in the whole run's stream of samples."""

    items: tuple[int, ...]
    places: tuple[int, ...]


def size_of(
    item: Item, *, height: int | None, width: int | None, max_pixels: int, multiple: int, snap: bool
) -> tuple[int, int]:
    """(height, width) at which a picture is trained.

    Fixed where both are given; else the picture's own, made smaller to at most `max_pixels`, each side cut to a
    multiple of `multiple`. `snap` chooses the nearest of a few proportions and areas (halved from `max_pixels` on), so
    that batches fill.
    """
    if height and width:
        return _floor(height, multiple), _floor(width, multiple)
    area = min(item.width * item.height, max_pixels)
    ratio = item.height / item.width
    if snap:
        area = max_pixels / 2 ** max(0, math.ceil(math.log2(max_pixels / area) - 0.1))
        ratio = min((r if ratio >= 1 else 1 / r for r in RATIOS), key=lambda r: abs(math.log(r / ratio)))
    tall = round(math.sqrt(area * ratio), 6)
    return _floor(tall, multiple), _floor(tall / ratio, multiple)


def _floor(side: float, multiple: int) -> int:
    return max(multiple, int(side // multiple) * multiple)


def epoch_batches(
    items: Sequence[Item],
    shapes: Sequence[Hashable],
    *,
    batch_size: int,
    repeat: int,
    prior_share: float,
    seed: int,
    epoch: int,
) -> list[Batch]:
    """The batches of one epoch in their order.

    Batches hold items of equal `shapes`; the last of each shape may be smaller.

    Every picture comes `repeat` times its weight; pictures drawn by the untouched model are added until they are
    `prior_share` of the samples.
    """
    random = Random(f"{seed}/{epoch}/order")
    samples = _samples(items, repeat, prior_share, random, epoch)
    random.shuffle(samples)
    start = epoch * 2 * len(samples)  # twice: those that fill up have places too
    waiting: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    batches: list[Batch] = []
    for offset, item in enumerate(samples):
        group = waiting[shapes[item]]
        group.append((item, start + offset))
        if len(group) == batch_size:
            batches.append(_batch(group))
            group.clear()
    for shape, group in waiting.items():
        if group:
            batches.append(_batch(_filled(group, shape, samples, shapes, batch_size, start + 2 * len(samples) - 1)))
    random.shuffle(batches)
    return batches


def _filled(group: list, shape: Hashable, samples: list[int], shapes, batch_size: int, last: int) -> list:
    """The rest of a shape as a whole batch: filled with others of it where the epoch has a batch of them, else left
    small.

    A step on a handful of samples among large ones would be mostly noise.
    """
    alike = [item for item in samples if shapes[item] == shape]
    if len(alike) < batch_size:
        return list(group)
    return [*group, *((item, last - turn) for turn, item in enumerate(alike[: batch_size - len(group)]))]


def _batch(group: list[tuple[int, int]]) -> Batch:
    return Batch(items=tuple(item for item, _ in group), places=tuple(place for _, place in group))


def _samples(items: Sequence[Item], repeat: int, prior_share: float, random: Random, epoch: int) -> list[int]:
    """Item numbers with their repetitions. The count is the same in every epoch, whatever is drawn."""
    own = [number for number, item in enumerate(items) if not item.prior]
    prior = [number for number, item in enumerate(items) if item.prior]
    samples: list[int] = []
    for weight in sorted({items[number].weight for number in own} - {0.0}):
        group = [number for number in own if items[number].weight == weight]
        random.shuffle(group)
        count = max(1, round(len(group) * repeat * weight))
        samples += [group[place % len(group)] for place in range(count)]
    if prior:
        extra = max(1, round(len(samples) * prior_share / (1 - prior_share)))
        samples += [prior[(epoch * extra + place) % len(prior)] for place in range(extra)]
    return samples


def kept_aside(items: Sequence[Item], share: float, *, seed: int) -> list[int]:
    """Which of the own pictures are kept for validation: `share` of them, at least one where there are two."""
    own = [number for number, item in enumerate(items) if not item.prior]
    Random(f"{seed}/validation").shuffle(own)
    return own[: max(1, round(len(own) * share))] if share and len(own) > 1 else []


def steps_of_epoch(num_batches: int, *, processes: int, accumulation: int) -> int:
    return math.ceil(num_batches / (processes * accumulation))


def of_step(batches: Sequence[Batch], step: int, *, processes: int, accumulation: int) -> list[list[Batch]]:
    """`[accumulation][process]` batches of step `step` of an epoch; the epoch's first batches fill up its last step."""
    first = step * processes * accumulation
    return [
        [batches[(first + turn * processes + rank) % len(batches)] for rank in range(processes)]
        for turn in range(accumulation)
    ]
