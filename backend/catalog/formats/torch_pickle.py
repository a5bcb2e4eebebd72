"""Where the tensors of a PyTorch checkpoint lie, found without running anything in it and without torch.

A checkpoint since PyTorch 1.6 is an uncompressed zip archive: one pickle that names the tensors, and one entry of plain
bytes for each storage. The pickle is read by an unpickler that resolves a dozen harmless names to classes of this file
and everything else to a placeholder, so no code of the file's choosing can run.
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backend.catalog.formats.header import Header, damaged
from backend.catalog.spec import TensorAt
from backend.schema.messages import Trouble

LARGEST_PICKLE_BYTES = 64 * 2**20
NESTS = ("state_dict", "module", "model", "model_state", "model_state_dict", "lora_state_dict")
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "Float8_e4m3fnStorage": "F8_E4M3",
    "Float8_e5m2Storage": "F8_E5M2",
}
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Placeholder:
    """Stands for anything that is no tensor: takes every argument, does nothing."""

    def __init__(self, *args, **keywords):
        pass

    def __setstate__(self, state):
        pass

    def __call__(self, *args, **keywords):
        return self

    def append(self, item):
        pass

    def extend(self, items):
        pass

    def __setitem__(self, key, value):
        pass


class _Table(dict):
    """An OrderedDict of the file, whatever its state says."""

    def __setstate__(self, state):
        pass


def _tensor(storage=None, offset=0, size=(), stride=(), *rest) -> _Tensor | None:
    if isinstance(storage, _Storage) and isinstance(offset, int) and isinstance(size, tuple):
        return _Tensor(storage, offset, size, stride)
    return None


def _parameter(data=None, *rest) -> object:
    return data


class _Names(pickle._Unpickler):
    """In Python, since the one in C sets aside memory by numbers in the file before it looks at them."""

    def find_class(self, module, name):
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        known = {
            ("collections", "OrderedDict"): _Table,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        return known.get((module, name), _Placeholder)

    def persistent_load(self, pid):
        if isinstance(pid, tuple) and len(pid) > 2 and pid[0] == "storage" and isinstance(pid[1], str):
            return _Storage(pid[1], str(pid[2]))
        return None


def read_pickled(path: Path) -> Header:
    """The header of a zipped PyTorch checkpoint.

    Troubles: "damaged"; "not_supported" where a tensor does not lie in one piece.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            entries = {info.filename: info for info in archive.infolist()}
            main = next((name for name in entries if name.endswith("/data.pkl") or name == "data.pkl"), None)
            if main is None or entries[main].file_size > LARGEST_PICKLE_BYTES:
                raise damaged(path, "is a zip archive, but no checkpoint of PyTorch that can be read.")
            with archive.open(main) as stream:
                value = _Names(stream).load()
            root = main.removesuffix("data.pkl")
            tensors = {name: tensor for name, tensor in _unwrapped(value).items() if isinstance(tensor, _Tensor)}
            found = {name: _place(path, file, name, tensor, entries, root) for name, tensor in tensors.items()}
    except Trouble:
        raise
    except Exception as error:  # a strange archive or pickle fails in every way there is
        raise damaged(path, f"cannot be read as a checkpoint of PyTorch ({type(error).__name__}).") from None
    if not found:
        raise damaged(path, "holds no tensors.")
    return Header(path, found, container="pickle")


def innermost(value: object) -> object:
    """What lies in a checkpoint's nests ("state_dict", ...), however many there are around it."""
    for _ in range(4):
        inner = next(
            (value[key] for key in NESTS if isinstance(value, dict) and isinstance(value.get(key), dict)), None
        )
        if inner is None:
            break
        value = inner
    return value


def _unwrapped(value: object) -> dict[str, object]:
    """The innermost table of tensors."""
    value = innermost(value)
    return {key: item for key, item in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}


def _place(path: Path, file, name: str, tensor: _Tensor, entries: Mapping[str, zipfile.ZipInfo], root: str) -> TensorAt:
    shape, nbytes = tensor.shape, BYTES.get(tensor.storage.dtype, 1)
    if not all(type(size) is int and 0 <= size < 2**63 for size in (*shape, tensor.offset)) or len(shape) > 16:
        raise damaged(path, f"has impossible numbers for tensor {name[:120]!r}.")
    if not _in_one_piece(shape, tensor.stride):
        raise Trouble(
            "not_supported",
            f"{path.name} stores {name} turned or with gaps.",
            hint=f"Convert it: python -m backend lora to_safetensors {path.name}.",
        )
    info = entries.get(f"{root}data/{tensor.storage.key}")
    length = math.prod(shape) * nbytes
    if info is None or info.compress_type != zipfile.ZIP_STORED or tensor.offset * nbytes + length > info.file_size:
        raise damaged(path, f"lacks the bytes of tensor {name[:120]!r}.")
    start = _data_start(file, info) + tensor.offset * nbytes
    if start + length > path.stat().st_size:
        raise damaged(path, f"ends before the bytes of tensor {name[:120]!r}.")
    return TensorAt(path, name, tensor.storage.dtype, tuple(shape), start, start + length)


def _in_one_piece(shape: tuple[int, ...], stride: object) -> bool:
    """Whether a tensor's elements lie one after the other in the order of its rows."""
    if not isinstance(stride, tuple) or len(stride) != len(shape):
        return False
    step = 1
    for size, distance in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and distance != step:
            return False
        step *= size
    return True


def _data_start(file, info: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin: behind its local header, whose two lengths need not be those of the directory."""
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) < 30:
        raise ValueError("an entry's header is cut off")
    names, extra = struct.unpack("<HH", header[26:30])
    return info.header_offset + 30 + names + extra
