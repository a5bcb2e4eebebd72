"""What a request's ways to be faster take beside a plain step: cached steps and FP8 products. Bytes; no torch."""

from __future__ import annotations

from functools import lru_cache

from backend.planner.costs.model_sizes import PartSizes
from backend.schema.memory_plan import DTYPE_BYTES

ALIGNED = 16  # rows and columns of a weight that is multiplied with as codes


def step_cache_bytes(part: PartSizes, point: dict, computing: str) -> int:
    """Kept of earlier steps: the first block's change of the picture, and twice what the other blocks added to both
    streams; and of the step under way: that change, and both streams after the first block."""
    picture, both = point["n"], point["n"] + point["t"]
    return (2 * picture + 3 * both) * point["b"] * width(part) * DTYPE_BYTES[computing]


def width(part: PartSizes) -> int:
    """Numbers of a token in the blocks' streams: what most of their layers read."""
    seen: dict[int, int] = {}
    for _, columns, count in part.linears.values():
        seen[columns] = seen.get(columns, 0) + count
    return max(seen, key=lambda columns: seen[columns], default=0)


def products_bytes(part: PartSizes, point: dict) -> int:
    """The codes of the widest layer's input.

    Its scaled copy stands where the activation before it had its own input.
    """
    return point["b"] * point["n"] * max((columns for _, columns, _ in part.linears.values()), default=0)


@lru_cache(maxsize=256)
def largest_cast(part: PartSizes, *, whole: bool, codes: bool) -> int:
    """Numbers that are cast at a time of a block stored in FP8: a layer's, with `whole` (compiled) a block's; with
    `codes` those alone that cannot be multiplied with as they are."""
    if not codes:
        return max((block.matrix for block in part.blocks), default=0) if whole else part.largest_matrix
    odd = [
        (rows * columns, count) for rows, columns, count in part.linears.values() if rows % ALIGNED or columns % ALIGNED
    ]
    if whole:
        return sum(numel for numel, _ in odd)
    return max((numel for numel, _ in odd), default=0)
