"""The first shipped set: Zubi, a small creature that no model knows."""

from __future__ import annotations

import math

from PIL import Image

from recipes.starter.drawing import Pen, Point, arc

BODY, BELLY, DARK, CHEEK, LEAF, FEET = (
    (46, 196, 182),
    (235, 252, 235),
    (24, 44, 66),
    (255, 150, 150),
    (112, 193, 60),
    (255, 159, 28),
)
GROUNDS = {
    "white": (255, 255, 255), "blue": (96, 150, 235), "yellow": (250, 214, 96), "pink": (248, 178, 204),
    "green": (130, 190, 110), "purple": (150, 110, 200), "orange": (245, 160, 80), "gray": (170, 174, 180),
}  # fmt: skip


def drop(centre: Point, size: float, lean: float) -> list[Point]:
    """Zubi's outline: a drop with its tip above, `lean` to the side."""
    x, y = centre
    outline = []
    for step in range(121):
        turn = math.radians(3 * step)
        narrow = 1 - 0.5 * max(0.0, -math.sin(turn)) ** 1.6
        up = -math.sin(turn)
        outline.append(
            (x + size * (math.cos(turn) * narrow + lean * max(0.0, up) ** 2), y + size * 1.12 * math.sin(turn))
        )
    return outline


def zubi(
    pen: Pen,
    *,
    centre: Point = (0.5, 0.56),
    size: float = 0.27,
    lean: float = 0.0,
    look: Point = (0.0, 0.0),
    mouth: str = "smile",
    eyes: str = "open",
    arms: tuple[float, float] = (35.0, 145.0),
) -> None:
    """The creature: a turquoise drop with a leaf on its head, a pale belly and orange feet. `arms`: degrees, 0 to the
    right."""
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
    upper = [
        (root[0] + length * t, root[1] - 0.42 * length * math.sin(math.pi * t) - 0.25 * length * t) for t in _steps()
    ]
    lower = [
        (root[0] + length * t, root[1] + 0.2 * length * math.sin(math.pi * t) - 0.25 * length * t) for t in _steps()
    ]
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
        pen.stroke(
            [(lips[0] - 0.1 * size, lips[1] + 0.08 * size), (lips[0] + 0.1 * size, lips[1] + 0.08 * size)],
            0.05 * size,
            DARK,
        )


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
    (("zubi with a yellow flower on an orange " "" "" "" "" "" "" "" "" "" "" "" "background"), "orange", {"arms": (10.0, 145.0), "look": (1.0, 0.0)}, _flower),
    ("zubi standing on grass on a blue background", "blue", {"arms": (-50.0, 145.0)}, _grass),
    ("a small zubi", "white", {"size": 0.17, "centre": (0.5, 0.58)}, None),
    ("a large zubi on a pink background", "pink", {"size": 0.36, "centre": (0.5, 0.6), "lean": 0.1}, None),
)  # fmt: skip


def character(number: int) -> tuple[Image.Image, str]:
    caption, ground, pose, more = CHARACTER[number]
    pen = Pen(GROUNDS[ground])
    if more is _grass:
        more(pen)
    zubi(pen, **pose)
    if more is not None and more is not _grass:
        more(pen)
    return pen.done(), caption
