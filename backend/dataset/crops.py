"""Which part of a picture is shown: the largest middle part, and other cuts as far as its proportions and pixels allow.

No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from backend.dataset.dataset import Item

LEAST = 1.02  # cuts that differ by less are one

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the upright picture


def num_cuts(item: Item, size: tuple[int, int], *, crops: int, zoom: float) -> int:
    """How many different cuts of `item` there are at `size` (height, width), up to `crops`."""
    if crops == 1 or item.prior:
        return 1
    width, height = largest(item, size)
    free = max(item.width / width, item.height / height, _most_zoom(item, size, zoom))
    return crops if free >= LEAST else 1


def cut(item: Item, size: tuple[int, int], number: int, *, zoom: float) -> Box | None:
    """The box of cut `number` with the proportions of `size`; None for cut 0, the largest middle part.

    The others lie anywhere and are up to `zoom` times smaller than the largest, but never so small that they would be
    enlarged.
    """
    if number == 0:
        return None
    random = Random(f"{item.digest}/{number}")
    width, height = largest(item, size)
    shrink = random.uniform(1.0, _most_zoom(item, size, zoom))
    width, height = width / shrink, height / shrink
    left, top = random.uniform(0, item.width - width), random.uniform(0, item.height - height)
    return round(left, 3), round(top, 3), round(left + width, 3), round(top + height, 3)


def largest(item: Item, size: tuple[int, int]) -> tuple[float, float]:
    """Width and height of the largest part with the proportions of `size`."""
    scale = min(item.width / size[1], item.height / size[0])
    return size[1] * scale, size[0] * scale


def _most_zoom(item: Item, size: tuple[int, int], zoom: float) -> float:
    return max(1.0, min(zoom, largest(item, size)[1] / size[0]))


LEAST_KEPT = 0.6  # of a picture's area: what loses more to the cut is said
MOST_ENLARGED = 1.25  # times: what is enlarged more is said
MOST_NAMED = 3


def losses(items: Sequence[Item], sizes: Sequence[tuple[int, int]], *, snapped: bool) -> list[str]:
    """Sentences about pictures of which much is cut away, or which are enlarged, at the sizes (height, width) that they
    train at.

    `snapped`: the sizes are of a few proportions, for a batch holds pictures of one size.
    """
    said = []
    for item, size in zip(items, sizes, strict=True):
        if not item.width or not item.height:
            continue
        width, height = largest(item, size)
        kept, enlarged = width * height / (item.width * item.height), size[0] / height
        if kept < LEAST_KEPT or enlarged > MOST_ENLARGED:
            parts = [f"keeps {kept:.0%} of itself"] if kept < LEAST_KEPT else []
            parts += [f"is enlarged {enlarged:.1f} times"] if enlarged > MOST_ENLARGED else []
            said.append(
                f"{item.path.name} ({item.width} x {item.height}) {' and '.join(parts)} at {size[1]} x {size[0]} "
                "pixels."
            )
    if len(said) > MOST_NAMED:
        said = [*said[:MOST_NAMED], f"{len(said) - MOST_NAMED} more pictures likewise."]
    alone = " --batch_size 1 trains each at its own proportions." if snapped else ""
    return [*said, f"Leave such pictures out, or cut them.{alone}"] if said else []
