"""The model that the engine's benchmark runs on, and how things are measured."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

NETWORK = "diffusers.models.transformers.transformer_qwenimage:QwenImageTransformer2DModel"
SHARDS = 5
TARGETS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
RANK = 16
MIB = 2**20


def config_of(quick: bool, layers: int = 3) -> dict:
    heads = 12 if quick else 24
    return {"num_layers": layers, "num_attention_heads": heads, "attention_head_dim": 128, "joint_attention_dim": 3584}


def make_model(folder: Path, quick: bool, layers: int = 3) -> None:
    """Random weights in five shards, written one at a time."""
    import torch
    from diffusers import QwenImageTransformer2DModel
    from safetensors.torch import save_file

    with torch.device("meta"):
        shapes = {
            key: value.shape
            for key, value in QwenImageTransformer2DModel(**config_of(quick, layers)).state_dict().items()
        }
    total, done = sum(shape.numel() for shape in shapes.values()), 0
    places: dict[str, str] = {}
    for key, shape in shapes.items():
        places[key] = f"diffusion_pytorch_model-{done * SHARDS // total + 1:05}-of-{SHARDS:05}.safetensors"
        done += shape.numel()
    generator = torch.Generator().manual_seed(0)
    for name in sorted(set(places.values())):
        weights = {key: _random(key, shapes[key], generator) for key in shapes if places[key] == name}
        save_file(weights, folder / name)
    index = {"metadata": {"total_size": 2 * total}, "weight_map": places}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    config = {"_class_name": "QwenImageTransformer2DModel", **config_of(quick, layers)}
    (folder / "config.json").write_text(json.dumps(config))


def settle(folder: Path) -> None:
    """The files in the system's cache as reading brings them there. Linux keeps what was just written, or came in page
    by page through a mapping, in small pages, and to map those takes four to ten times as long as the large ones that
    reading makes."""
    for path in files_of(folder):
        with path.open("r+b") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(16 * MIB):
                pass


def _random(key: str, shape, generator):
    import torch

    weight = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02 if len(shape) > 1 else 0.1, generator=generator)
    return weight.add_(1) if "norm" in key and len(shape) == 1 else weight


def make_loras(folder: Path, quick: bool, count: int, dtype: str = "bfloat16") -> list[Path]:
    """LoRA files of rank 16 for the eight attention projections of every block: 24 matrices."""
    import torch
    from safetensors.torch import save_file

    width, found = 128 * config_of(quick)["num_attention_heads"], []
    for number in range(count):
        generator, tensors = torch.Generator().manual_seed(number), {}
        for block in range(config_of(quick)["num_layers"]):
            for target in TARGETS:
                name = f"transformer_blocks.{block}.attn.{target}"
                for side, shape in (("A", (RANK, width)), ("B", (width, RANK))):
                    factor = torch.randn(shape, generator=generator) * 0.01
                    tensors[f"{name}.lora_{side}.weight"] = factor.to(getattr(torch, dtype))
        found.append(folder / f"lora_{dtype}_{number}.safetensors")
        save_file(tensors, found[-1])
    return found


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("diffusion_pytorch_model-*.safetensors"))


def part_of(folder: Path, quick: bool, layers: int = 3):
    from backend.catalog.formats.read import read_header
    from backend.catalog.spec import PartSpec

    tensors = {key: at for path in files_of(folder) for key, at in read_header(path).tensors.items()}
    return PartSpec("dit", NETWORK, config_of(quick, layers), tensors, storage="bfloat16", folder=folder)


def medians(
    works: Mapping[str, Callable[[], object]],
    rounds: int = 3,
    *,
    clock: Callable[[], float] = time.process_time,
    after: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, float]:
    """Median seconds of each work, interleaved, after a round that does not count. `after` of a work is run behind it,
    unmeasured."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            began = clock()
            work()
            if turn:
                found[name].append(clock() - began)
            (after or {}).get(name, lambda: None)()
    return {name: statistics.median(times) for name, times in found.items()}


def bare(call: Callable[[], object]) -> Callable[[], None]:
    """The matrix products and attentions of one `call` of a network and nothing else, on the tensors that they really
    see."""
    import torch
    from torch.overrides import TorchFunctionMode

    works: list[tuple] = []

    class Recording(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if function is torch.nn.functional.linear:
                works.append((function, (args[0].detach(), args[1].detach()), {}))
            elif function is torch.nn.functional.scaled_dot_product_attention:
                works.append((function, args, kwargs))
            return function(*args, **kwargs)

    with torch.no_grad(), Recording():
        call()

    def run() -> None:
        with torch.no_grad():
            for function, args, kwargs in works:
                function(*args, **kwargs)

    return run


def rss() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def private_rss() -> int:
    """Resident bytes that are no part of a file."""
    import psutil

    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)


def load_average() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def touch(module) -> None:
    """Reads one number of every page of every weight."""
    for parameter in module.parameters():
        parameter.detach().reshape(-1)[:: 4096 // parameter.element_size()].sum()


def row(name: str, target: str, limit: str = "", **values) -> None:
    """A row of the table: what must be reached, what nothing could better, and what each engine did."""
    print("\nROW " + json.dumps({"row": name, "target": target, "limit": limit, **values}), flush=True)


def note(text: str) -> None:
    """A sentence under the table."""
    print("\nNOTE " + json.dumps(text), flush=True)
