"""A stored picture as a person sees it: upright, on white, in eight bits a colour. The engine, the trainer and the page
all look through here."""

from __future__ import annotations

from PIL import Image

# Not Pillow's `ImageOps.exif_transpose`: that writes the EXIF data anew, and so fails on a picture whose other tags are
# damaged; and the size that `shown_size` reads from the header has to be that of the picture that is made.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90,
}  # fmt: skip


def _orientation(picture: Image.Image) -> int:
    """EXIF's number for how the picture was held; 1, as it lies, where that is missing or broken."""
    try:
        found = picture.getexif().get(0x0112, 1)
    except Exception:  # whatever a parser says of them: broken data are no reason not to see the picture
        found = 1
    return found if isinstance(found, int) else 1


def shown_size(picture: Image.Image) -> tuple[int, int]:
    """(width, height) of the picture upright; only the header is read."""
    width, height = picture.size
    return (height, width) if _orientation(picture) in (5, 6, 7, 8) else (width, height)


def upright(picture: Image.Image) -> Image.Image:
    """The picture as it was held. Raises what Pillow raises for a file that is cut off."""
    picture.load()
    turn = _TURNS.get(_orientation(picture))
    return picture if turn is None else picture.transpose(turn)


def in_rgb(picture: Image.Image) -> Image.Image:
    """The picture upright, in RGB, what is see-through as white. Raises as `upright` and `on_white`."""
    return on_white(upright(picture))


def on_white(picture: Image.Image) -> Image.Image:
    """In RGB; what is see-through shows white, as on the page, and not the colour that happens to lie beneath.

    Raises ValueError for numbers of which nobody can say which one is white.
    """
    if picture.mode == "F":
        raise ValueError("it holds floating-point numbers; save it with 8 or 16 bits")
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        # Pillow converts these by cutting off at 255, which turns sixteen bits of grey into white.
        return picture.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L").convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
