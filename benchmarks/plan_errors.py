"""Predicted against measured peaks of live tensor bytes on a CPU: `python benchmarks/plan_errors.py [--tiny]` (some
minutes).

Networks of 100 to 300 million parameters with random weights in float32 (with `--tiny`: the small ones of the tests),
weights not counted: the tape of a run on fake tensors beside that of a real run. Then real runs of the trainer on the
starter and its shipped pictures, everything counted, by the estimate that the page shows (`--runs`: these alone).
Prints tables; ends with 1 where an error is above 2 %.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from backend.engine.tracing import allocation_recorder, forward_calls
from backend.planner.costs.model_sizes import published
from backend.schema.paths import ASSETS

LIMIT = 0.02
POINT = {"h": 32, "w": 48, "n": 384, "t": 96, "b": 1, "f": 3}
DENOISERS = {
    "QwenImageTransformer2DModel": {
        "num_layers": 4, "num_attention_heads": 10, "attention_head_dim": 96, "joint_attention_dim": 768, "axes_dims_rope": [16, 40, 40],
    },
    "FluxTransformer2DModel": {
        "num_layers": 2, "num_single_layers": 6, "num_attention_heads": 8, "attention_head_dim": 112, "joint_attention_dim": 768,
        "pooled_projection_dim": 256, "axes_dims_rope": [16, 48, 48], "guidance_embeds": True,
    },
    "ZImageTransformer2DModel": {
        "n_layers": 8, "n_refiner_layers": 1, "dim": 1024, "n_heads": 8, "n_kv_heads": 8, "cap_feat_dim": 768, "axes_dims": [32, 48, 48],
    },
    "WanTransformer3DModel": {
        "num_layers": 8, "num_attention_heads": 8, "attention_head_dim": 128, "text_dim": 768, "ffn_dim": 4096, "freq_dim": 128,
    },
}  # fmt: skip
ENCODERS = {
    "Qwen2_5_VLTextModel": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 8192, "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 10000.0, "rope_type": "default"},
    },
    "Qwen3Model": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "vocab_size": 8192,
    },
    "T5EncoderModel": {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 8, "num_heads": 16, "vocab_size": 8192, "feed_forward_proj": "gated-gelu"},
    "UMT5EncoderModel": {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 8, "num_heads": 16, "vocab_size": 8192, "feed_forward_proj": "gated-gelu"},
    "CLIPTextModel": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 49408},
}  # fmt: skip
COMMON = [
    "--model", str(ASSETS / "starter"), "--dataset_base_path", str(ASSETS / "datasets" / "character"), "--max_pixels", "65536",
    "--max_steps", "4", "--sample_prompts", "a red apple", "--sample_inference_steps", "2", "--sample_every", "4",
]  # fmt: skip
RUNS = (  # at 256 x 256; the last one has too many tokens for attention in matrix products
    "--batch_size 1", ("--batch_size 1 " "--use_gradient_checkpointing"), "--batch_size 1 --mixed_precision no", "--batch_size 8",
    ("--batch_size 8 " "--use_gradient_checkpointing"), "--batch_size 1 --fp8_models dit", ("--batch_size 1 " "--enable_model_cpu_offload"),
    "--batch_size 1 --quant_options dit:int8", "--batch_size 2 --gradient_accumulation_steps 2",
    "--batch_size 1 --lora_rank 8 --lora_target_modules attention", "--batch_size 1 --trainable_models dit",
    ("--batch_size 8 --trainable_models dit " "" "" "" "" "" "" "" "" "--use_gradient_checkpointing"), "--batch_size 1 --trainable_models dit --mixed_precision no",
    "--batch_size 1 --use_gradient_checkpointing_offload", "--batch_size 1 --enable_optimizer_cpu_offload",
    "--batch_size 1 --height 512 --width 512",
)  # fmt: skip
DECODERS = {"AutoencoderKLQwenImage": {}, "AutoencoderKLWan": {}, "AutoencoderKL": "flux"}


def cases(tiny: bool):
    """(kind, package, config, phase) of every row."""
    if tiny:
        from tests.engine.tracing import test_trace as small

        denoisers, encoders, decoders = small.DENOISERS, small.ENCODERS, small.DECODERS
    else:
        flux = published()["families"]["flux"]["variants"]["flux.1-dev"]["parts"]["vae"]["config"]
        denoisers, encoders = DENOISERS, ENCODERS
        decoders = {kind: flux if config == "flux" else config for kind, config in DECODERS.items()}
    for kind, config in denoisers.items():
        for phase in ("denoise", "step, checkpointed", "step, kept"):
            yield kind, "diffusers", config, phase
    for kind, config in encoders.items():
        yield kind, "transformers", config, "text"
    for kind, config in decoders.items():
        for phase in ("decode", "encode"):
            yield kind, "diffusers", config, phase


def made(kind: str, package: str, config: dict, phase: str):
    """(module, work, whether it trains)"""
    module = forward_calls.build(f"{package}:{kind}", config, torch.float32)
    if phase.startswith("step"):
        forward_calls.add_lora(module, published()["networks"][kind]["lora"]["all"], 16, torch.float32)
        module.train()
        if phase.endswith("checkpointed"):
            module.enable_gradient_checkpointing()
        return module, forward_calls.train_step(module, POINT, torch.float32), True
    call = {
        "denoise": forward_calls.predict,
        "text": forward_calls.encode_text,
        "decode": forward_calls.decode,
        "encode": forward_calls.encode_image,
    }[phase]
    point = {"t": 224, "b": 2} if phase == "text" else POINT
    return module, lambda _: call(module, point, torch.float32), False


def peaks(kind: str, package: str, config: dict, phase: str) -> tuple[int, int, int]:
    """(parameters, predicted, measured) bytes beside the weights."""
    with allocation_recorder.fakes():
        module, work, trains = made(kind, package, config, phase)
        count = sum(weight.numel() for weight in module.parameters())
        predicted = allocation_recorder.peak(forward_calls.trace(module, work, grad=trains))
    module, work, trains = made(kind, package, config, phase)
    with torch.set_grad_enabled(trains):
        for _ in range(2):  # the first fills tables that modules keep
            measured = allocation_recorder.record(work, weights=forward_calls.resident(module), fake=False)
    del module, work
    gc.collect()
    return count, predicted, allocation_recorder.peak(measured)


def runs() -> Iterator[tuple[str, str, int, int]]:
    """(flags, phase, predicted, measured) bytes of each run of the trainer."""
    from accelerate.state import AcceleratorState

    from backend.training.__main__ import main

    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOFT_DATA"] = folder
        for number, flags in enumerate(RUNS):
            AcceleratorState._reset_state(reset_partial_state=True)
            output = Path(folder) / f"run-{number}"
            (Path(folder) / "user" / "measured.json").unlink(missing_ok=True)  # what earlier runs taught
            with contextlib.redirect_stdout(sys.stderr):
                assert main([*COMMON, "--output_path", str(output), *shlex.split(flags)]) == 0, flags
            told = [json.loads(line) for line in (output / "events.jsonl").read_text(encoding="utf-8").splitlines()]
            phases = [event["phases"] for event in told if event["event"] == "memory" and "phases" in event][-1]
            for phase, (predicted, measured) in phases.items():
                yield flags, phase, predicted, measured


def print_runs() -> float:
    """Prints the table of the runs; the worst error."""
    worst = 0.0
    print("\n| a real run of the trainer | phase | predicted MiB | measured MiB | error |\n|---|---|---|---|---|")
    for flags, phase, predicted, measured in runs():
        error = predicted / measured - 1
        worst = max(worst, abs(error))
        print(f"| {flags} | {phase} | {predicted / 2**20:.2f} | {measured / 2**20:.2f} | {error:+.2%} |", flush=True)
    return worst


def print_networks(*, tiny: bool) -> float:
    """Prints the table of the networks; the worst error."""
    worst = 0.0
    print("| network | parameters | phase | predicted MiB | measured MiB | error |\n|---|---|---|---|---|---|")
    for case in cases(tiny):
        count, predicted, measured = peaks(*case)
        error = predicted / measured - 1
        worst = max(worst, abs(error))
        size = f"{count / 1e6:.0f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"
        print(
            f"| {case[0]} | {size} | {case[3]} | {predicted / 2**20:.2f} | {measured / 2**20:.2f} | {error:+.2%} |",
            flush=True,
        )
    return worst


def main() -> int:
    worst = 0.0 if "--runs" in sys.argv else print_networks(tiny="--tiny" in sys.argv)
    worst = max(worst, print_runs())
    print(f"worst: {worst:.2%}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
