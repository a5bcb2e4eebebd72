"""A module with the traits of a diffusion transformer, in a few lines: two streams, tables, norms, and layers around its blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from backend.catalog.formats.read import read_header
from backend.catalog.spec import PartSpec

WIDTH = 48


class Block(nn.Module):
    """Two streams in, two out; one parameter of its own, as Wan's blocks have."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.table = nn.Parameter(torch.empty(1, 2, WIDTH))
        self.to_q, self.to_k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, text, time=None):
        shift, gate = (self.table + time[:, None]).chunk(2, dim=1)
        mixed = torch.softmax(self.to_q(self.norm(x)) @ self.to_k(text).transpose(1, 2) / WIDTH**0.5, -1) @ text
        x = x + mixed + shift
        return x + gate * self.down(torch.nn.functional.gelu(self.up(self.norm(x)))), text + 0.1 * x.mean(
            1, keepdim=True
        )


class Small(nn.Module):
    """`checkpoints`: None, or whether blocks recompute themselves in the reentrant form."""

    def __init__(self, num_blocks: int):
        super().__init__()
        self.embed, self.embed_text = nn.Linear(16, WIDTH), nn.Linear(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm_out, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)
        self.checkpoints: bool | None = None

    def forward(self, x, text, time):
        x, text = self.embed(x), self.embed_text(text)
        for block in self.blocks:
            if self.checkpoints is None:
                x, text = block(x, text, time=time)
            else:
                x, text = checkpoint(block, x, text, time, use_reentrant=self.checkpoints)
        return self.out(self.norm_out(x))


def inputs(batch: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (batch, 6, 16), "text": (batch, 3, 32), "time": (batch, WIDTH)}
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def write_part(
    folder: Path, module, network: str = "unused:Unused", config=None, *, dtype=None, name: str = "dit", scales=None
) -> PartSpec:
    """The module's weights in a file in `folder`, located by its header; those named in `scales` as FP8 codes with that factor beside them."""
    scales = scales or {}
    kept = {}
    for key, tensor in module.state_dict().items():
        kept[key] = (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).contiguous().clone()
    for key, scale in scales.items():
        kept[key] = (kept[key].float() / scale).to(torch.float8_e4m3fn)
        kept[f"{key}.factor"] = torch.tensor(scale)
    path = Path(folder) / f"{name}.safetensors"
    save_file(kept, path)
    found = read_header(path).tensors
    own = {key: at for key, at in found.items() if not key.endswith(".factor")}
    factors = {key: found[f"{key}.factor"] for key in scales}
    storage = str(dtype or torch.float32).removeprefix("torch.")
    return PartSpec(name=name, network=network, config=config or {}, tensors=own, scales=factors, storage=storage)


def small_part(
    folder: Path, dtype=torch.bfloat16, num_blocks: int = 4, scales=()
) -> tuple[PartSpec, Callable[[], Small]]:
    """A transformer-like module in a file, and how to build it on meta."""
    torch.manual_seed(0)
    module = Small(num_blocks)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=0.1 if parameter.ndim > 1 else 0.3).add_(1.0 if "norm" in name else 0.0)
    factors = {key: 0.001 * (index + 1) for index, key in enumerate(scales)}
    part = write_part(folder, module, dtype=dtype, scales=factors)

    def build() -> Small:
        with torch.device("meta"):
            return Small(num_blocks)

    return part, build
