"""The header of a GGUF file: its key-value table and where its tensors lie. Enough to say what the file is.

Layout after the specification of the ggml project, versions 2 and 3: magic, version, two counts, key-value pairs,
tensor descriptions (dimensions stored in reverse), padding, data.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

from backend.catalog.formats.header import LARGEST, Header, damaged
from backend.catalog.spec import TensorAt
from backend.schema.messages import Trouble

# type number -> (name, elements of a block, bytes of a block)
BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("GGUF_Q4_0", 32, 18),
    3: ("GGUF_Q4_1", 32, 20),
    6: ("GGUF_Q5_0", 32, 22),
    7: ("GGUF_Q5_1", 32, 24),
    8: ("GGUF_Q8_0", 32, 34),
    9: ("GGUF_Q8_1", 32, 36),
    10: ("GGUF_Q2_K", 256, 84),
    11: ("GGUF_Q3_K", 256, 110),
    12: ("GGUF_Q4_K", 256, 144),
    13: ("GGUF_Q5_K", 256, 176),
    14: ("GGUF_Q6_K", 256, 210),
    15: ("GGUF_Q8_K", 256, 292),
    16: ("GGUF_IQ2_XXS", 256, 66),
    17: ("GGUF_IQ2_XS", 256, 74),
    18: ("GGUF_IQ3_XXS", 256, 98),
    19: ("GGUF_IQ1_S", 256, 50),
    20: ("GGUF_IQ4_NL", 32, 18),
    21: ("GGUF_IQ3_S", 256, 110),
    22: ("GGUF_IQ2_S", 256, 82),
    23: ("GGUF_IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("GGUF_IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("GGUF_TQ1_0", 256, 54),
    35: ("GGUF_TQ2_0", 256, 66),
    39: ("GGUF_MXFP4", 32, 17),
    40: ("GGUF_NVFP4", 64, 36),
    41: ("GGUF_Q1_0", 128, 18),
}
SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
MOST_ENTRIES = 1_000_000
LONGEST_STRING = 16 * 2**20
SHAPE_KEY = "comfy.gguf.orig_shape."


def read_gguf(path: Path) -> Header:
    """The header of a GGUF file; `metadata` holds its scalars and strings as text, arrays only by their length."""
    with path.open("rb") as file:
        reader = _Reader(path, file)
        reader.take(4)
        version = reader.integer("<I")
        if version not in (2, 3):
            raise damaged(path, f"is GGUF version {version}; versions 2 and 3 are read.")
        num_tensors, num_values = reader.count(), reader.count()
        values = {}
        for _ in range(num_values):
            name = reader.string()
            values[name] = reader.value(reader.integer("<I"))
        described = [_description(reader) for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise damaged(path, f"gives an alignment of {str(alignment)[:40]}.")
        start = -(-file.tell() // alignment) * alignment
    tensors = {
        name: _located(reader, start, name, shape, kind, offset, values) for name, shape, kind, offset in described
    }
    return Header(path, tensors, {key: str(value) for key, value in values.items()}, container="gguf")


def _description(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string()
    num_dimensions = reader.integer("<I")
    if num_dimensions > 8:
        raise damaged(reader.path, f"gives tensor {name[:120]!r} {num_dimensions} dimensions.")
    shape = tuple(reader.integer("<Q") for _ in range(num_dimensions))[::-1]
    if math.prod(filter(None, shape)) >= LARGEST:  # though it may have no elements
        raise damaged(reader.path, f"gives tensor {name[:120]!r} the shape {list(shape)}.")
    return name, shape, reader.integer("<I"), reader.integer("<Q")


def _located(reader: _Reader, start: int, name: str, shape: tuple, kind: int, offset: int, values: dict) -> TensorAt:
    if kind not in BLOCKS:
        raise Trouble(
            "not_supported",
            f"{reader.path.name} stores {name[:120]} in the GGUF type {kind}, which is not known here.",
            hint="Take another file of this model.",
        )
    dtype, block, nbytes = BLOCKS[kind]
    elements = math.prod(shape)
    if elements % block:
        raise damaged(reader.path, f"stores tensor {name[:120]!r} of {elements} elements in blocks of {block}.")
    begin, end = start + offset, start + offset + elements // block * nbytes
    if end > reader.nbytes:
        raise damaged(reader.path, f"is cut off: tensor {name[:120]!r} ends at {end}, the file at {reader.nbytes}.")
    original = values.get(SHAPE_KEY + name)
    if (
        isinstance(original, tuple)
        and all(type(size) is int and size > 0 for size in original)
        and math.prod(original) == elements
    ):
        shape = original
    return TensorAt(reader.path, name, dtype, shape, begin, end)


class _Reader:
    """A file read from front to back; every promised length is checked against what is left before it is believed."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self.file, self.nbytes = path, file, path.stat().st_size

    def take(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.nbytes else b""
        if len(data) != count:
            raise damaged(self.path, f"ends inside its header at byte {self.file.tell()}.")
        return data

    def scalar(self, form: str) -> int | float | bool:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def integer(self, form: str) -> int:
        """An unsigned number: `form` is "<I" (32 bits) or "<Q" (64 bits)."""
        return int(self.scalar(form))

    def count(self) -> int:
        count = self.integer("<Q")
        if count > MOST_ENTRIES:
            raise damaged(self.path, f"promises {count} entries.")
        return count

    def string(self) -> str:
        length = self.integer("<Q")
        if length > LONGEST_STRING:
            raise damaged(self.path, f"promises a text of {length} bytes.")
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> object:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth > 3:
            raise damaged(self.path, f"holds a value of the unknown type {kind}.")
        inner, length = self.integer("<I"), self.integer("<Q")
        if inner in SCALARS:
            return self._numbers(SCALARS[inner], length)
        if length > MOST_ENTRIES:
            raise damaged(self.path, f"promises an array of {length} entries.")
        for _ in range(length):
            self.value(inner, depth + 1)
        return f"{length} entries"

    def _numbers(self, form: str, length: int) -> tuple | str:
        data = self.take(length * struct.calcsize(form))
        return tuple(value for (value,) in struct.iter_unpack(form, data)) if length <= 8 else f"{length} numbers"
