"""Pictures that Qwen-Image-Edit works from: their sizes, what Qwen2.5-VL sees of them, and their latents. Shapes as in `qwen_image`.

As diffusers' QwenImageEditPipeline (one picture) and QwenImageEditPlusPipeline (one or several; Edit-2509 and later) do it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from backend.catalog.models.model_folder import processor_settings
from backend.families.qwen_image.reference_geometry import (
    REFERENCE_PIXELS,
    SEEN_PIXELS,
    reference_pixels,
    size_within,
)
from backend.images.orientation import on_white
from backend.schema.messages import Trouble


@dataclass(frozen=True)
class Processor:
    """How an edit variant takes pictures: what cuts them into patches, whether several may be given (`plus`), and the areas in pixels that
    they are brought to for the VAE and for the text encoder."""

    images: object  # transformers' Qwen2VLImageProcessorPil
    plus: bool
    reference_pixels: int = REFERENCE_PIXELS
    seen_pixels: int = SEEN_PIXELS


def load_processor(folder: Path, variant: str, *, pixels: int | None = None) -> Processor:
    """The processor in `folder` for `variant` ("edit", "edit-2509", "edit-2511"). It needs no torchvision. Raises Trouble where there is none.

    A model that was trained with pictures of another area says so in its model_index.json: `_reference_pixels`.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if processor_settings(folder) is None:
        sentence = f"{folder} holds no processor of pictures: no preprocessor_config.json in it."
        raise Trouble("missing_file", sentence, hint="Give the folder `processor` of a Qwen-Image-Edit.")
    own, seen = reference_pixels(variant, folder.parent)
    if pixels is not None:
        seen = min(seen, pixels) if variant != "edit" else pixels
    images = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
    return Processor(images, variant != "edit", pixels or own, seen)


def encode_references(parts: dict, pictures, *, settings=None, tiled: bool = False) -> tuple:
    """Normalised latents (C, h_i, w_i) of each of `pictures` (PIL), which are resized to an area of about a million pixels whatever size is
    drawn. Needs `vae` and `processor`. What `collate` takes as an encoding's "references". Differentiable. `tiled`: in pieces,
    for less memory."""
    import torch

    from backend.families.qwen_image.vae import encode_image

    like = next(parts["vae"].parameters())
    found = []
    for picture in pictures:
        values = torch.from_numpy(_values(_resized(picture, parts["processor"].reference_pixels))).to(like.device)
        found.append(encode_image(parts, values.permute(2, 0, 1)[None].to(like.dtype), tiled=tiled)[0])
    return tuple(found)


def patches_of(processor: Processor, pictures) -> tuple:
    """`pictures` as the vision tower takes them: patches (P, 3 * 2 * 14 * 14) float32 of them all, and their grids (N, 3) of frames, rows
    and columns of patches."""
    seen = [_resized(picture, processor.seen_pixels) for picture in pictures]
    out = processor.images(images=seen, return_tensors="pt")
    return out["pixel_values"], out["image_grid_thw"]


def num_tokens(grid, merge: int) -> int:
    """Text tokens that a picture of `grid` (frames, rows, columns of patches) takes the place of."""
    return math.prod(int(number) for number in grid) // merge**2


def positions_of(is_picture: list[bool], grids, merge: int):
    """Rotary positions (3, L) of a row: a word's three are the same; a picture's tokens count rows and columns from where it begins,
    and what follows goes on after its longer side."""
    import torch

    columns, grids, start, place = [], iter(grids), 0, 0
    while place < len(is_picture):
        if not is_picture[place]:
            columns.append(torch.full((3, 1), start))
            start, place = start + 1, place + 1
            continue
        frames, rows, across = (int(number) for number in next(grids))
        shape = (frames, rows // merge, across // merge)
        columns.append(torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij")).flatten(1) + start)
        start, place = start + max(shape[1:]), place + math.prod(shape)
    return torch.cat(columns, dim=1)


def _resized(picture, pixels: int):
    from PIL import Image

    return on_white(picture).resize(size_within(picture.size, pixels), Image.Resampling.LANCZOS)


def _values(picture):
    """(H, W, 3) float32 in [-1, 1]."""
    import numpy

    return numpy.asarray(picture, dtype=numpy.float32) / 255.0 * 2.0 - 1.0
