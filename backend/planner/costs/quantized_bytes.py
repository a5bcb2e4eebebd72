"""Bytes of linear layers that `--quant_options` rounds, as each method's package stores them. No torch, and none of those packages.

A part's storage is then written as there: "bitsandbytes_nf4", or "int8/img_in,proj_out" with the ends of names that stay as they are.
Checked against real layers (`tests/training/model/test_quantized_bytes.py`): bitsandbytes 0.50, torchao 0.18.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from backend.system.text_files import ends_with, listed

BLOCK = 64  # numbers that share a factor in bitsandbytes' four bits; factors are rounded themselves, in blocks of 256
GROUP = 128  # of torchao's four bits


def _four_bits(rows: int, columns: int, wide: int) -> int:
    """Half a byte a number, a byte a block, a float32 for 256 blocks, and tables: 16 and 256 float32, an offset."""
    blocks = -(-rows * columns // BLOCK)
    return -(-rows * columns // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256 + 1)


def _four_bits_in_groups(rows: int, columns: int, wide: int) -> int:
    return rows * columns // 2 + 2 * 2 * rows * -(-columns // GROUP)  # a factor and a zero of 16 bits each


def _block_factors(rows: int, columns: int, block: int) -> int:
    """Bytes of the factors of blocks of a row, as tensor cores read them: rows in groups of 128, blocks in groups of 4."""
    return 128 * -(-rows // 128) * 4 * -(-columns // (4 * block))


METHODS: dict[str, Callable[[int, int, int], int]] = {  # (rows, columns, bytes of a number that computes) -> bytes
    "int8": lambda rows, columns, wide: rows * columns + wide * rows,
    "bitsandbytes_nf4": _four_bits,
    "bitsandbytes_fp4": _four_bits,
    "bitsandbytes_int8": lambda rows, columns, wide: rows * columns + 4 * rows,
    "torchao_int8_w8a16": lambda rows, columns, wide: rows * columns + 5 * rows,
    "torchao_fp8_w8a16": lambda rows, columns, wide: rows * columns + 4 * rows,
    "torchao_int4_w4a16": _four_bits_in_groups,
    "torchao_int8_w8a8": lambda rows, columns, wide: rows * columns + 5 * rows,
    "torchao_fp8_w8a8": lambda rows, columns, wide: rows * columns + 4 * rows,
    "torchao_nvfp4_w4a16": lambda rows, columns, wide: rows * columns // 2 + _block_factors(rows, columns, 16) + 4,
    # These need a card of their own kind (NVIDIA's Hopper or Blackwell); their bytes are by the formats' definitions, not measured.
    "torchao_nvfp4_w4a4": lambda rows, columns, wide: rows * columns // 2 + _block_factors(rows, columns, 16) + 4,
    "torchao_mxfp4_w4a4": lambda rows, columns, wide: rows * columns // 2 + _block_factors(rows, columns, 32),
    "torchao_mxfp8_w8a8": lambda rows, columns, wide: rows * columns + _block_factors(rows, columns, 32),
    "torchao_int4_w4a8": _four_bits_in_groups,
}
ELSEWHERE = {  # methods of DiffSynth-Studio that are not carried out here -> the one that does the same
    "comfy_kitchen_int8_w8a8": "torchao_int8_w8a8",
    "comfy_kitchen_fp8_w8a8": "torchao_fp8_w8a8",
}
KEPT_IN_FULL = (
    "torchao_int8_w8a16",
    "torchao_fp8_w8a16",
    "torchao_nvfp4_w4a16",
)  # autograd keeps each layer's weight in full until its backward pass
NO_GRADIENT = (
    "torchao_int4_w4a16", "torchao_int8_w8a8", "torchao_fp8_w8a8", "torchao_nvfp4_w4a4", "torchao_mxfp4_w4a4", "torchao_mxfp8_w8a8",
    "torchao_int4_w4a8",
)  # fmt: skip


def package_of(method: str) -> str:
    """The package that carries out a method; "" for Loft's own."""
    first = method.partition("_")[0]
    return first if first in ("bitsandbytes", "torchao") else ""


def is_rounded(storage: str) -> bool:
    """Whether `storage` is a method's, and no dtype."""
    return storage.partition("/")[0] in METHODS


def saved_bytes(storage: str, layers: Iterable[tuple[str, int, int, int]], wide: int) -> int:
    """Bytes that `storage` saves over numbers of `wide` bytes. `layers`: (name without a block's number, rows, columns, how many)."""
    method, _, left_out = storage.partition("/")
    ends = listed(left_out)
    saved = 0
    for name, rows, columns, count in layers:
        stay = min(count, sum(_kept(name, end, count) for end in ends))
        saved += (count - stay) * (wide * rows * columns - METHODS[method](rows, columns, wide))
    return saved


def kept_bytes(storage: str, part, computing_bytes: int, *, checkpointed: bool) -> int:
    """Of full weights that a step keeps besides: those of all blocks, or checkpointed of one; and a float32 of the one that is being made."""
    if storage.partition("/")[0] not in KEPT_IN_FULL:
        return 0
    matrices = [block.matrix for block in part.blocks]
    return computing_bytes * (max(matrices, default=0) if checkpointed else sum(matrices)) + 4 * part.largest_matrix


def _kept(name: str, end: str, count: int) -> int:
    """How many of the `count` layers `name` the excluded `end` means: one where it names a block by its number."""
    bare = re.sub(r"(^|\.)\d+\.", r"\1", end)
    if not ends_with(name, bare):
        return 0
    return count if bare == end else 1
