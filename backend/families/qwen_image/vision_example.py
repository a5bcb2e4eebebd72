"""Qwen2.5-VL's vision tower as it is traced: one picture through it, on tensors without numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def trace_encoder(part: str, module: torch.nn.Module, point: dict, dtype: torch.dtype) -> torch.Tensor | None:
    """A picture of as many patches as become `t` tokens, as nearly square as that goes, through the vision tower. The language half is
    called as usual."""
    if part != "vision":
        return None
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from transformers import vision_utils

    merge, tokens = module.spatial_merge_size, point["t"]
    rows = next(rows for rows in range(math.isqrt(tokens), 0, -1) if tokens % rows == 0)

    with unset_fake_temporarily():  # the tower looks at numbers to cut the picture into windows
        grid = torch.tensor([[1, rows * merge, tokens // rows * merge]])
        index, windows = vision_utils.get_vision_window_index(grid, merge, module.window_size, module.patch_size)
        whole = [0, tokens * merge**2]
        shape = tuple(vision_utils.get_vision_position_ids(grid, merge).shape)
    said = module.config
    width = said.in_channels * said.temporal_patch_size * said.patch_size**2
    return module(
        torch.empty(whole[1], width, dtype=dtype),
        grid_thw=torch.empty(1, 3, dtype=torch.long),
        position_ids=torch.zeros(shape, dtype=torch.long),
        window_index=torch.zeros(index.shape, dtype=torch.long),
        cu_seqlens=_Bounds(whole),
        cu_window_seqlens=_Bounds(windows.tolist()),
    ).pooler_output


class _Bounds(list):
    """Where sequences begin and end, as the vision tower asks for it: `bounds[1:] - bounds[:-1]` and `tolist()`."""

    def __getitem__(self, index):
        return _Bounds(super().__getitem__(index))

    def __sub__(self, other):
        return _Bounds([end - start for end, start in zip(self, other, strict=True)])

    def tolist(self) -> list[int]:
        return list(self)
