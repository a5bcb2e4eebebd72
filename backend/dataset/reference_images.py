"""How pictures are shown that a sample is edited from: cut and mirrored as the sample itself where they have its
proportions. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from backend.catalog.family import Family
from backend.catalog.models.capabilities import check_count
from backend.dataset.captions import lines_of
from backend.dataset.crops import cut, largest, num_cuts
from backend.dataset.dataset import Item, Picture, measure
from backend.schema.messages import Trouble

ALIKE = 0.01  # proportions that differ by less are the same


@dataclass(frozen=True)
class Shown:
    """A picture, the part of it that is shown (left, top, right, bottom; None: all) at `size` (width, height) in
    pixels, mirrored or not."""

    picture: Picture
    size: tuple[int, int]
    box: tuple[float, float, float, float] | None = None
    flip: bool = False

    @property
    def words(self) -> tuple:
        """What makes it look as it does, for the key of what is made of it."""
        return (self.picture.digest, *self.size, *(self.box or ()), self.flip)


def shown(
    item: Item, size: tuple[int, int], *, flip: bool = False, place: int = 0, zoom: float = 1.0
) -> tuple[Shown, ...]:
    """What `item` is edited from, to go with its cut `place` at `size` (height, width)."""
    return tuple(_shown(one, item, size, flip=flip, place=place, zoom=zoom) for one in item.edits)


def whole(pictures: Iterable[Picture]) -> tuple[Shown, ...]:
    return tuple(Shown(one, (one.width, one.height)) for one in pictures)


def _shown(picture: Picture, item: Item, size: tuple[int, int], *, flip: bool, place: int, zoom: float) -> Shown:
    """A picture like its sample is cut to exactly the sample's proportions, so that one lies over the other; any other
    is shown whole."""
    if not is_alike(picture, item):
        return Shown(picture, (picture.width, picture.height), flip=flip)
    box = cut(item, size, place, zoom=zoom)
    if box is None:
        width, height = largest(item, size)
        left, top = (item.width - width) / 2, (item.height - height) / 2
        box = (left, top, left + width, top + height)
    across, down = picture.width / item.width, picture.height / item.height
    left, top = box[0] * across, box[1] * down
    right, bottom = min(box[2] * across, picture.width), min(box[3] * down, picture.height)
    if place == 0 and max(left, top) < 0.5 and size[1] * picture.height == size[0] * picture.width:
        return Shown(picture, (picture.width, picture.height), flip=flip)
    times = max(1, round((bottom - top) / size[0]))
    return Shown(picture, (size[1] * times, size[0] * times), (left, top, right, bottom), flip)


def is_alike(picture: Picture, item: Item) -> bool:
    """Whether a picture has the proportions of the sample that is made of it."""
    return abs(math.log(picture.width * item.height / (picture.height * item.width))) < ALIKE


def check_counts(counts: Iterable[tuple[str, int]], family: Family, *, variant: str, title: str) -> None:
    """Raises Trouble for the first of (what, from how many pictures) that is edited from more than the model works
    from."""
    rule = family.EDITS.get(variant)
    if rule is None:
        return
    for what, count in counts:
        check_count(f"{what} is edited from {count}", count, rule, title=title)


def check_cuts(items: Iterable[Item], sizes: Iterable[tuple[int, int]], *, crops: int, zoom: float) -> None:
    """Raises Trouble where samples would be cut in several ways, and what they are edited from could not be cut with
    them."""
    for item, size in zip(items, sizes, strict=True):
        other = next((one for one in item.edits if not is_alike(one, item)), None)
        if other is not None and num_cuts(item, size, crops=crops, zoom=zoom) > 1:
            raise Trouble(
                "bad_value",
                f"{item.path.name} cannot be shown in several cuts (--crops): {other.path.name}, which it is "
                "edited from, has other "
                "proportions and could not be cut with it.",
                hint="Leave --crops out.",
            )


def reference_sizes(some: Iterable[Shown], family: Family, *, pixels: int) -> tuple[tuple[int, int], ...]:
    """(height, width) at which the network is given each. Raises Trouble by the name of one that has no such size."""
    found = []
    for one in some:
        try:
            ((width, height),) = family.reference_sizes([one.size], pixels)
        except Trouble as trouble:
            raise Trouble(trouble.kind, f"{one.picture.path.name}: {trouble.message}", hint=trouble.hint) from None
        found.append((height, width))
    return tuple(found)


def sample_pictures(section, prompts: list[str]) -> list[tuple[Picture, ...]] | None:
    """What each sample prompt is drawn from, by `sample_edit_images`; None where it is empty. Raises Trouble."""
    lines = lines_of(section.sample_edit_images)
    if not lines or not prompts:
        return None
    if len(lines) == 1:
        lines = lines * len(prompts)
    if len(lines) != len(prompts):
        raise Trouble(
            "bad_value",
            (
                f"There are {len(prompts)} sample prompts but {len(lines)} lines of pictures for them "
                "(--sample_edit_images)."
            ),
            hint="Give one line for each prompt, or one for all; several pictures in a line with commas between.",
        )
    named = [[Path(part.strip()) for part in line.split(",") if part.strip()] for line in lines]
    if not all(named):
        raise Trouble(
            "bad_value",
            f"A line of --sample_edit_images names no picture: {lines[named.index([])]!r}.",
            hint="Remove it, or name one.",
        )
    return [measure(paths) for paths in named]
