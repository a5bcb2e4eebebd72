"""Which of two ways is quicker on the device at hand: `python benchmarks/ways.py [DEVICE]`. One row a choice of
`LOFT_WAYS`, the quicker one named.

On a card the sizes are Qwen-Image's at 1328 x 1328; on a CPU small ones, which only show that the script runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional as F

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.acceleration import fp8_matmul
from backend.engine.devices import capabilities, device_memory
from backend.engine.loading import load
from backend.engine.offload import placement
from backend.schema import measured_choices
from backend.schema.memory_plan import VramConfig
from backend.schema.paths import ASSETS

ROUNDS = 7


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    module = None if device_memory.is_ram(device) else torch.get_device_module(device)
    found = []
    for _ in range(ROUNDS):
        if module:
            module.synchronize(device)
        begin = time.perf_counter()
        work()
        if module:
            module.synchronize(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:])


def both(name: str, device: torch.device, make: Callable[[str], Callable[[], object]]) -> dict:
    """Seconds of each way, and the quicker one. `make(way)` is called while the way is chosen, and so is what it
    answers."""
    found, before = {}, os.environ.get("LOFT_WAYS")
    try:
        for way in measured_choices.CHOICES[name]:
            os.environ["LOFT_WAYS"] = f"{name}={way}"
            with torch.no_grad():
                found[way] = seconds(device, make(way))
    finally:
        os.environ.pop("LOFT_WAYS") if before is None else os.environ.update(LOFT_WAYS=before)
    return {"choice": name, "seconds": found, "quicker": min(found, key=found.get)}


def guidance(device: torch.device) -> dict:
    """Attention of both halves: one padded batch with a mask, or two without."""
    heads, tokens, width = (2, 200, 32) if device_memory.is_ram(device) else (24, 6989, 128)
    q, k, v = torch.randn(3, 2, heads, tokens, width, device=device, dtype=torch.bfloat16)
    mask = torch.ones(2, 1, 1, tokens, device=device, dtype=torch.bool)
    mask[1, ..., -tokens // 30 :] = False
    attend = F.scaled_dot_product_attention

    def make(way: str) -> Callable[[], object]:
        if way == "together":
            return lambda: attend(q, k, v, attn_mask=mask)
        return lambda: [attend(q[one, None], k[one, None], v[one, None]) for one in range(2)]

    return both("guidance", device, make)


def fp8_scales(device: torch.device) -> dict | None:
    if capabilities.why_no_fp8_products(device) and not device_memory.is_ram(device):
        return None
    rows, size = (64, 64) if device_memory.is_ram(device) else (6989, 3072)
    x = torch.randn(rows, size, device=device, dtype=torch.bfloat16)
    codes = torch.randn(4 * size, size, device=device).to(torch.float8_e4m3fn)
    factor = torch.full((1,), 0.02, device=device)
    return both("fp8_scales", device, lambda way: lambda: fp8_matmul.product(x, codes, factor, by_rows=way == "rows"))


def starter(part: str):
    return identify_model(ASSETS / "starter", families.FAMILIES).parts[part]


def hooks(device: torch.device) -> dict:
    """The host's time of a streamed pass: blocks so small that nothing else counts."""
    part = starter("dit")
    asked = VramConfig(
        offload_device="disk", onload_device="disk", preparing_device="disk", computation_dtype=part.storage
    )

    def make(way: str) -> Callable[[], object]:
        module = load.build_meta(part)
        placed = placement.place(module, part, asked, device=device)
        placed.onload()
        blocks = list(placed.blocks)

        def work() -> None:
            for unit in blocks:
                for owner in (unit.module, *(layer.module for layer in placed.layers if layer.unit is unit)):
                    for hook in owner._forward_pre_hooks.values():
                        hook(owner, (), {})
                    for hook in reversed(owner._forward_hooks.values()):
                        hook(owner, (), {}, None)

        return work

    return both("hooks", device, make)


def vae(device: torch.device) -> dict:
    part, family = starter("vae"), families.by_name("qwen_image")
    module = load.load_part(part, dtype=torch.bfloat16, device=device)
    family.prepare("vae", module)
    cells = 16 if device_memory.is_ram(device) else 166
    latents = torch.randn(1, module.config.z_dim, cells, cells, device=device, dtype=torch.bfloat16)
    return both("vae", device, lambda way: lambda: family.decode({"vae": module}, latents))


def main() -> list[dict]:
    device = device_memory.check_device(sys.argv[1] if len(sys.argv) > 1 else "auto")
    found = [row for row in (guidance(device), fp8_scales(device), hooks(device), vae(device)) if row]
    for row in found:
        times = ", ".join(f"{way} {1000 * value:.2f} ms" for way, value in row["seconds"].items())
        print(f"{row['choice']:<11} {times}: {row['quicker']}")
    return found


if __name__ == "__main__":
    main()
