"""A part with quantized layers as a file: written once, read again as an ordinary part whose weights are stored quantized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from backend.catalog.formats.read import read_header
from backend.catalog.quantization import understood
from backend.catalog.spec import PartSpec
from backend.engine.loading import load
from backend.engine.quantization.quantized_part import Config, load_quantized
from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble
from backend.system.atomic_files import disk_full, is_disk_full, replacing


def write_quantized(
    parts: Mapping[str, tuple[PartSpec, Config | None]],
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_bytes: Callable[[int, int], None] | None = None,
) -> None:
    """One part, or several that lie in the same files, with the layers that each's config means quantized (None: none), as a safetensors
    file: whole or not at all. One part has its own names in it, several those of their files. The parts are in RAM meanwhile; layers
    are quantized on `device`. Raises Trouble."""
    written: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {"format": "pt"}
    for part, config in parts.values():
        tensors, said = _flattened(part, config, dtype=dtype, device=device, on_bytes=on_bytes)
        if len(parts) > 1:
            tensors, said = _as_stored(part, tensors, said)
        names = [name for one in (metadata, said) for name in parse_json(one.get("tensor_names", "[]"))]
        written, metadata = written | tensors, metadata | said | ({"tensor_names": json.dumps(names)} if names else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as partial:
            save_file(written, partial, metadata=metadata)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path.parent, path.name) from None
        raise Trouble("not_written", f"{path} could not be written: {error}.") from None
    for part, _ in parts.values():
        _copy_sizes(part, path.parent)


def _flattened(
    part: PartSpec, config: Config | None, *, dtype: torch.dtype, device: torch.device, on_bytes
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The part's tensors as they are saved, each in memory of its own, and its header."""
    ram = torch.device("cpu")
    if config is None:
        tensors, said = load.load_part(part, dtype=dtype, device=ram, on_bytes=on_bytes).state_dict(), {}
    elif config.load_prequantized or config.mode != "dynamic":
        raise Trouble(
            "bad_value",
            "Only what is quantized while it is loaded, and stays so, can be saved quantized.",
            hint="Leave load_prequantized out, and the mode at 'dynamic'.",
        )
    else:
        module = load_quantized(part, config, dtype=dtype, device=device, stay=ram, on_bytes=on_bytes)
        tensors, said = config.flatten_state_dict(module.state_dict())
    seen: set[int] = set()
    for name, tensor in tensors.items():  # weights that are tied are written for each of their names
        place = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if place in seen and tensor.numel() else tensor
        seen.add(place)
    return tensors, said


def _as_stored(
    part: PartSpec, tensors: Mapping[str, torch.Tensor], said: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The same under the names that the part's file has. Raises Trouble where several of its own lie in one tensor there."""
    there: dict[str, str] = {}  # module -> its name in the file
    for name, at in part.tensors.items():
        (module, _, leaf), (stored, _, last) = name.rpartition("."), at.pieces[0].key.rpartition(".")
        if there.setdefault(module, stored) != stored or (leaf != last and at.packed is None):
            raise Trouble(
                "not_supported",
                f"{at.file.name} keeps {name} under another form of name, so several parts of it are not saved together.",
                hint="Name the files of one part.",
            )
    if len(set(there.values())) < len(there):
        raise Trouble(
            "not_supported", "Several layers lie in one tensor of the file.", hint="Name the files of one part."
        )

    def renamed(name: str) -> str:
        module = name.rpartition(".")[0]
        while module not in there:
            module = module.rpartition(".")[0]
        return f"{there[module]}{name.removeprefix(module)}".lstrip(".")

    names = parse_json(said.get("tensor_names", "[]"))
    about = {renamed(name): said[name] for name in names} | {name: said[name] for name in said if name not in names}
    about |= {"tensor_names": json.dumps(list(map(renamed, names)))} if names else {}
    return {renamed(name): tensor for name, tensor in tensors.items() if _is_stored(name, part)}, about


def _is_stored(name: str, part: PartSpec) -> bool:
    """Whether the part's file has the tensor, or the layer that it belongs to."""
    found, owner = name in part.tensors, name
    while owner and not found:
        owner = owner.rpartition(".")[0]
        found = f"{owner}.weight" in part.tensors
    return found


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
