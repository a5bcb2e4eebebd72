"""A model quantized once and saved, to be loaded again with `load_prequantized`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from backend import families
from backend.catalog.models.identify import identify_files
from backend.engine.api.model_config import ModelConfig, check_one, expanded
from backend.engine.devices import device_memory
from backend.engine.loading import check_finite
from backend.engine.quantization.quantized_file import write_quantized
from backend.schema.messages import Trouble


def save_quantized_model(
    model_config: ModelConfig,
    output_path: str | Path,
    device: str | torch.device = "auto",
    torch_dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Quantizes what `model_config` names, as its `quantize` says, and writes it to `output_path` (.safetensors), with
    the config.json of the part beside it where none is there. What is not quantized is saved in `torch_dtype`. Returns
    the file's sha256.

    Such a file is a model as any other: it is recognised by its header, and read without `quantize` too (dequantized
    then). Raises Trouble.
    """
    check_one(model_config, "model_config")
    if model_config.quantize is None:
        raise Trouble(
            "bad_value",
            "save_quantized_model needs ModelConfig(quantize=...).",
            hint='For example quantize=QuantizeConfig(method="int8").',
        )
    path = Path(output_path)
    if path.suffix.lower() != ".safetensors":
        raise Trouble("bad_value", f"{path.name} does not end in .safetensors, so no program would find it.")
    spec = identify_files(expanded(model_config.files()), families.FAMILIES)
    if path.resolve() in {file.resolve() for part in spec.parts.values() for file in part.files}:
        raise Trouble("bad_value", f"{path} is the model itself.", hint="Save it under another name.")
    loading = model_config.loading(spec.parts)
    parts = {name: (part, loading[name].quantize if name in loading else None) for name, part in spec.parts.items()}
    if not any(config for _, config in parts.values()):
        raise Trouble("bad_value", "None of the files' layers is one that `quantize` names.")
    for part in spec.parts.values():
        check_finite.check(part)
    write_quantized(parts, path, dtype=torch_dtype, device=device_memory.check_device(str(device)))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
