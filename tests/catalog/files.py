"""Weight files written by hand, headers and all: no torch, no safetensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from backend.catalog.formats.header import DTYPE_BITS


def header_of(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict | None = None) -> dict:
    """A safetensors header for name -> (dtype, shape), in the order given."""
    entries, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        count = 1
        for size in shape:
            count *= size
        nbytes = count * DTYPE_BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    return {"__metadata__": metadata, **entries} if metadata is not None else entries


def write_raw(path: Path, text: bytes, data: int = 0, *, length: int | None = None) -> Path:
    """A file with `text` as its header and `data` zero bytes (a hole, so a large file takes no room)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text) if length is None else length))
        file.write(text)
        file.truncate(8 + len(text) + data)
    return path


def write_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict | None = None) -> Path:
    entries = header_of(tensors, metadata)
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return write_raw(path, json.dumps(entries).encode(), max(ends, default=0))


def lora_tensors(modules: dict[str, tuple[int, int]], rank: int = 4, down="lora_A.weight", up="lora_B.weight") -> dict:
    """name -> (dtype, shape) of a LoRA on modules name -> (rows, columns)."""
    found = {}
    for name, (rows, columns) in modules.items():
        found[f"{name}.{down}"] = ("BF16", (rank, columns))
        found[f"{name}.{up}"] = ("BF16", (rows, rank))
    return found
