"""What quantized linear layers save over full ones, and what autograd keeps of them.

The methods: `catalog.quantization.methods`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from backend.catalog.quantization.methods import METHODS, read_storage
from backend.system.text_files import ends_with


def saved_bytes(storage: str, layers: Collection[tuple[str, int, int, int]], wide: int) -> int:
    """Bytes that `storage` saves over numbers of `wide` bytes.

    `layers`: (name without a block's number, rows, columns, how many).
    """
    saved = 0
    for rule in read_storage(storage):
        layer_bytes = METHODS[rule.method].layer_bytes
        for name, rows, columns, count in layers:
            meant = count if rule.targets is None else _meant(name, rule.targets, count)
            stay = _meant(name, rule.excluded, count)
            saved += max(0, meant - stay) * (wide * rows * columns - layer_bytes(rows, columns, wide))
    return saved


def cast_bytes(storage: str, part, computing_bytes: int) -> int:
    """Of the full weight that a layer which is quantized in its weight alone makes for its product, the largest."""
    alone = any(not METHODS[rule.method].activations for rule in read_storage(storage))
    return computing_bytes * part.largest_matrix if alone else 0


def kept_bytes(storage: str, part, computing_bytes: int, *, checkpointed: bool) -> int:
    """Of full weights that a step keeps besides: those of all blocks, or checkpointed of one; and a float32 of the one
    that is being made."""
    if not any(METHODS[rule.method].keeps_weight for rule in read_storage(storage)):
        return 0
    matrices = [block.matrix for block in part.blocks]
    return computing_bytes * (max(matrices, default=0) if checkpointed else sum(matrices)) + 4 * part.largest_matrix


def _meant(name: str, ends: Iterable[str], count: int) -> int:
    """How many of the `count` layers `name` the `ends` mean: one each where they name a block by its number."""
    found = 0
    for end in ends:
        bare = re.sub(r"(^|\.)\d+\.", r"\1", end)
        if ends_with(name, bare):
            found += count if bare == end else 1
    return min(found, count)
