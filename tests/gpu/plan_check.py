"""Predicted against measured peaks on a card: `python tests/gpu/plan_check.py` (a few minutes, 16 GiB are enough).

First networks of true widths with a few blocks and random weights: what is compared is the working memory of the code that really runs. Then
whole pictures of the starter: with everything on the card, with parts taking turns, and streamed as a plan for less memory says. Prints
tables and ends with 1 where an allocated peak lies more than 5 % (of weights and working memory together) from the prediction, or what the
allocator reserved more than 5 % outside the predicted range.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backend.engine.devices import allocator_limits

allocator_limits.expand_segments()  # as workers and trainers do

import torch

from backend.catalog.models.identify import identify_model
from backend.engine.devices import device_memory
from backend.engine.pipeline.pipeline import Pipeline
from backend.engine.tracing import allocation_recorder, fit, forward_calls, live_tensors
from backend.engine.worker.loaded_plan import Placing
from backend.families import FAMILIES
from backend.planner.costs.model_sizes import published
from backend.planner.plan import plan
from backend.schema.paths import ASSETS
from backend.schema.request import GenerationRequest

GIB = 2**30
BF16 = torch.bfloat16
VISION = "Qwen2_5_VisionTransformerPretrainedModel"
LIMIT = 0.05
LIBRARIES_BYTES, LIBRARIES_BYTES_90 = (
    40 * 2**20,
    128 * 2**20,
)  # workspaces of matrix products, which torch's allocator counts
CASES = (
    ("QwenImageTransformer2DModel", {"num_layers": 4}, {"h": 128, "w": 128, "t": 96}, "forward"),
    ("QwenImageTransformer2DModel", {"num_layers": 4}, {"h": 166, "w": 166, "t": 96, "b": 2}, "forward"),
    ("QwenImageTransformer2DModel", {"num_layers": 4}, {"h": 128, "w": 128, "t": 96}, "checkpointed"),
    ("QwenImageTransformer2DModel", {"num_layers": 4}, {"h": 128, "w": 128, "t": 96}, "kept"),
    ("QwenImageTransformer2DModel", {"num_layers": 4, "zero_cond_t": True}, {"h": 256, "w": 128, "t": 325}, "forward"),  # and a picture to edit
    (VISION, "qwen", {"t": 1369}, "see"),
    ("FluxTransformer2DModel", {"num_layers": 2, "num_single_layers": 4}, {"h": 128, "w": 128, "t": 512}, "forward"),
    ("FluxTransformer2DModel", {"num_layers": 2, "num_single_layers": 4}, {"h": 128, "w": 128, "t": 512}, "checkpointed"),
    ("FluxTransformer2DModel", {"num_layers": 2, "num_single_layers": 4}, {"h": 128, "w": 128, "t": 512}, "kept"),
    ("ZImageTransformer2DModel", {"n_layers": 4}, {"h": 128, "w": 128, "t": 96}, "forward"),
    ("ZImageTransformer2DModel", {"n_layers": 4}, {"h": 128, "w": 128, "t": 96}, "checkpointed"),
    ("WanTransformer3DModel", {"num_layers": 3}, {"h": 60, "w": 104, "f": 9}, "forward"),
    ("AutoencoderKLQwenImage", {}, {"h": 128, "w": 128}, "decode"),
    ("AutoencoderKLQwenImage", {}, {"h": 128, "w": 128}, "encode_image"),
    ("AutoencoderKL", "flux", {"h": 128, "w": 128}, "decode"),
)  # fmt: skip


def libraries_bytes(device: torch.device) -> int:
    """What the workspaces of all threads may take there: from compute capability 9.0 on cuBLAS takes 32 MiB for each thread and stream, and cuBLASLt more."""
    large = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return LIBRARIES_BYTES_90 if large else LIBRARIES_BYTES


def config_of(kind: str, config) -> dict:
    if config == "flux":
        return published()["families"]["flux"]["variants"]["flux.1-dev"]["parts"]["vae"]["config"]
    if config == "qwen":
        return published()["families"]["qwen_image"]["variants"]["qwen-image-edit"]["parts"]["vision"]["config"] | {
            "depth": 8
        }
    return config


def prepared(kind: str, config: dict, what: str) -> torch.nn.Module:
    package = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl" if kind == VISION else "diffusers"
    module = forward_calls.build(f"{package}:{kind}", config, BF16)
    if what in ("checkpointed", "kept"):
        forward_calls.add_lora(module, published()["networks"][kind]["lora"]["attention"], 16, torch.float32)
        module.train()
        if what == "checkpointed":
            module.enable_gradient_checkpointing()
    return module


def work_of(module: torch.nn.Module, point: dict, what: str):
    if what == "forward":
        return lambda _: forward_calls.predict(module, point, BF16)
    if what == "see":
        return lambda _: forward_calls.encode_text(module, point, BF16)
    if what in ("decode", "encode_image"):
        return lambda _: getattr(forward_calls, what)(module, point, BF16)
    return forward_calls.train_step(module, point, BF16)


def predicted(kind: str, config: dict, point: dict, what: str) -> allocation_recorder.Tape:
    trains = what in ("checkpointed", "kept")
    with allocation_recorder.fakes():
        module = prepared(kind, config, what)
        return forward_calls.trace(module, work_of(module, point, what), warm=not trains, grad=trains)


def measured(kind: str, config: dict, point: dict, what: str, device: torch.device) -> tuple[int, int, int]:
    """(weights, allocated peak, reserved) bytes on the device. A CPU's are counted operation by operation, and nothing is reserved there."""
    trains = what in ("checkpointed", "kept")
    with torch.device(device):
        module = prepared(kind, config, what)
        work = work_of(module, point, what)
        if device_memory.is_ram(device):
            return _counted(module, work, trains)
        for _ in range(2):
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            with torch.set_grad_enabled(trains):
                work(allocation_recorder.Tape())
            torch.cuda.synchronize()
    return held, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _counted(module: torch.nn.Module, work, trains: bool) -> tuple[int, int, int]:
    seen = live_tensors._Seen(device_memory.RAM)
    seen.watch()
    try:
        with torch.set_grad_enabled(trains):
            work(allocation_recorder.Tape())
    finally:
        seen.rest()
    held = live_tensors.weight_bytes({"it": module}, device_memory.RAM)
    return held, held + seen.highest, 0


def pictures(device: str) -> list[str]:
    """Pictures of the starter under plans for less and less memory: what is wrong with them, after a line for each phase."""
    spec, card = identify_model(ASSETS / "starter", FAMILIES), device_memory.probe(device, reserve_bytes=0)
    request = GenerationRequest(
        prompt="a red apple on a table", width=512, height=512, num_inference_steps=4, guidance=4.0
    )
    free = plan(spec, card, request)
    decode = next(phase for phase in free.phases if phase.name == "decode")
    wrong = []
    for share in (None, 0.9, 0.75):
        total = int(free.peak_high_bytes - (1 - share) * decode.live_bytes) if share else card.total_bytes
        found = plan(spec, replace(card, total_bytes=total, free_bytes=total, used_by_others_bytes=0), request)
        wrong += _picture(spec, found, request, device)
    return wrong


def _picture(spec, found, request, device: str) -> list[str]:
    placing, wrong = Placing.of(found, request), []
    pipeline = Pipeline(
        spec,
        dtype=BF16,
        device=device,
        configs=placing.configs,
        vram_limit_bytes=placing.vram_limit_bytes,
        tiled_vae=placing.tiled_vae,
        halves_apart=placing.halves_apart,
        resident_blocks=placing.resident_blocks,
    )
    with live_tensors.measuring(pipeline) as peak:
        pipeline.generate(request)
    for phase in found.phases:
        truth = peak.by_phase[phase.name]
        rungs = "+".join(step.rung for step in found.steps) or "all resident"
        print(
            f"starter {phase.name:8} predicted {phase.live_bytes / 2**20:8.1f} MiB, measured {truth / 2**20:8.1f} MiB ({rungs})",
            flush=True,
        )
        if abs(truth - phase.live_bytes) > LIMIT * truth + libraries_bytes(pipeline.device):
            wrong.append(f"starter, {phase.name}, {rungs}")
    for name, stay in placing.resident_blocks.items():
        if name == "vae" or pipeline.placements[name].resident is None:
            continue
        if tuple(pipeline.placements[name].resident) != stay:
            wrong.append(f"starter: other blocks of {name} stay than the plan says")
    pipeline.close()
    return wrong


def networks(device: torch.device, cases=CASES) -> tuple[float, list[str]]:
    """Networks one after the other, a line for each: the worst error of the allocated peak, and what lies beyond the limit."""
    worst, wrong = 0.0, []
    print(
        f"{'network':30} {'what':13} {'weights':>8} {'predicted':>10} {'measured':>9} {'error':>7} {'reserved':>9} {'least':>7} {'likely':>7}"
    )
    for kind, config, point, what in cases:
        said = predicted(kind, config_of(kind, config), point, what)
        alive = allocation_recorder.peak(said)
        held, allocated, reserved = measured(kind, config_of(kind, config), point, what, device)
        error = (held + alive) / allocated - 1
        worst = max(worst, abs(error))
        shares = fit.pools([said])
        low, high = (held + alive * shares[name] for name in ("least", "expandable"))
        if abs(error) > LIMIT:
            wrong.append(f"{kind}, {what}: {error:+.1%}")
        if not (1 - LIMIT) * low <= reserved <= (1 + LIMIT) * high + libraries_bytes(device):
            wrong.append(f"{kind}, {what}: reserved")
        figures = (held, held + alive, allocated, reserved, low, high)
        weights, guess, truth, kept, least, likely = (f"{value / GIB:.3f}" for value in figures)
        print(
            f"{kind:30} {what:13} {weights:>8} {guess:>10} {truth:>9} {error:>+7.1%} {kept:>9} {least:>7} {likely:>7}",
            flush=True,
        )
    return worst, wrong


def main() -> int:
    if not torch.cuda.is_available():
        print("There is no CUDA device here; nothing was checked.")
        return 0
    device = device_memory.check_device("cuda:0")
    worst, wrong = networks(device)
    print(f"worst error of the allocated peak: {worst:.1%} (limit {LIMIT:.0%})")
    wrong += pictures(str(device))
    print("beyond the limit: " + ("; ".join(wrong) or "nothing"))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
