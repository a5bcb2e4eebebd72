"""What the pictures of the shipped sets are drawn with: large, in units of the picture's side, then made smaller."""

from __future__ import annotations

import math
from collections.abc import Iterable

from PIL import Image, ImageDraw

SIDE, OVER = 256, 4
Point = tuple[float, float]
Colour = tuple[int, int, int]


class Pen:
    """Draws in units of the picture's side, (0, 0) top left, so that nothing depends on the number of pixels."""

    def __init__(self, ground: Colour | None):
        self.size = SIDE * OVER
        self.picture = Image.new("RGBA", (self.size, self.size), (*ground, 255) if ground else (0, 0, 0, 0))
        self.draw = ImageDraw.Draw(self.picture)

    def _at(self, points: Iterable[Point]) -> list[Point]:
        return [(x * self.size, y * self.size) for x, y in points]

    def oval(self, centre: Point, wide: float, tall: float, fill: Colour) -> None:
        (x, y) = centre
        self.draw.ellipse(self._at([(x - wide, y - tall), (x + wide, y + tall)]), fill=fill)

    def shape(self, points: Iterable[Point], fill: Colour) -> None:
        self.draw.polygon(self._at(points), fill=fill)

    def stroke(self, points: Iterable[Point], width: float, fill: Colour) -> None:
        at, wide = self._at(points), round(width * self.size)
        self.draw.line(at, fill=fill, width=wide, joint="curve")
        for x, y in (at[0], at[-1]):
            self.draw.ellipse((x - wide / 2, y - wide / 2, x + wide / 2, y + wide / 2), fill=fill)

    def done(self) -> Image.Image:
        return self.picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def arc(centre: Point, wide: float, tall: float, start: float, end: float) -> list[Point]:
    """Points on an oval from `start` to `end` degrees, 0 to the right, clockwise."""
    turns = [math.radians(start + (end - start) * step / 60) for step in range(61)]
    return [(centre[0] + wide * math.cos(turn), centre[1] + tall * math.sin(turn)) for turn in turns]
