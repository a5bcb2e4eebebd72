"""Predicted against measured peaks on a card: `python tests/gpu/plan_check.py` (a few minutes, 16 GiB are enough).

True widths, a few blocks, random weights: what is compared is the working memory of the code that really runs. Prints a table and ends with 1
where an allocated peak lies more than 5 % (of weights and working memory together) from the prediction.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from backend.catalog.sizes import published
from backend.engine import forms, stages, tape

GIB = 2**30
BF16 = torch.bfloat16
LIMIT = 0.05
CASES = (
    ("QwenImageTransformer2DModel", {"num_layers": 4}, {"h": 128, "w": 128, "t": 96}, "forward"),
    ("QwenImageTransformer2DModel", {"num_layers": 4}, {"h": 166, "w": 166, "t": 96, "b": 2}, "forward"),
    ("QwenImageTransformer2DModel", {"num_layers": 4}, {"h": 128, "w": 128, "t": 96}, "checkpointed"),
    ("QwenImageTransformer2DModel", {"num_layers": 4}, {"h": 128, "w": 128, "t": 96}, "kept"),
    ("FluxTransformer2DModel", {"num_layers": 2, "num_single_layers": 4}, {"h": 128, "w": 128, "t": 512}, "forward"),
    ("FluxTransformer2DModel", {"num_layers": 2, "num_single_layers": 4}, {"h": 128, "w": 128, "t": 512}, "checkpointed"),
    ("ZImageTransformer2DModel", {"n_layers": 4}, {"h": 128, "w": 128, "t": 96}, "forward"),
    ("WanTransformer3DModel", {"num_layers": 3}, {"h": 60, "w": 104, "f": 9}, "forward"),
    ("AutoencoderKLQwenImage", {}, {"h": 128, "w": 128}, "decode"),
    ("AutoencoderKLQwenImage", {}, {"h": 128, "w": 128}, "encode_image"),
    ("AutoencoderKL", "flux", {"h": 128, "w": 128}, "decode"),
)  # fmt: skip


def config_of(kind: str, config) -> dict:
    if config == "flux":
        return published()["families"]["flux"]["variants"]["flux.1-dev"]["parts"]["vae"]["config"]
    return config


def prepared(kind: str, config: dict, what: str) -> torch.nn.Module:
    module = stages.build(f"diffusers:{kind}", config, BF16)
    if what in ("checkpointed", "kept"):
        stages.add_lora(module, published()["networks"][kind]["lora"]["attention"], 16, torch.float32)
        module.train()
        if what == "checkpointed":
            module.enable_gradient_checkpointing()
    return module


def work_of(module: torch.nn.Module, point: dict, what: str):
    if what == "forward":
        return lambda _: stages.velocity(module, point, BF16)
    if what in ("decode", "encode_image"):
        return lambda _: getattr(stages, what)(module, point, BF16)
    return stages.train_step(module, point, BF16)


def predicted(kind: str, config: dict, point: dict, what: str) -> tape.Tape:
    trains = what in ("checkpointed", "kept")
    with tape.fakes():
        module = prepared(kind, config, what)
        work = work_of(module, point, what)
        with stages.autocast(BF16) if trains else contextlib.nullcontext():
            return stages.trace(module, work, warm=not trains, grad=trains)


def measured(kind: str, config: dict, point: dict, what: str) -> tuple[int, int, int]:
    """(weights, allocated peak, reserved) bytes on the card."""
    trains = what in ("checkpointed", "kept")
    with torch.device("cuda"):
        module = prepared(kind, config, what)
        work = work_of(module, point, what)
        for _ in range(2):
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            with torch.set_grad_enabled(trains), torch.autocast("cuda", BF16) if trains else contextlib.nullcontext():
                work(tape.Tape())
            torch.cuda.synchronize()
    return held, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def main() -> int:
    if not torch.cuda.is_available():
        print("There is no CUDA device here; nothing was checked.")
        return 0
    worst = 0.0
    print(f"{'network':30} {'what':13} {'weights':>8} {'predicted':>10} {'measured':>9} {'error':>7} {'reserved':>9} {'least':>7} {'likely':>7}")
    for kind, config, point, what in CASES:
        said = predicted(kind, config_of(kind, config), point, what)
        live = tape.peak(said)
        held, allocated, reserved = measured(kind, config_of(kind, config), point, what)
        error = (held + live) / allocated - 1
        worst = max(worst, abs(error))
        shares = forms.pools([said])
        low, high = (held + live * shares[name] for name in ("least", "expandable"))
        figures = (held, held + live, allocated, reserved, low, high)
        weights, guess, truth, kept, least, likely = (f"{value / GIB:.3f}" for value in figures)
        print(f"{kind:30} {what:13} {weights:>8} {guess:>10} {truth:>9} {error:>+7.1%} {kept:>9} {least:>7} {likely:>7}", flush=True)
    print(f"worst error of the allocated peak: {worst:.1%} (limit {LIMIT:.0%})")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
