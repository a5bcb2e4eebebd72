"""Pictures of a dataset opened as they are shown: upright, cut, mirrored."""

from __future__ import annotations

from PIL import Image

from backend.dataset.reference_images import Shown
from backend.engine.devices import out_of_memory
from backend.engine.pipeline.image_tensors import open_picture
from backend.schema.messages import Trouble


def open_reference(one: Shown) -> Image.Image:
    """The picture as it is shown, upright, in RGB. Raises Trouble by its name."""
    try:
        picture = open_picture(one.picture.path)
        if one.box is not None:
            picture = picture.resize(one.size, Image.Resampling.LANCZOS, box=one.box)
    except (Trouble, OSError, ValueError) as error:
        if out_of_memory.is_oom(error):
            raise
        why = error.message if isinstance(error, Trouble) else error
        raise Trouble(
            "broken_picture",
            f"The picture {one.picture.path} cannot be read ({why}).",
            hint="Replace or remove it, or set --skip_broken_pictures.",
        ) from None
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if one.flip else picture
