"""The header of a weight file of any container: safetensors, GGUF, zipped PyTorch checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from backend.catalog.formats.gguf import read_gguf
from backend.catalog.formats.header import ZIPPED, Header
from backend.catalog.formats.safetensors import read_layout
from backend.catalog.formats.torch_pickle import read_pickled
from backend.catalog.spec import TensorAt
from backend.schema.messages import Trouble


def read_header(path: str | os.PathLike) -> Header:
    """The header of a safetensors or GGUF file, or of a zipped PyTorch checkpoint.

    Troubles: "missing_file", "damaged", "not_recognised" (another kind of file), "not_supported".
    """
    path = Path(path)
    start = _first_bytes(path, 4)
    if start == b"GGUF":
        return read_gguf(path)
    if start == ZIPPED:
        return read_pickled(path)
    layout = read_layout(path)
    begins = layout.data_start
    tensors = {}
    for name, entry in layout.entries.items():
        begin, end = entry["data_offsets"]
        tensors[name] = TensorAt(path, name, entry["dtype"], tuple(entry["shape"]), begins + begin, begins + end)
    return Header(path, tensors, layout.metadata)


def _first_bytes(path: Path, count: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(count)
    except FileNotFoundError:
        raise Trouble("missing_file", f"There is no file {path}.", hint="Check the path.") from None
    except OSError as error:
        raise Trouble("missing_file", f"{path} cannot be read: {error.strerror or error}.") from None
