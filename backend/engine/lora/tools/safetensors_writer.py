"""Atomic safetensors files: written to a temporary name in the same folder, synced, then renamed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from backend.catalog.formats.safetensors import read_layout
from backend.catalog.lora.peft_config import METADATA
from backend.engine.loading.load import TORCH_DTYPES
from backend.engine.loading.tensor_source import open_source, read_pickle
from backend.engine.lora.tools.self_contained import kept_meaning
from backend.schema.messages import Cancelled, Trouble
from backend.system.atomic_files import replacing

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
CHUNK = 16 * 2**20
Progress = Callable[[int, int], None]  # (done, total)
Stop = Callable[[], bool]


def nothing(done: int, total: int) -> None:
    """Progress that nobody follows."""


def never() -> bool:
    return False


@contextmanager
def making(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary name that becomes `path` when the block ends well, and vanishes when it does not."""
    if path.exists() and not overwrite:
        raise Trouble("exists", f"{path} is there already.", hint="Choose another name, or ask for it to be replaced.")
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise Trouble(
            "disk",
            f"{path} cannot be written: {error.strerror or error}.",
            hint="Is there room, and may Loft write there?",
        ) from error


def save(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes a safetensors file of tensors in memory (any shapes). Raises Trouble where it exists, unless
    `overwrite`."""
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return save_stream(path, shapes, lambda name: tensors[name], metadata, overwrite=overwrite)


def save_stream(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    get: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> Path:
    """Writes a safetensors file of tensors that `get(name)` makes one at a time, of the dtypes and shapes of `shapes`,
    so that a checkpoint of any size takes little memory."""
    entries, offset = {}, 0
    order = sorted(
        shapes, key=lambda name: (-shapes[name][0].itemsize, name)
    )  # wide types first keeps everything aligned
    for name in order:
        dtype, shape = shapes[name]
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    with making(path, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        file.write(_head(entries, metadata))
        for name in order:
            _check_stop(should_stop)
            tensor = get(name).detach().cpu().contiguous()
            assert (tensor.dtype, tuple(tensor.shape)) == shapes[name], name
            file.write(_bytes_of(tensor) if tensor.numel() else b"")
            on_progress(entries[name]["data_offsets"][1], offset)
    return path


def _head(entries: dict, metadata: Mapping[str, str] | None) -> bytes:
    said = {"__metadata__": {str(key): str(value) for key, value in metadata.items()}} if metadata else {}
    text = json.dumps({**said, **entries}, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _check_stop(should_stop: Stop) -> None:
    if should_stop():
        raise Cancelled


def write_metadata(
    path: Path,
    out: Path,
    metadata: Mapping[str, str],
    *,
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> Path:
    """`path` with other metadata; its tensors are copied byte for byte. A LoRA whose alpha only the metadata or a
    configuration beside it says gets it as tensors where the copy would act otherwise (`lora_faithful`)."""
    layout = read_layout(path)
    added, metadata = kept_meaning(open_source(path), metadata, out)
    total, done = layout.nbytes - layout.data_start, 0
    entries, reached = dict(layout.entries), total
    for name, tensor in added.items():
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [reached, reached + tensor.nbytes],
        }
        reached += tensor.nbytes
    with making(out, overwrite=overwrite) as temporary, path.open("rb") as source, temporary.open("wb") as file:
        file.write(_head(entries, metadata))
        source.seek(layout.data_start)
        while chunk := source.read(CHUNK):
            _check_stop(should_stop)
            file.write(chunk)
            done += len(chunk)
            on_progress(done, total)
        for tensor in added.values():
            file.write(_bytes_of(tensor))
    return out


def edit_metadata(
    path: Path,
    out: Path | None = None,
    *,
    set: Mapping[str, str] | None = None,
    remove: Iterable[str] = (),
    strip: bool = False,
    **options,
) -> Path:
    """`path` with some metadata set and some removed; `strip`: everything but "format" is removed first. `out` None: in
    its place."""
    said = read_layout(path).metadata
    if strip:
        said = {key: value for key, value in said.items() if key == "format"}
    for key in remove:
        said.pop(key, None)
    if METADATA in remove and METADATA in kept_meaning(open_source(path), said, out or path)[1]:
        raise Trouble(
            "bad_value",
            f"{METADATA} says how the rotations of {path.name} are meant; without it the file would do something else.",
            hint="Leave it, or remove other keys.",
        )
    said |= {str(key): str(value) for key, value in (set or {}).items()}
    if out is None:
        return write_metadata(path, path, said, **{**options, "overwrite": True})
    return write_metadata(path, out, said, **options)


def to_safetensors(path: Path, out: Path | None = None, *, overwrite: bool = False, **options) -> Path:
    """A pickled checkpoint as safetensors, read as weights alone. Shared memory is written once for each name."""
    tensors, target = read_pickle(path), out or path.with_suffix(".safetensors")
    added, metadata = kept_meaning(open_source(path), {"format": "pt"}, target)
    tensors = {**tensors, **added}
    unknown = [name for name, tensor in tensors.items() if tensor.dtype not in NAMES]
    if unknown:
        raise Trouble(
            "not_supported", f"{path.name} holds {unknown[0]} as {tensors[unknown[0]].dtype}, which cannot be written."
        )
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return save_stream(
        target,
        shapes,
        lambda name: tensors[name],
        metadata,
        overwrite=overwrite,
        **options,
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)  # pyright: ignore[reportArgumentType]  (numpy's stubs hide the buffer)
