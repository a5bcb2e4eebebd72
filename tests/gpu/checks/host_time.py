"""What the host takes for a step of many streamed blocks: with small blocks nothing else counts."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel

from backend.catalog.family import DrawSettings
from backend.engine.devices import device_memory
from backend.engine.offload import placement
from backend.families import qwen_image
from backend.schema import measured_choices
from backend.schema.memory_plan import VramConfig
from tests.engine.small import write_part
from tests.gpu.checks.chain import RAM
from tests.gpu.checks.compare import winner, with_way
from tests.gpu.runner import Outcome

MOST_SECONDS = 0.060
ROUNDS = 7


def host_time(device: torch.device, tiny: bool) -> Outcome:
    config = {"num_layers": 2 if tiny else 60, "num_attention_heads": 1 if tiny else 2, "joint_attention_dim": 64}
    torch.manual_seed(0)
    whole = QwenImageTransformer2DModel(**config).to(torch.bfloat16)
    host, step = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        part = write_part(Path(folder), whole, dtype=torch.bfloat16)
        for way in measured_choices.CHOICES["hooks"]:
            with with_way("hooks", way):
                with torch.device("meta"):
                    module = QwenImageTransformer2DModel(**config)
                module.pos_embed = whole.pos_embed
                placed = placement.place(module.requires_grad_(False), part, VramConfig(**RAM), device=device)
                placed.onload()
                host[way], step[way] = _times(module, device, 8 if tiny else 64, 1 if tiny else ROUNDS)
                placed.close()
    measured = {"host seconds": host, "step seconds": step, "hooks": winner(step)}
    return Outcome(None if device_memory.is_ram(device) else host["layers"] < MOST_SECONDS, measured)


def _times(module, device: torch.device, cells: int, rounds: int) -> tuple[float, float]:
    """Medians, in seconds: until the host has launched a step, and until the device is done."""
    x = torch.randn(1, 16, cells, cells, device=device, dtype=torch.bfloat16)
    cond = qwen_image.collate(
        [{"embeds": torch.randn(24, 64)}], DrawSettings(64, 64), device=device, dtype=torch.bfloat16
    )
    sigma, found = torch.tensor([0.7], device=device), []
    for _ in range(rounds + 1):
        _wait(device)
        began = time.perf_counter()
        with torch.no_grad():
            qwen_image.predict({"dit": module}, x, sigma, cond)
        launched = time.perf_counter() - began
        _wait(device)
        found.append((launched, time.perf_counter() - began))
    return tuple(sorted(one)[rounds // 2] for one in zip(*found[1:], strict=True))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
