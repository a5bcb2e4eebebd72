"""Values of small tensors, read without torch: whether two factors are the same, whether one is 1, what a marker's
bytes say."""

from __future__ import annotations

import struct

from backend.catalog.formats.header import is_far, read_bytes
from backend.catalog.spec import TensorAt
from backend.schema.json_values import parse_json

MOST_BYTES = 1 << 20  # of a factor that is compared number by number
LONGEST_MARKER = 1 << 16
FORMS = {"F64": "d", "F32": "f", "F16": "e"}


def numbers(at: TensorAt) -> tuple[float, ...] | None:
    """The numbers of a floating-point tensor; None for what is too long, of another dtype, or far away."""
    if at.nbytes > MOST_BYTES or is_far(at.file):
        return None
    data = read_bytes(at)
    if at.dtype == "BF16":
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        return struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves)))
    if at.dtype not in FORMS:
        return None
    form = FORMS[at.dtype]
    return struct.unpack(f"<{len(data) // struct.calcsize(form)}{form}", data)


def are_equal(first: TensorAt, second: TensorAt) -> bool:
    """Whether both hold the same numbers; a factor far away counts as the same."""
    if is_far(first.file) or is_far(second.file):
        return True
    if (first.dtype, first.nbytes) == (second.dtype, second.nbytes) and read_bytes(first) == read_bytes(second):
        return True
    one, other = numbers(first), numbers(second)
    return one is not None and one == other


def is_one(at: TensorAt) -> bool:
    """Whether every number of `at` is 1."""
    found = numbers(at)
    return found is not None and all(number == 1.0 for number in found)


def said(at: TensorAt) -> object:
    """The JSON value in a tensor of bytes. Raises ValueError for anything else."""
    if at.dtype not in ("U8", "I8") or at.nbytes > LONGEST_MARKER:
        raise ValueError(f"{at.dtype} of {at.nbytes} bytes")
    return parse_json(read_bytes(at).rstrip(b"\0 "))
