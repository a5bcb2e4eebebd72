"""What quantized linear layers save over full ones, and what autograd keeps of them. The methods: `catalog.quantization.methods`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from backend.catalog.quantization.methods import METHODS
from backend.system.text_files import ends_with, listed


def saved_bytes(storage: str, layers: Iterable[tuple[str, int, int, int]], wide: int) -> int:
    """Bytes that `storage` saves over numbers of `wide` bytes. `layers`: (name without a block's number, rows, columns, how many)."""
    method, _, left_out = storage.partition("/")
    ends = listed(left_out)
    saved = 0
    for name, rows, columns, count in layers:
        stay = min(count, sum(_kept(name, end, count) for end in ends))
        saved += (count - stay) * (wide * rows * columns - METHODS[method].layer_bytes(rows, columns, wide))
    return saved


def kept_bytes(storage: str, part, computing_bytes: int, *, checkpointed: bool) -> int:
    """Of full weights that a step keeps besides: those of all blocks, or checkpointed of one; and a float32 of the one that is being made."""
    method = METHODS.get(storage.partition("/")[0])
    if method is None or not method.keeps_weight:
        return 0
    matrices = [block.matrix for block in part.blocks]
    return computing_bytes * (max(matrices, default=0) if checkpointed else sum(matrices)) + 4 * part.largest_matrix


def _kept(name: str, end: str, count: int) -> int:
    """How many of the `count` layers `name` the excluded `end` means: one where it names a block by its number."""
    bare = re.sub(r"(^|\.)\d+\.", r"\1", end)
    if not ends_with(name, bare):
        return 0
    return count if bare == end else 1
