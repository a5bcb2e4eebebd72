"""The model that the engine's benchmark runs on, and how it measures."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

NETWORK = "diffusers.models.transformers.transformer_qwenimage:QwenImageTransformer2DModel"

FP8 = {"offload_dtype": "float8_e4m3fn", "onload_dtype": "float8_e4m3fn", "preparing_dtype": "float8_e4m3fn"}
DISK = {"offload_device": "disk", "onload_device": "disk", "preparing_device": "disk"}


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


def loader(who: str, folder: Path, quick: bool) -> Callable[[], object]:
    import torch

    if who == "diffusers":
        from diffusers import QwenImageTransformer2DModel

        return lambda: QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    if who == "diffsynth":
        from diffsynth.core import load_model
        from diffsynth.models.qwen_image_dit import QwenImageDiT

        if quick:
            raise NotImplementedError("its width is written into the class")
        return lambda: load_model(QwenImageDiT, str(folder / "diffusion_pytorch_model.safetensors"), {"num_layers": 3})
    from backend.engine import load

    part = part_of(folder, quick)
    load.build_meta(part)
    return lambda: load.load_part(part, dtype=torch.bfloat16)


def loft_modules(folder: Path, quick: bool) -> dict:
    from backend.engine import load, placement
    from backend.schema.vram import VramConfig

    part, found = part_of(folder, quick), {"resident": load.load_part(part_of(folder, quick))}
    for name, settings in (("disk", DISK), ("fp8", FP8)):
        found[name] = load.build_meta(part)
        placement.place(found[name], part, VramConfig(**settings), device="cpu").onload()
    return found


def diffusers_modules(folder: Path, quick: bool) -> dict:
    import torch
    from diffusers import QwenImageTransformer2DModel

    found = {
        name: QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
        for name in ("resident", "disk", "fp8")
    }
    found["disk"].enable_group_offload(
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(folder / "copy"),
    )
    found["fp8"].enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    return found
