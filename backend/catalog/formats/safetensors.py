"""The header of a safetensors file, by the standard library alone: never a weight."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from backend.catalog.formats.header import (
    DTYPE_BITS,
    LARGEST,
    LARGEST_HEADER_BYTES,
    MOST_DIMENSIONS,
    ZIPPED,
    damaged,
    length_of,
)
from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble
from backend.schema.untrusted import exists, is_file


@dataclass(frozen=True)
class Layout:
    """A safetensors header as parsed: `entries` name -> {"dtype", "shape", "data_offsets"}, offsets counted from
    `data_start`."""

    entries: dict[str, dict]
    metadata: dict[str, str]
    data_start: int
    nbytes: int  # of the whole file


def read_layout(path: str | os.PathLike) -> Layout:
    """The checked safetensors header of `path`, without an object for every tensor: what a library of thousands
    needs."""
    path = Path(path)
    text, nbytes = _header_text(path)
    entries, metadata = _parse(path, text)
    data_start = 8 + len(text)
    _check_entries(path, entries, nbytes - data_start)
    return Layout(entries, metadata, data_start, nbytes)


def _header_text(path: Path) -> tuple[bytes, int]:
    if exists(path) and not is_file(path):  # a pipe would never end
        raise damaged(path, "is no file that can be read.")
    try:
        with path.open("rb", buffering=0) as file:
            nbytes = length_of(path, os.fstat(file.fileno()).st_size)
            start = file.read(8)
            if len(start) < 8:
                raise damaged(path, f"is no safetensors file: it has only {nbytes} bytes.")
            length = struct.unpack("<Q", start)[0]
            _check_length(path, start, length, nbytes)
            text = file.read(length)
    except FileNotFoundError:
        raise Trouble("missing_file", f"There is no file {path}.", hint="Check the path.") from None
    except OSError as error:
        raise Trouble("missing_file", f"{path} cannot be read: {error.strerror or error}.") from None
    if len(text) != length:
        raise damaged(path, f"ends inside its header: {length} bytes promised, {len(text)} there.")
    return text, nbytes


def _check_length(path: Path, start: bytes, length: int, nbytes: int) -> None:
    if length > nbytes - 8 and (start[:4] == ZIPPED or (start[0] == 0x80 and 2 <= start[1] <= 5)):
        raise Trouble(
            "not_recognised",
            f"{path.name} is a pickle (a .pt, .ckpt or .bin file), not a safetensors file.",
            hint="Convert it: python -m backend lora to_safetensors FILE.",
        )
    if length > nbytes - 8:
        raise damaged(
            path, f"is cut off or no safetensors file: a header of {length} bytes promised, {nbytes - 8} there."
        )
    if length > LARGEST_HEADER_BYTES:
        raise damaged(path, f"has a header of {length} bytes; more than {LARGEST_HEADER_BYTES} is not read.")
    if length < 2:
        raise damaged(path, f"has a header of {length} bytes, too short to be one.")


def _parse(path: Path, text: bytes) -> tuple[dict, dict[str, str]]:
    if text[:1] != b"{":
        raise damaged(path, "has a header that is not a JSON object.")
    try:
        entries = parse_json(text.decode("utf-8"))
    except ValueError as error:  # broken JSON, broken UTF-8, a number of thousands of digits
        raise damaged(path, f"has a header that is not valid JSON ({str(error)[:80]}).") from None
    if not isinstance(entries, dict):
        raise damaged(path, "has a header that is not a JSON object.")
    metadata = entries.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise damaged(path, "has metadata that is not a table of texts.")
    return entries, {key: value if isinstance(value, str) else _as_text(value) for key, value in metadata.items()}


def _as_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check_entries(path: Path, entries: dict, held: int) -> None:
    """Every entry well formed, its span as long as its shape says, all spans together the whole data without hole or
    overlap."""
    spans = []
    for name, entry in entries.items():
        try:  # the plain case without a call: a library reads a million of these
            begin, end = entry["data_offsets"]
            rows, columns = entry["shape"]
            plain = type(begin) is type(end) is type(rows) is type(columns) is int
            plain = plain and 0 <= begin <= end < LARGEST and 0 <= rows < LARGEST and 0 <= columns < LARGEST
            plain = plain and rows * columns * DTYPE_BITS[entry["dtype"]] == (end - begin) * 8
        except (KeyError, TypeError, ValueError, IndexError):
            plain = False
        if not plain:
            begin, end = _span(path, name, entry)
        spans.append((begin, end, name))
    spans.sort(key=itemgetter(0, 1))
    reached = 0
    for begin, end, name in spans:
        if begin < reached:
            raise damaged(path, f"has overlapping tensors: {name[:120]!r} begins at {begin}, inside the one before it.")
        if begin > reached:
            raise damaged(path, f"has a hole of {begin - reached} bytes before tensor {name[:120]!r}.")
        reached = end
    if reached > held:
        raise damaged(path, f"is cut off: its header promises {reached} bytes of data, the file holds {held}.")
    if reached < held:
        raise damaged(path, f"has {held - reached} bytes that belong to no tensor at its end.")


def _span(path: Path, name: str, entry: object) -> tuple[int, int]:
    try:
        if not isinstance(entry, dict):
            raise TypeError("an entry is a JSON object")
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = DTYPE_BITS[dtype]
        whole = type(begin) is int and type(end) is int and 0 <= begin <= end < LARGEST
        whole = whole and type(shape) is list and len(shape) <= MOST_DIMENSIONS
        if whole:
            for size in shape:
                whole = whole and type(size) is int and 0 <= size < LARGEST
    except (KeyError, TypeError, ValueError, IndexError):
        raise damaged(path, f"has a broken entry for tensor {name[:120]!r}: {str(entry)[:120]}.") from None
    if not whole:
        raise damaged(path, f"has impossible numbers for tensor {name[:120]!r}: {str(entry)[:120]}.")
    if math.prod(shape) * bits != (end - begin) * 8:
        raise damaged(path, f"gives tensor {name[:120]!r} {end - begin} bytes, but {dtype} {shape} takes another size.")
    return begin, end
