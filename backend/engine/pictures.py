"""Between tensors and pictures: input pictures, results, previews."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from PIL import Image, ImageOps

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
            return ImageOps.exif_transpose(picture).convert("RGB")
    except FileNotFoundError:
        raise Trouble("missing_file", f"There is no picture {path}.", hint="Choose it again.") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Trouble("bad_picture", f"{Path(path).name} is not a picture that can be read: {error}.") from None


def to_pixels(picture: Image.Image, width: int, height: int) -> torch.Tensor:
    """(1, 3, height, width) in [-1, 1]: the largest middle part with the wanted proportions, resized with Lanczos."""
    if picture.size != (width, height):
        picture = ImageOps.fit(picture.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
    values = torch.from_numpy(numpy.array(picture.convert("RGB"), dtype=numpy.float32) / 255.0)
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


class LinearPreview:
    """Colours of latent cells by a linear map, fitted to decoded pictures: a preview for next to nothing."""

    def __init__(self):
        self.weights: torch.Tensor | None = None  # (C + 1, 3)

    def fit(self, latents: torch.Tensor, pixels: torch.Tensor) -> None:
        """Learns from latents (1, C, h, w) and their pixels (1, 3, H, W)."""
        cells = torch.nn.functional.adaptive_avg_pool2d(pixels.float(), latents.shape[-2:])[0].flatten(1).T.cpu()
        self.weights = torch.linalg.lstsq(_with_one(latents), cells, driver="gelsd").solution

    def draw(self, latents: torch.Tensor) -> Image.Image:
        """A picture of one pixel per cell of latents (1, C, h, w), scaled up to be looked at."""
        assert self.weights is not None, "fit comes first"
        height, width = latents.shape[-2:]
        picture = to_picture((_with_one(latents) @ self.weights).T.reshape(3, height, width).clamp(-1, 1))
        scale = max(1, 256 // max(height, width))
        return picture.resize((width * scale, height * scale), Image.Resampling.BICUBIC)


def _with_one(latents: torch.Tensor) -> torch.Tensor:
    cells = latents[0].float().flatten(1).T.cpu()
    return torch.cat([cells, torch.ones(len(cells), 1)], dim=1)
