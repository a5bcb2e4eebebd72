"""Pictures that a model edits: may they be given (`catalog.edits`), and their hash for what is remembered of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from backend.catalog.family import Family
from backend.catalog.models.capabilities import check, edits
from backend.catalog.spec import ModelSpec
from backend.engine.pipeline import image_tensors
from backend.schema.request import GenerationRequest

__all__ = ["check", "check_request", "digest", "edits", "opened"]


def check_request(spec: ModelSpec, family: Family, request: GenerationRequest, *, draws: bool) -> None:
    """Before a model is loaded, raises Trouble for pictures that it cannot take, and, where the request `draws` next,
    for none, and for files that are not there or no pictures."""
    check(spec, family, len(request.edit_images), must=draws)
    if not draws:
        return
    area, _ = family.reference_pixels(spec.variant, spec.path)
    for path in request.edit_images:
        family.reference_sizes([image_tensors.open_picture(path).size], area)  # refuses what cannot be worked from
    if request.input_image:
        image_tensors.open_picture(request.input_image)


def opened(paths: Sequence[str | Path]) -> tuple[Image.Image, ...]:
    """The pictures in these files. Raises Trouble for the first that is none."""
    return tuple(image_tensors.open_picture(path) for path in paths)


def digest(picture: Image.Image) -> str:
    """A hash of a picture's pixels."""
    return hashlib.sha256(repr((picture.mode, picture.size)).encode() + picture.tobytes()).hexdigest()
