"""The model that the engine's benchmark runs on, and how it measures."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

NETWORK = "diffusers.models.transformers.transformer_qwenimage:QwenImageTransformer2DModel"


def medians(works: dict[str, Callable[[], object]], rounds: int = 3) -> dict[str, float]:
    """Median CPU seconds of each work, interleaved, after a round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            began = time.process_time()
            work()
            if turn:
                found[name].append(time.process_time() - began)
    return {name: statistics.median(times) for name, times in found.items()}


def config_of(quick: bool) -> dict:
    heads = 12 if quick else 24
    return {"num_layers": 3, "num_attention_heads": heads, "attention_head_dim": 128, "joint_attention_dim": 3584}


def make_model(folder: Path, quick: bool) -> None:
    """Random weights in one file, written tensor by tensor."""
    import torch
    from diffusers import QwenImageTransformer2DModel
    from safetensors.torch import save_file

    with torch.device("meta"):
        shapes = {
            key: value.shape for key, value in QwenImageTransformer2DModel(**config_of(quick)).state_dict().items()
        }
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for key, shape in shapes.items():
        scale = 0.02 if len(shape) > 1 else 0.1
        weights[key] = torch.empty(shape, dtype=torch.bfloat16).normal_(std=scale, generator=generator)
        if "norm" in key and len(shape) == 1:
            weights[key] += 1
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": "QwenImageTransformer2DModel", **config_of(quick)}))


def part_of(folder: Path, quick: bool):
    from backend.catalog.header import read_header
    from backend.catalog.spec import PartSpec

    tensors = read_header(folder / "diffusion_pytorch_model.safetensors").tensors
    return PartSpec("dit", NETWORK, config_of(quick), tensors, storage="bfloat16", folder=folder)


def inputs() -> dict:
    """512x512: 1024 picture tokens and 64 text tokens."""
    import torch

    return {
        "hidden_states": torch.randn(1, 1024, 64).to(torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, 64, 3584).to(torch.bfloat16),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "img_shapes": [[(1, 32, 32)]],
    }


def rss() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def private_rss() -> int:
    """Resident bytes that are no part of a file."""
    import psutil

    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)


def touch(module) -> None:
    """Reads one number of every page of every weight."""
    for parameter in module.parameters():
        parameter.detach().reshape(-1)[:: 4096 // parameter.element_size()].sum()


def row(name: str, target: str, **values) -> None:
    print("ROW " + json.dumps({"row": name, "target": target, **values}), flush=True)
