"""The tensors of weight files as a state dict, as scripts for DiffSynth-Studio read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from backend.catalog.formats.read import read_header
from backend.engine.devices import device_memory
from backend.engine.loading.tensor_source import read_pickle
from backend.schema.messages import Trouble


def load_state_dict(
    file_path: str | Path | Sequence[str | Path],
    torch_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, torch.Tensor]:
    """The tensors of a file, or of several shards together, by their names in it, in `torch_dtype` (None: as they are
    stored).

    Safetensors, and pickles read so that they run no code. Raises Trouble for a file that is missing or damaged, and
    for a name that two files have.
    """
    found: dict[str, torch.Tensor] = {}
    target = device_memory.check_device(str(device))
    for path in map(Path, [file_path] if isinstance(file_path, str | Path) else file_path):
        for name, tensor in _read(path).items():
            if name in found:
                raise Trouble("bad_value", f"{path.name} has the tensor {name}, which another of the files has too.")
            found[name] = tensor.to(device=target, dtype=torch_dtype)
    return found


def _read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix.lower() == ".gguf":
        raise Trouble(
            "not_supported",
            f"{path.name} is a GGUF file, whose blocks are no tensors of torch.",
            hint="Load it with ModelConfig(path=...).",
        )
    if path.suffix.lower() not in (".safetensors", ".sft"):
        return read_pickle(path)
    read_header(path)  # says what is wrong with a file in a sentence
    return load_file(path)
