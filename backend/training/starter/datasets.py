"""The two picture sets that ship for a first training: `python -m backend.training.starter.datasets`.

`assets/datasets/character`: Zubi, a small creature that no model knows. `assets/datasets/style`: things as neon tubes at night.
Everything is drawn here, four times too large, and made smaller: no pictures of others, no licence to keep.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageChops, ImageDraw, ImageFilter

from backend.schema.places import ASSETS

SIDE, OVER = 256, 4
Point = tuple[float, float]
Colour = tuple[int, int, int]

BODY, BELLY, DARK, CHEEK, LEAF, FEET = (
    (46, 196, 182), (235, 252, 235), (24, 44, 66), (255, 150, 150), (112, 193, 60), (255, 159, 28),
)  # fmt: skip
GROUNDS = {
    "white": (255, 255, 255), "blue": (96, 150, 235), "yellow": (250, 214, 96), "pink": (248, 178, 204),
    "green": (130, 190, 110), "purple": (150, 110, 200), "orange": (245, 160, 80), "gray": (170, 174, 180),
}  # fmt: skip


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


def drop(centre: Point, size: float, lean: float) -> list[Point]:
    """Zubi's outline: a drop with its tip above, `lean` to the side."""
    x, y = centre
    outline = []
    for step in range(121):
        turn = math.radians(3 * step)
        narrow = 1 - 0.5 * max(0.0, -math.sin(turn)) ** 1.6
        up = -math.sin(turn)
        outline.append((x + size * (math.cos(turn) * narrow + lean * max(0.0, up) ** 2), y + size * 1.12 * math.sin(turn)))
    return outline


def zubi(
    pen: Pen, *, centre: Point = (0.5, 0.56), size: float = 0.27, lean: float = 0.0, look: Point = (0.0, 0.0),
    mouth: str = "smile", eyes: str = "open", arms: tuple[float, float] = (35.0, 145.0),
) -> None:  # fmt: skip
    """The creature: a turquoise drop with a leaf on its head, a pale belly and orange feet. `arms`: degrees, 0 to the right."""
    x, y = centre
    for side in (-1, 1):
        pen.oval((x + side * 0.42 * size, y + 1.12 * size), 0.3 * size, 0.15 * size, FEET)
    for turn in arms:
        reach = (math.cos(math.radians(turn)), math.sin(math.radians(turn)))
        start = (x + 0.8 * size * (1 if reach[0] > 0 else -1), y + 0.15 * size)
        pen.stroke([start, (start[0] + 0.5 * size * reach[0], start[1] + 0.5 * size * reach[1])], 0.24 * size, BODY)
    pen.shape(drop(centre, size, lean), BODY)
    pen.oval((x, y + 0.48 * size), 0.58 * size, 0.5 * size, BELLY)
    tip = (x + lean * size, y - 1.08 * size)
    pen.stroke([tip, (tip[0], tip[1] - 0.22 * size)], 0.09 * size, LEAF)
    pen.shape(_leaf((tip[0], tip[1] - 0.2 * size), 0.52 * size), LEAF)
    _face(pen, (x + 0.25 * lean * size, y - 0.22 * size), size, look, mouth, eyes)


def _leaf(root: Point, length: float) -> list[Point]:
    upper = [(root[0] + length * t, root[1] - 0.42 * length * math.sin(math.pi * t) - 0.25 * length * t) for t in _steps()]
    lower = [(root[0] + length * t, root[1] + 0.2 * length * math.sin(math.pi * t) - 0.25 * length * t) for t in _steps()]
    return upper + lower[::-1]


def _steps(count: int = 24) -> list[float]:
    return [step / count for step in range(count + 1)]


def _face(pen: Pen, centre: Point, size: float, look: Point, mouth: str, eyes: str) -> None:
    x, y = centre
    for side in (-1, 1):
        eye = (x + side * 0.33 * size, y)
        if eyes == "shut":
            pen.stroke(arc(eye, 0.16 * size, 0.12 * size, 20, 160), 0.06 * size, DARK)
        else:
            pen.oval(eye, 0.23 * size, 0.26 * size, (255, 255, 255))
            pupil = (eye[0] + 0.08 * size * look[0], eye[1] + 0.08 * size * look[1])
            pen.oval(pupil, 0.14 * size, 0.16 * size, DARK)
            pen.oval((pupil[0] - 0.05 * size, pupil[1] - 0.06 * size), 0.045 * size, 0.045 * size, (255, 255, 255))
        pen.oval((x + side * 0.52 * size, y + 0.28 * size), 0.12 * size, 0.08 * size, CHEEK)
    lips = (x, y + 0.3 * size)
    if mouth == "open":
        pen.oval((lips[0], lips[1] + 0.03 * size), 0.13 * size, 0.14 * size, (150, 40, 60))
    elif mouth == "smile":
        pen.stroke(arc(lips, 0.16 * size, 0.12 * size, 20, 160), 0.055 * size, DARK)
    else:
        pen.stroke([(lips[0] - 0.1 * size, lips[1] + 0.08 * size), (lips[0] + 0.1 * size, lips[1] + 0.08 * size)], 0.05 * size, DARK)


def _hat(pen: Pen) -> None:
    pen.shape([(0.38, 0.32), (0.62, 0.32), (0.52, 0.04)], (214, 48, 60))
    pen.stroke([(0.385, 0.315), (0.615, 0.315)], 0.05, (255, 255, 255))
    pen.oval((0.52, 0.05), 0.035, 0.035, (255, 255, 255))


def _scarf(pen: Pen) -> None:
    pen.stroke(arc((0.5, 0.585), 0.25, 0.075, 5, 175), 0.06, (214, 48, 60))
    pen.stroke([(0.64, 0.65), (0.67, 0.8)], 0.06, (214, 48, 60))


def _balloon(pen: Pen) -> None:
    pen.stroke([(0.76, 0.52), (0.83, 0.3)], 0.008, DARK)
    pen.oval((0.83, 0.2), 0.1, 0.12, (250, 84, 84))


def _flower(pen: Pen) -> None:
    pen.stroke([(0.78, 0.66), (0.8, 0.42)], 0.014, (70, 140, 50))
    for turn in range(5):
        angle = math.radians(72 * turn)
        pen.oval((0.8 + 0.05 * math.cos(angle), 0.38 + 0.05 * math.sin(angle)), 0.036, 0.036, (250, 210, 60))
    pen.oval((0.8, 0.38), 0.03, 0.03, (190, 100, 40))


def _grass(pen: Pen) -> None:
    pen.oval((0.5, 1.08), 0.9, 0.28, (110, 180, 80))


CHARACTER = (
    ("zubi", "white", {}, None),
    ("zubi, waving", "white", {"arms": (-60.0, 145.0)}, None),
    ("zubi, sleeping", "white", {"eyes": "shut", "mouth": "flat"}, None),
    ("zubi, surprised", "white", {"mouth": "open", "look": (0.0, -1.0)}, None),
    ("zubi on a blue background", "blue", {}, None),
    ("zubi on a yellow background", "yellow", {"look": (1.0, 0.0), "lean": 0.2}, None),
    ("zubi on a pink background", "pink", {"look": (-1.0, 0.0), "lean": -0.2}, None),
    ("zubi on a green background", "green", {"mouth": "open"}, None),
    ("zubi on a purple background, arms up", "purple", {"arms": (-60.0, -120.0), "mouth": "open"}, None),
    ("zubi with a red hat", "white", {}, _hat),
    ("zubi with a red scarf on a gray background", "gray", {"look": (-0.7, 0.7)}, _scarf),
    ("zubi with a red balloon", "white", {"arms": (-20.0, 145.0), "look": (1.0, -1.0)}, _balloon),
    ("zubi with a yellow flower on an orange background", "orange", {"arms": (10.0, 145.0), "look": (1.0, 0.0)}, _flower),
    ("zubi standing on grass on a blue background", "blue", {"arms": (-50.0, 145.0)}, _grass),
    ("a small zubi", "white", {"size": 0.17, "centre": (0.5, 0.58)}, None),
    ("a large zubi on a pink background", "pink", {"size": 0.36, "centre": (0.5, 0.6), "lean": 0.1}, None),
)  # fmt: skip

PINK, CYAN, LIME, GOLD, VIOLET, WHITE = (
    (255, 60, 170), (60, 220, 255), (150, 255, 80), (255, 200, 60), (170, 110, 255), (240, 240, 255),
)  # fmt: skip
NIGHT = (18, 12, 38)
TUBE = 0.022
Tubes = list[tuple[Colour, list[Point]]]


def _fish() -> Tubes:
    body = [*arc((0.45, 0.5), 0.25, 0.17, -155, 155), (0.2, 0.43)]
    tail = [(0.68, 0.5), (0.86, 0.34), (0.86, 0.66), (0.68, 0.5)]
    return [(CYAN, body[:-1]), (PINK, tail), (GOLD, arc((0.34, 0.45), 0.02, 0.02, 0, 360)), (CYAN, arc((0.22, 0.5), 0.05, 0.07, -90, 90))]


def _house() -> Tubes:
    return [
        (CYAN, [(0.26, 0.48), (0.26, 0.82), (0.74, 0.82), (0.74, 0.48)]), (PINK, [(0.16, 0.52), (0.5, 0.18), (0.84, 0.52)]),
        (GOLD, [(0.43, 0.82), (0.43, 0.6), (0.57, 0.6), (0.57, 0.82)]),
    ]  # fmt: skip


def _tree() -> Tubes:
    crown = [arc((0.5, 0.36), 0.24, 0.22, 0, 360)]
    return [(LIME, crown[0]), (GOLD, [(0.46, 0.58), (0.46, 0.86)]), (GOLD, [(0.54, 0.58), (0.54, 0.86)]), (PINK, arc((0.42, 0.33), 0.02, 0.02, 0, 360)), (PINK, arc((0.58, 0.4), 0.02, 0.02, 0, 360))]


def _heart() -> Tubes:
    turns = [math.radians(6 * step) for step in range(61)]
    outline = [
        (0.5 + 0.02 * 16 * math.sin(t) ** 3,
         0.48 - 0.02 * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)))
        for t in turns
    ]  # fmt: skip
    return [(PINK, outline)]


def _star() -> Tubes:
    points = [(0.5 + r * math.sin(math.radians(36 * k)), 0.52 - r * math.cos(math.radians(36 * k))) for k, r in enumerate([0.36, 0.15] * 5)]
    return [(GOLD, [*points, points[0]])]


def _cup() -> Tubes:
    return [
        (CYAN, [(0.26, 0.4), (0.3, 0.8), (0.6, 0.8), (0.64, 0.4), (0.26, 0.4)]), (PINK, arc((0.65, 0.56), 0.11, 0.1, -90, 110)),
        (WHITE, [(0.38, 0.32), (0.42, 0.26), (0.38, 0.2)]), (WHITE, [(0.52, 0.32), (0.56, 0.26), (0.52, 0.2)]),
    ]  # fmt: skip


def _boat() -> Tubes:
    return [
        (CYAN, [(0.16, 0.66), (0.28, 0.82), (0.72, 0.82), (0.84, 0.66), (0.16, 0.66)]), (GOLD, [(0.5, 0.64), (0.5, 0.16)]),
        (PINK, [(0.55, 0.2), (0.8, 0.56), (0.55, 0.56), (0.55, 0.2)]),
    ]  # fmt: skip


def _moon() -> Tubes:
    outer, inner = arc((0.48, 0.5), 0.32, 0.32, 50, 310), arc((0.62, 0.5), 0.25, 0.27, 295, 65)
    return [(GOLD, [*outer, *inner, outer[0]])]


def _neon_flower() -> Tubes:
    petals = [(PINK, arc((0.5 + 0.14 * math.cos(math.radians(72 * k - 90)), 0.36 + 0.14 * math.sin(math.radians(72 * k - 90))), 0.09, 0.09, 0, 360)) for k in range(5)]
    return [*petals, (GOLD, arc((0.5, 0.36), 0.06, 0.06, 0, 360)), (LIME, [(0.5, 0.6), (0.5, 0.9)]), (LIME, arc((0.6, 0.76), 0.1, 0.06, 180, 360))]


def _mushroom() -> Tubes:
    cap = [*arc((0.5, 0.5), 0.32, 0.3, 180, 360), (0.18, 0.5)]
    return [(PINK, cap), (WHITE, [(0.4, 0.54), (0.38, 0.84), (0.62, 0.84), (0.6, 0.54)]), (WHITE, arc((0.4, 0.38), 0.04, 0.04, 0, 360)), (WHITE, arc((0.6, 0.36), 0.04, 0.04, 0, 360))]


def _key() -> Tubes:
    return [(GOLD, arc((0.3, 0.5), 0.15, 0.15, 0, 360)), (GOLD, [(0.46, 0.5), (0.86, 0.5)]), (GOLD, [(0.72, 0.5), (0.72, 0.64)]), (GOLD, [(0.84, 0.5), (0.84, 0.62)])]


def _umbrella() -> Tubes:
    roof = [*arc((0.5, 0.5), 0.36, 0.32, 180, 360), (0.14, 0.5)]
    return [(VIOLET, roof), (VIOLET, [(0.5, 0.2), (0.5, 0.5)]), (GOLD, [(0.5, 0.54), (0.5, 0.8), *arc((0.56, 0.8), 0.06, 0.06, 180, 20)])]


def _rocket() -> Tubes:
    return [
        (WHITE, [*arc((0.5, 0.46), 0.13, 0.32, 180, 360), (0.63, 0.68), (0.37, 0.68), (0.37, 0.46)]), (CYAN, arc((0.5, 0.4), 0.05, 0.05, 0, 360)),
        (PINK, [(0.37, 0.54), (0.24, 0.72), (0.37, 0.68)]), (PINK, [(0.63, 0.54), (0.76, 0.72), (0.63, 0.68)]),
        (GOLD, [(0.44, 0.73), (0.5, 0.9), (0.56, 0.73)]),
    ]  # fmt: skip


def _ice_cream() -> Tubes:
    return [(PINK, arc((0.5, 0.36), 0.19, 0.19, 150, 390)), (GOLD, [(0.31, 0.48), (0.69, 0.48), (0.5, 0.9), (0.31, 0.48)])]


def _butterfly() -> Tubes:
    wings = [(VIOLET if y < 0.5 else CYAN, arc((0.5 + side * 0.18, y), 0.15, 0.15 if y < 0.5 else 0.11, 0, 360)) for side in (-1, 1) for y in (0.38, 0.64)]
    return [*wings, (GOLD, [(0.5, 0.3), (0.5, 0.76)]), (GOLD, [(0.5, 0.3), (0.44, 0.18)]), (GOLD, [(0.5, 0.3), (0.56, 0.18)])]


def _sun() -> Tubes:
    rays = [(GOLD, [(0.5 + r * math.cos(math.radians(45 * k)), 0.5 + r * math.sin(math.radians(45 * k))) for r in (0.29, 0.39)]) for k in range(8)]
    return [(GOLD, arc((0.5, 0.5), 0.2, 0.2, 0, 360)), *rays]


STYLE = (
    ("a fish", _fish), ("a house", _house), ("a tree", _tree), ("a heart", _heart), ("a star", _star), ("a cup", _cup),
    ("a boat", _boat), ("a moon", _moon), ("a flower", _neon_flower), ("a mushroom", _mushroom), ("a key", _key),
    ("an umbrella", _umbrella), ("a rocket", _rocket), ("an ice cream", _ice_cream), ("a butterfly", _butterfly), ("a sun", _sun),
)  # fmt: skip


def neon(tubes: Tubes) -> Image.Image:
    """Tubes that shine into the night: a wide bloom, a near one, the tube, and its white core."""
    pen = Pen(None)
    for colour, points in tubes:
        pen.stroke(points, TUBE, colour)
    core = Pen(None)
    for _, points in tubes:
        core.stroke(points, TUBE * 0.4, (255, 255, 255))
    side = SIDE * 2
    light = Image.new("RGB", (side, side), (0, 0, 0))
    small = pen.picture.resize((side, side), Image.Resampling.LANCZOS)
    light.paste(small, mask=small.getchannel("A"))
    picture = Image.new("RGB", (side, side), NIGHT)
    for radius, strength in ((26, 0.9), (8, 0.7)):
        bloom = light.filter(ImageFilter.GaussianBlur(radius)).point(lambda value, s=strength: min(255, int(value * s * 1.6)))
        picture = ImageChops.screen(picture, bloom)
    picture.paste(small, mask=small.getchannel("A"))
    white = core.picture.resize((side, side), Image.Resampling.LANCZOS)
    picture.paste(Image.new("RGB", (side, side), (255, 245, 250)), mask=white.getchannel("A").point(lambda value: int(value * 0.75)))
    return picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def character(number: int) -> tuple[Image.Image, str]:
    caption, ground, pose, more = CHARACTER[number]
    pen = Pen(GROUNDS[ground])
    if more is _grass:
        more(pen)
    zubi(pen, **pose)
    if more is not None and more is not _grass:
        more(pen)
    return pen.done(), caption


def style(number: int) -> tuple[Image.Image, str]:
    caption, tubes = STYLE[number]
    return neon(tubes()), f"{caption}, neon style"


HINTS = {
    "character": {"name": "zubi", "trigger_word": "zubi", "sample_prompts": "zubi on a red background\nzubi, waving\na red apple"},
    "style": {"name": "neon", "trigger_word": "neon style", "sample_prompts": "a cat, neon style\na guitar, neon style\na red apple"},
}  # fmt: skip


def write(folder: Path, pictures: Iterable[tuple[Image.Image, str]]) -> None:
    """Pictures `01.png` … with their captions `01.txt` …, and what the training form begins with in `loft.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (picture, caption) in enumerate(pictures, start=1):
        picture.save(folder / f"{number:02d}.png", optimize=True)
        (folder / f"{number:02d}.txt").write_text(caption + "\n", encoding="utf-8")
    (folder / "loft.json").write_text(json.dumps(HINTS[folder.name], indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ASSETS / "datasets", help="where the two sets go")
    folder = parser.parse_args().folder
    write(folder / "character", map(character, range(len(CHARACTER))))
    write(folder / "style", map(style, range(len(STYLE))))


if __name__ == "__main__":
    main()
