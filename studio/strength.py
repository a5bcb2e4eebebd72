"""How strongly a LoRA changes each block: the Frobenius norms of its deltas, with numpy and without forming a delta."""

from __future__ import annotations

import re
from pathlib import Path

import numpy

from backend.catalog.adapter import group, innermost, plain
from backend.catalog.header import read_bytes, read_header
from backend.catalog.spec import TensorAt
from backend.schema.messages import Trouble

MOST_BYTES = 2**31  # larger files are not read for a picture of bars
_BLOCK = re.compile(r"(?:^|[._])((?:[a-z]+_)*(?:blocks?|layers?|resnets|attentions)(?:[._]\d+)+)", re.IGNORECASE)
_READ = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


def block_strengths(path: Path) -> list[tuple[str, float]]:
    """(block, norm of all its deltas at strength 1) in the order of the network. Empty where the file is no plain LoRA.

    |B A| needs only the small products: |B A|^2 = trace((B^T B)(A A^T)).
    """
    header = read_header(path)
    if sum(at.nbytes for at in header.tensors.values()) > MOST_BYTES:
        return []
    modules, _ = group(header.tensors)
    squares: dict[str, float] = {}
    for stem, roles in modules.items():
        if not {"down", "up"} <= roles.keys() or "mid" in roles:
            continue
        try:
            down, up = (_matrix(header.tensors[roles[side]]) for side in ("down", "up"))
            alpha = float(_matrix(header.tensors[roles["alpha"]]).reshape(-1)[0]) if "alpha" in roles else len(down)
        except (Trouble, ValueError, IndexError):
            continue
        if down.shape[0] != up.shape[1] or not len(down):
            continue
        square = float(numpy.sum((up.T @ up) * (down @ down.T))) * (alpha / len(down)) ** 2
        block = block_of(plain(stem))
        squares[block] = squares.get(block, 0.0) + (square if numpy.isfinite(square) else 0.0)
    return sorted(((name, square**0.5) for name, square in squares.items()), key=lambda pair: _order(pair[0]))


def block_of(stem: str) -> str:
    """ "transformer_blocks.7" of "transformer_blocks.7.attn.to_q", in any spelling; "other" for a module outside of blocks."""
    found = _BLOCK.search(innermost(stem).name)
    if not found:
        return "other"
    return re.sub(r"[._](\d+)", r".\1", found.group(1))


def _order(name: str) -> tuple:
    return tuple(int(part) if part.isdigit() else -1 for part in name.split(".")[1:]), name


def _matrix(at: TensorAt) -> numpy.ndarray:
    """A stored tensor as a float32 matrix, everything behind the first axis flattened."""
    data = read_bytes(at)
    if at.dtype == "BF16":
        values = (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    elif at.dtype in _READ:
        values = numpy.frombuffer(data, _READ[at.dtype]).astype("<f4")
    else:
        raise ValueError(at.dtype)
    rows = at.shape[0] if at.shape else 1
    return values.reshape(rows, -1)
