"""Of two ways that give the same picture, the quicker one on this card."""

from __future__ import annotations

import torch
from diffusers import QwenImageTransformer2DModel

from backend.catalog.family import DrawSettings
from backend.engine.devices import device_memory
from backend.families import qwen_image
from benchmarks import ways
from tests.gpu.checks.compare import winner
from tests.gpu.runner import Outcome
from tests.gpu.test_streaming_on_card import seconds_of

SLOWER_WITH_MASK = 1.5


def attention(device: torch.device, tiny: bool) -> Outcome:
    """Both halves of guidance as one padded batch, or one after the other: the attention alone, then four blocks."""
    alone, step = ways.guidance(device)["seconds"], _four_blocks(device, tiny)
    measured = {
        "attention": winner(alone),
        "four blocks": winner(step),
        "seconds": {"attention": alone, "four blocks": step},
    }
    held = None if device_memory.is_ram(device) else alone["together"] >= SLOWER_WITH_MASK * alone["apart"]
    return Outcome(held, measured)


def _four_blocks(device: torch.device, tiny: bool) -> dict[str, float]:
    heads, cells, lengths = (1, 8, (9, 5)) if tiny else (24, 166, (96, 9))
    config = {"num_layers": 1 if tiny else 4, "num_attention_heads": heads, "joint_attention_dim": 64}
    with torch.device(device):
        module = QwenImageTransformer2DModel(**config).to(torch.bfloat16).eval().requires_grad_(False)
    x = torch.randn(2, 16, cells, cells, device=device, dtype=torch.bfloat16)
    sigma, encodings = torch.tensor([0.7, 0.7], device=device), [{"embeds": torch.randn(n, 64)} for n in lengths]

    def predict(picked: slice) -> torch.Tensor:
        cond = qwen_image.collate(encodings[picked], DrawSettings(64, 64), device=device, dtype=torch.bfloat16)
        return qwen_image.predict({"dit": module}, x[picked], sigma[picked], cond)

    with torch.no_grad():
        return {
            "together": seconds_of(device, lambda: predict(slice(0, 2))),
            "apart": seconds_of(device, lambda: [predict(slice(n, n + 1)) for n in range(2)]),
        }


def others(device: torch.device, tiny: bool) -> Outcome:
    found = [row for row in (ways.fp8_scales(device), ways.hooks(device), ways.vae(device)) if row]
    measured = {row["choice"]: winner(row["seconds"]) for row in found}
    measured["seconds"] = {row["choice"]: row["seconds"] for row in found}
    return Outcome(None if device_memory.is_ram(device) else bool(found), measured)
