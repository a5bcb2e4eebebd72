"""Put sprites and drawn shapes on grounds; everything that decides what a training picture looks like."""

import numpy as np
from PIL import Image, ImageDraw

SIDE = 128
COLOURS = {
    "red": (214, 48, 49),
    "orange": (240, 132, 36),
    "yellow": (247, 205, 60),
    "green": (58, 160, 80),
    "blue": (52, 110, 220),
    "purple": (128, 70, 180),
    "pink": (240, 140, 178),
    "brown": (130, 84, 50),
    "black": (28, 28, 32),
    "gray": (140, 142, 148),
    "white": (255, 255, 255),
    "turquoise": (52, 190, 190),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "hexagon", "ring")


def ground(colour: tuple[int, int, int]) -> np.ndarray:
    """``[128, 128, 3]`` float 0..255 of one colour."""
    return np.broadcast_to(np.asarray(colour, np.float32), (SIDE, SIDE, 3)).copy()


def resized(sprite: np.ndarray, side: int) -> np.ndarray:
    """The RGBA sprite at ``side`` pixels, premultiplied float 0..255 with alpha 0..1."""
    rgba = sprite.astype(np.float32)
    rgba[..., 3] /= 255
    rgba[..., :3] *= rgba[..., 3:]
    if side == rgba.shape[0]:
        return rgba
    planes = [Image.fromarray(rgba[..., i]).resize((side, side), Image.Resampling.LANCZOS) for i in range(4)]
    return np.stack([np.asarray(p) for p in planes], -1)


def place(canvas: np.ndarray, sprite: np.ndarray, *, centre: tuple[float, float], side: int) -> None:
    """Lay the sprite over ``canvas`` in place, ``centre`` as (x, y) in pixels; what hangs over is cut."""
    layer = resized(sprite, side)
    left, top = round(centre[0] - side / 2), round(centre[1] - side / 2)
    x0, y0, x1, y1 = max(left, 0), max(top, 0), min(left + side, SIDE), min(top + side, SIDE)
    part = layer[y0 - top : y1 - top, x0 - left : x1 - left]
    alpha = np.clip(part[..., 3:], 0, 1)
    canvas[y0:y1, x0:x1] = canvas[y0:y1, x0:x1] * (1 - alpha) + part[..., :3]


def pixels(canvas: np.ndarray) -> np.ndarray:
    return np.clip(canvas + 0.5, 0, 255).astype(np.uint8)


def shape_sprite(shape: str, colour: tuple[int, int, int]) -> np.ndarray:
    """A drawn shape as a 128x128 RGBA sprite with smooth edges, filling about five sixths of it."""
    big = 512
    picture = Image.new("RGBA", (big, big), (*colour, 0))
    pen = ImageDraw.Draw(picture)
    fill = (*colour, 255)
    low, high, middle = 44, 468, 256
    if shape == "circle":
        pen.ellipse((low, low, high, high), fill=fill)
    elif shape == "ring":
        pen.ellipse((low, low, high, high), fill=fill)
        pen.ellipse((148, 148, 364, 364), fill=(*colour, 0))
    elif shape == "square":
        pen.rectangle((70, 70, 442, 442), fill=fill)
    elif shape == "heart":
        pen.polygon(heart_outline(), fill=fill)
    else:
        corners, turn, inner = {
            "triangle": (3, -90, None),
            "diamond": (4, -90, None),
            "hexagon": (6, 0, None),
            "star": (5, -90, 0.42),
        }[shape]
        pen.polygon(polygon(corners, turn, inner, middle, 226), fill=fill)
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX))


def polygon(corners: int, turn: float, inner: float | None, middle: float, radius: float) -> list[tuple[float, float]]:
    radii = [radius] if inner is None else [radius, radius * inner]
    count = corners * len(radii)
    angles = np.deg2rad(turn + 360 * np.arange(count) / count)
    return [
        (middle + radii[i % len(radii)] * np.cos(a), middle + radii[i % len(radii)] * np.sin(a))
        for i, a in enumerate(angles)
    ]


def heart_outline() -> list[tuple[float, float]]:
    t = np.linspace(0, 2 * np.pi, 200)
    x = 16 * np.sin(t) ** 3
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return [(256 + 13 * a, 240 - 13 * b) for a, b in zip(x, y, strict=True)]


def recoloured(sprite: np.ndarray, colour: str) -> np.ndarray:
    """The RGBA sprite with its dominant hue turned into ``colour`` (a key of COLOURS with a hue); the rest stays."""
    hsv = np.asarray(Image.fromarray(sprite[..., :3]).convert("HSV")).astype(np.float32)
    hue, saturation, value = hsv[..., 0], hsv[..., 1], hsv[..., 2]
    vivid = (sprite[..., 3] > 128) & (saturation > 70) & (value > 50)
    counts = np.histogram(hue[vivid], bins=32, range=(0, 256))[0]
    wide = counts + np.roll(counts, 1) + np.roll(counts, -1)
    middle = (wide.argmax() + 0.5) * 8
    near = (np.abs((hue - middle + 128) % 256 - 128) < 26) & (saturation > 40)
    target = np.asarray(Image.new("RGB", (1, 1), COLOURS[colour]).convert("HSV"))[0, 0].astype(np.float32)
    chosen = near & vivid
    tone = float(np.median(value[chosen])) if chosen.any() else 255.0
    depth = float(np.median(saturation[chosen])) if chosen.any() else 255.0
    hsv[..., 0] = np.where(near, target[0], hue)
    hsv[..., 1] = np.where(near, np.clip(saturation * target[1] / depth, 0, 255), saturation)
    hsv[..., 2] = np.where(near, np.clip(value * target[2] / tone, 0, 255), value)
    rgb = Image.fromarray(hsv.astype(np.uint8), "HSV").convert("RGB")
    return np.concatenate([np.asarray(rgb), sprite[..., 3:]], -1)
