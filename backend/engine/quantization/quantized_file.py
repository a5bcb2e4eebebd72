"""A part with quantized layers as a file: written once, read again as an ordinary part whose weights are stored quantized."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from backend.catalog.formats.read import read_header
from backend.catalog.quantization import understood
from backend.catalog.spec import PartSpec
from backend.engine.quantization.quantized_part import Config, load_quantized
from backend.schema.messages import Trouble
from backend.system.atomic_files import disk_full, is_disk_full, replacing


def write_quantized(
    part: PartSpec,
    config: Config,
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_bytes: Callable[[int, int], None] | None = None,
) -> None:
    """`part` with the layers that `config` means quantized, as a safetensors file under the part's own names: whole or not at all. The
    quantized part is in RAM meanwhile; layers are quantized on `device`. Raises Trouble."""
    if config.load_prequantized or config.mode != "dynamic":
        raise Trouble(
            "bad_value",
            "Only what is quantized while it is loaded, and stays so, can be saved quantized.",
            hint="Leave load_prequantized out, and the mode at 'dynamic'.",
        )
    module = load_quantized(part, config, dtype=dtype, device=device, stay=torch.device("cpu"), on_bytes=on_bytes)
    tensors, metadata = config.flatten_state_dict(module.state_dict())
    alone: dict[int, str] = {}  # weights that are tied are written once
    written = {
        name: tensor
        for name, tensor in tensors.items()
        if not tensor.numel() or alone.setdefault(tensor.untyped_storage().data_ptr(), name) == name
    }
    missing = sorted(set(part.tensors) & set(tensors) - set(written))
    written |= {name: tensors[name].clone() for name in missing}
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as partial:
            save_file(written, partial, metadata=metadata)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path.parent, path.name) from None
        raise Trouble("not_written", f"{path} could not be written: {error}.") from None
    _copy_sizes(part, path.parent)


def _copy_sizes(part: PartSpec, folder: Path) -> None:
    """The part's config.json, where it has one and none lies there: sizes that shapes do not tell."""
    own, there = (part.folder or folder) / "config.json", folder / "config.json"
    if own.is_file() and not there.exists():
        shutil.copyfile(own, there)


def read_quantized(part: PartSpec, path: Path) -> PartSpec:
    """`part` as the file at `path` holds it, which `write_quantized` has written."""
    header = read_header(path)
    stored = understood(header.tensors, header.metadata)
    for name, trouble in stored.refused.items():
        if name in part.tensors:
            raise trouble
    return replace(part, tensors=dict(stored.tensors), scales=dict(stored.scales), folder=part.folder)
