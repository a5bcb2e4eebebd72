"""Pictures of a dataset opened as they are shown: upright, cut, mirrored."""

from __future__ import annotations

from PIL import Image

from backend.engine import shortage
from backend.engine.pictures import open_picture
from backend.schema.messages import Trouble
from backend.training.edits import Shown


def open_shown(one: Shown) -> Image.Image:
    """The picture as it is shown, upright, in RGB. Raises Trouble by its name."""
    try:
        picture = open_picture(one.picture.path)
        if one.box is not None:
            picture = picture.resize(one.size, Image.Resampling.LANCZOS, box=one.box)
    except (Trouble, OSError, ValueError) as error:
        if shortage.is_one(error):
            raise
        why = error.message if isinstance(error, Trouble) else error
        raise Trouble(
            "broken_picture",
            f"The picture {one.picture.path} cannot be read ({why}).",
            hint="Replace or remove it, or set --skip_broken_pictures.",
        ) from None
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if one.flip else picture
