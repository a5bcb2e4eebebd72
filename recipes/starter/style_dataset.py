"""The second shipped set: things as neon tubes at night."""

from __future__ import annotations

import math

from PIL import Image, ImageChops, ImageFilter

from recipes.starter.drawing import SIDE, Colour, Pen, Point, arc

PINK, CYAN, LIME, GOLD, VIOLET, WHITE = (
    (255, 60, 170),
    (60, 220, 255),
    (150, 255, 80),
    (255, 200, 60),
    (170, 110, 255),
    (240, 240, 255),
)
NIGHT = (18, 12, 38)
TUBE = 0.022
Tubes = list[tuple[Colour, list[Point]]]


def _fish() -> Tubes:
    body = [*arc((0.45, 0.5), 0.25, 0.17, -155, 155), (0.2, 0.43)]
    tail = [(0.68, 0.5), (0.86, 0.34), (0.86, 0.66), (0.68, 0.5)]
    return [
        (CYAN, body[:-1]),
        (PINK, tail),
        (GOLD, arc((0.34, 0.45), 0.02, 0.02, 0, 360)),
        (CYAN, arc((0.22, 0.5), 0.05, 0.07, -90, 90)),
    ]


def _house() -> Tubes:
    return [
        (CYAN, [(0.26, 0.48), (0.26, 0.82), (0.74, 0.82), (0.74, 0.48)]),
        (PINK, [(0.16, 0.52), (0.5, 0.18), (0.84, 0.52)]),
        (GOLD, [(0.43, 0.82), (0.43, 0.6), (0.57, 0.6), (0.57, 0.82)]),
    ]


def _tree() -> Tubes:
    crown = [arc((0.5, 0.36), 0.24, 0.22, 0, 360)]
    return [
        (LIME, crown[0]),
        (GOLD, [(0.46, 0.58), (0.46, 0.86)]),
        (GOLD, [(0.54, 0.58), (0.54, 0.86)]),
        (PINK, arc((0.42, 0.33), 0.02, 0.02, 0, 360)),
        (PINK, arc((0.58, 0.4), 0.02, 0.02, 0, 360)),
    ]


def _heart() -> Tubes:
    turns = [math.radians(6 * step) for step in range(61)]
    outline = [
        (
            0.5 + 0.02 * 16 * math.sin(t) ** 3,
            0.48 - 0.02 * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)),
        )
        for t in turns
    ]
    return [(PINK, outline)]


def _star() -> Tubes:
    points = [
        (0.5 + r * math.sin(math.radians(36 * k)), 0.52 - r * math.cos(math.radians(36 * k)))
        for k, r in enumerate([0.36, 0.15] * 5)
    ]
    return [(GOLD, [*points, points[0]])]


def _cup() -> Tubes:
    return [
        (CYAN, [(0.26, 0.4), (0.3, 0.8), (0.6, 0.8), (0.64, 0.4), (0.26, 0.4)]),
        (PINK, arc((0.65, 0.56), 0.11, 0.1, -90, 110)),
        (WHITE, [(0.38, 0.32), (0.42, 0.26), (0.38, 0.2)]),
        (WHITE, [(0.52, 0.32), (0.56, 0.26), (0.52, 0.2)]),
    ]


def _boat() -> Tubes:
    return [
        (CYAN, [(0.16, 0.66), (0.28, 0.82), (0.72, 0.82), (0.84, 0.66), (0.16, 0.66)]),
        (GOLD, [(0.5, 0.64), (0.5, 0.16)]),
        (PINK, [(0.55, 0.2), (0.8, 0.56), (0.55, 0.56), (0.55, 0.2)]),
    ]


def _moon() -> Tubes:
    outer, inner = arc((0.48, 0.5), 0.32, 0.32, 50, 310), arc((0.62, 0.5), 0.25, 0.27, 295, 65)
    return [(GOLD, [*outer, *inner, outer[0]])]


def _neon_flower() -> Tubes:
    petals = [
        (
            PINK,
            arc(
                (0.5 + 0.14 * math.cos(math.radians(72 * k - 90)), 0.36 + 0.14 * math.sin(math.radians(72 * k - 90))),
                0.09,
                0.09,
                0,
                360,
            ),
        )
        for k in range(5)
    ]
    return [
        *petals,
        (GOLD, arc((0.5, 0.36), 0.06, 0.06, 0, 360)),
        (LIME, [(0.5, 0.6), (0.5, 0.9)]),
        (LIME, arc((0.6, 0.76), 0.1, 0.06, 180, 360)),
    ]


def _mushroom() -> Tubes:
    cap = [*arc((0.5, 0.5), 0.32, 0.3, 180, 360), (0.18, 0.5)]
    return [
        (PINK, cap),
        (WHITE, [(0.4, 0.54), (0.38, 0.84), (0.62, 0.84), (0.6, 0.54)]),
        (WHITE, arc((0.4, 0.38), 0.04, 0.04, 0, 360)),
        (WHITE, arc((0.6, 0.36), 0.04, 0.04, 0, 360)),
    ]


def _key() -> Tubes:
    return [
        (GOLD, arc((0.3, 0.5), 0.15, 0.15, 0, 360)),
        (GOLD, [(0.46, 0.5), (0.86, 0.5)]),
        (GOLD, [(0.72, 0.5), (0.72, 0.64)]),
        (GOLD, [(0.84, 0.5), (0.84, 0.62)]),
    ]


def _umbrella() -> Tubes:
    roof = [*arc((0.5, 0.5), 0.36, 0.32, 180, 360), (0.14, 0.5)]
    return [
        (VIOLET, roof),
        (VIOLET, [(0.5, 0.2), (0.5, 0.5)]),
        (GOLD, [(0.5, 0.54), (0.5, 0.8), *arc((0.56, 0.8), 0.06, 0.06, 180, 20)]),
    ]


def _rocket() -> Tubes:
    return [
        (WHITE, [*arc((0.5, 0.46), 0.13, 0.32, 180, 360), (0.63, 0.68), (0.37, 0.68), (0.37, 0.46)]),
        (CYAN, arc((0.5, 0.4), 0.05, 0.05, 0, 360)),
        (PINK, [(0.37, 0.54), (0.24, 0.72), (0.37, 0.68)]),
        (PINK, [(0.63, 0.54), (0.76, 0.72), (0.63, 0.68)]),
        (GOLD, [(0.44, 0.73), (0.5, 0.9), (0.56, 0.73)]),
    ]


def _ice_cream() -> Tubes:
    return [
        (PINK, arc((0.5, 0.36), 0.19, 0.19, 150, 390)),
        (GOLD, [(0.31, 0.48), (0.69, 0.48), (0.5, 0.9), (0.31, 0.48)]),
    ]


def _butterfly() -> Tubes:
    wings = [
        (VIOLET if y < 0.5 else CYAN, arc((0.5 + side * 0.18, y), 0.15, 0.15 if y < 0.5 else 0.11, 0, 360))
        for side in (-1, 1)
        for y in (0.38, 0.64)
    ]
    return [
        *wings,
        (GOLD, [(0.5, 0.3), (0.5, 0.76)]),
        (GOLD, [(0.5, 0.3), (0.44, 0.18)]),
        (GOLD, [(0.5, 0.3), (0.56, 0.18)]),
    ]


def _sun() -> Tubes:
    rays = [
        (
            GOLD,
            [
                (0.5 + r * math.cos(math.radians(45 * k)), 0.5 + r * math.sin(math.radians(45 * k)))
                for r in (0.29, 0.39)
            ],
        )
        for k in range(8)
    ]
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
        bloom = light.filter(ImageFilter.GaussianBlur(radius)).point(
            lambda value, s=strength: min(255, int(value * s * 1.6))
        )
        picture = ImageChops.screen(picture, bloom)
    picture.paste(small, mask=small.getchannel("A"))
    white = core.picture.resize((side, side), Image.Resampling.LANCZOS)
    picture.paste(
        Image.new("RGB", (side, side), (255, 245, 250)),
        mask=white.getchannel("A").point(lambda value: int(value * 0.75)),
    )
    return picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def style(number: int) -> tuple[Image.Image, str]:
    caption, tubes = STYLE[number]
    return neon(tubes()), f"{caption}, neon style"
