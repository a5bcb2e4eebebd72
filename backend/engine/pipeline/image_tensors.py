"""Between tensors and pictures: input pictures and results."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from PIL import Image, ImageOps

from backend.engine.devices import out_of_memory
from backend.images.orientation import in_rgb, on_white
from backend.schema.messages import Trouble

MOST_PIXELS = 2**27  # 134 million: an honest photograph has fewer; a bomb has more


def open_picture(path: str | Path) -> Image.Image:
    """The picture in a file, turned upright, in RGB. Raises Trouble where it is none."""
    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise Trouble(
                    "bad_picture", f"{Path(path).name} has {picture.width} x {picture.height} pixels, too many."
                )
            return in_rgb(picture)
    except Trouble:
        raise
    except FileNotFoundError:
        raise Trouble("missing_file", f"There is no picture {path}.", hint="Choose it again.") from None
    except Exception as error:  # decoders raise what they like
        if out_of_memory.is_oom(error):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).rstrip(".")
        raise Trouble("bad_picture", f"{Path(path).name} is not a picture that can be read: {why}.") from None


def to_pixels(picture: Image.Image, width: int, height: int) -> torch.Tensor:
    """(1, 3, height, width) in [-1, 1]: the largest middle part with the wanted proportions, resized with Lanczos."""
    picture = on_white(picture)
    if picture.size != (width, height):
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
    values = torch.from_numpy(numpy.array(picture, dtype=numpy.float32) / 255.0)
    return values.permute(2, 0, 1).unsqueeze(0) * 2.0 - 1.0


def to_picture(pixels: torch.Tensor) -> Image.Image:
    """A picture of pixels (3, H, W) in [-1, 1]. Raises Trouble("not_finite") where the network gave no numbers."""
    values = (pixels.float() * 0.5 + 0.5).clamp(0, 1)
    if not torch.isfinite(values).all():
        raise Trouble(
            "not_finite",
            "The model computed values that are no numbers, so there is no picture.",
            hint="A LoRA that is too strong, or float16 where the model needs bfloat16, does this.",
        )
    values = (values.permute(1, 2, 0).cpu().numpy() * 255).round().astype("uint8")
    return Image.fromarray(values)
