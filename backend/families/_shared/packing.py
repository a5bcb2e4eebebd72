"""Latents as the tokens of a transformer: 2 x 2 cells are one.

Shapes: B pictures, C latent channels, h x w latent cells, S = h/2 * w/2 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.catalog.family import DrawSettings

if TYPE_CHECKING:
    import torch

CHANNELS = 16


def pack(x: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, h, w) as tokens of 2 x 2 cells (B, S, 4C)."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack`: tokens (B, height * width, 4C) as latents (B, C, 2 height, 2 width)."""
    batch, _, channels = tokens.shape
    x = tokens.reshape(batch, height, width, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(batch, channels // 4, height * 2, width * 2)


def latent_shape(settings: DrawSettings) -> tuple[int, int, int]:
    """(C, h, w) of one picture's latents, of 16 channels and 8 pixels a cell: 2 x 2 cells are one token, so both sides
    are even."""
    return CHANNELS, 2 * (settings.height // 16), 2 * (settings.width // 16)
