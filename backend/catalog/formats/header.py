"""What a weight file's header tells: names, dtypes, shapes and byte ranges.

Types and small readers that every container format shares.

A header is text from a stranger. Every number in it is checked against the file's true size before it is used, its size
and depth are bounded, and whatever is wrong is said in one sentence (`Trouble("damaged", ...)`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from backend.catalog.spec import TensorAt
from backend.schema.messages import Trouble

LARGEST_HEADER_BYTES = 32 * 2**20  # the largest honest headers (20,000 tensors, a thumbnail) are a tenth of this
MOST_DIMENSIONS = 16
LARGEST = 2**63
ZIPPED = b"PK\x03\x04"
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
AGAIN = "Download or copy the file again."


@dataclass(frozen=True)
class Header:
    """What a file says it holds; every span lies inside the file."""

    path: Path
    tensors: dict[str, TensorAt]
    metadata: dict[str, str] = field(default_factory=dict)
    container: str = "safetensors"  # "safetensors" | "gguf" | "pickle"


_LENGTHS: ContextVar[Mapping[Path, int] | None] = ContextVar("lengths", default=None)


@contextlib.contextmanager
def as_long_as(lengths: Mapping[Path, int]) -> Iterator[None]:
    """Within it the files `lengths` count as so many bytes long.

    Of a file far away only the header is here, and it is read as the whole.
    """
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def length_of(path: Path, nbytes: int) -> int:
    """The file's length in bytes: `nbytes` as it lies on the disk, or what `as_long_as` says."""
    return (_LENGTHS.get() or {}).get(path, nbytes)


def is_far(path: Path) -> bool:
    """Whether only the header of `path` is on this machine (within `as_long_as`): its tensors cannot be read."""
    return path in (_LENGTHS.get() or {})


def read_bytes(at: TensorAt) -> bytes:
    """The stored bytes of one tensor; for the small ones (a scale, a marker, a JSON of settings)."""
    with at.file.open("rb", buffering=0) as file:
        file.seek(at.start)
        data = file.read(at.nbytes)
    if len(data) != at.nbytes:
        raise damaged(at.file, f"ends inside tensor {at.key!r}.")
    return data


def damaged(path: Path, what: str) -> Trouble:
    return Trouble("damaged", f"{path.name} {what}", hint=AGAIN, detail=str(path))
