"""Pictures that a model edits, by their sizes alone: what they are brought to, and the tokens that they take. No torch.

As diffusers' QwenImageEditPipeline and QwenImageEditPlusPipeline resize them, and Qwen2.5-VL cuts them into patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from backend.catalog.models.model_folder import read_object
from backend.images.picture_sizes import MOST_SLENDER
from backend.schema.messages import Trouble

REFERENCE_PIXELS = 1024 * 1024  # a picture's area, as the VAE reads it
SEEN_PIXELS = 384 * 384  # and as the text encoder of Edit-2509 and later reads it; Edit's reads the picture of the VAE
# Pixels a side of what becomes one token: of the text encoder, of the transformer.
SEEN_CELL, REFERENCE_CELL = 28, 16


def size_within(picture: tuple[int, int], pixels: int) -> tuple[int, int]:
    """(width, height) of about `pixels` in the proportions of `picture`, both multiples of 32. Raises Trouble for a strip."""
    width, height = picture
    if max(width, height) > MOST_SLENDER * min(width, height):
        raise Trouble(
            "bad_picture", f"A picture of {width} x {height} pixels is too narrow to be edited.", hint="Cut it first."
        )
    ratio = width / height
    wide = math.sqrt(pixels * ratio)
    return max(1, round(wide / 32)) * 32, max(1, round(wide / ratio / 32)) * 32


def edited_size(pictures: Sequence[tuple[int, int]], variant: str, pixels: int = REFERENCE_PIXELS) -> tuple[int, int]:
    """The (width, height) of what is made of pictures of these sizes where nobody asks for another: the last one's proportions, for
    "edit" the only one's, and about `pixels`."""
    return size_within(pictures[0] if variant == "edit" else pictures[-1], pixels)


def reference_pixels(variant: str, folder: Path | None) -> tuple[int, int]:
    """The areas that pictures to edit are brought to for the VAE and for the text encoder of `variant`: what model_index.json in the model's
    `folder` says, or the usual ones."""
    said = read_object(folder / "model_index.json").get("_reference_pixels") if folder is not None else None
    pixels = said if isinstance(said, int) and said >= 32 * 32 else REFERENCE_PIXELS
    return pixels, seen_pixels(variant, pixels)


def seen_pixels(variant: str, pixels: int) -> int:
    """The area that the text encoder of `variant` is shown a picture in, for references of `pixels`."""
    return pixels if variant == "edit" else min(SEEN_PIXELS, pixels)


def reference_sizes(pictures: Sequence[tuple[int, int]], pixels: int) -> tuple[tuple[int, int], ...]:
    """(width, height) of what the VAE reads of pictures of these sizes."""
    return tuple(size_within(picture, pixels) for picture in pictures)


def reference_tokens(pictures: Sequence[tuple[int, int]], pixels: int) -> int:
    """Tokens that pictures of these sizes add to the transformer's sequence."""
    sizes = reference_sizes(pictures, pixels)
    return sum((width // REFERENCE_CELL) * (height // REFERENCE_CELL) for width, height in sizes)


def seen_tokens(pictures: Sequence[tuple[int, int]], pixels: int) -> int:
    """Text tokens that pictures of these sizes, brought to an area of `pixels`, take the places of."""
    return sum(
        round(width / SEEN_CELL) * round(height / SEEN_CELL) for width, height in reference_sizes(pictures, pixels)
    )
