"""What each way to need less memory saves and costs: `python benchmarks/training.py ladder` and `… optimizers`.

A Qwen-Image transformer of random weights with the true proportions of its blocks and a third of the width, the
starter's other parts. Every row is a process of its own: two steps, then one whose tensors are recorded, then two that
are timed.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
SET = PROJECT / "assets" / "datasets" / "character"
MIB = 2**20
DIT = "dit,text_encoder"
CHECKPOINTING, IN_RAM = "--use_gradient_checkpointing", "--use_gradient_checkpointing_offload"
AWAY, OPTIMIZER_AWAY = "--enable_model_cpu_offload", "--enable_optimizer_cpu_offload"
FP8, INT8, NF4 = ("--fp8_models", DIT), ("--quant_options", "dit:int8"), ("--quant_options", "dit:bitsandbytes_nf4")
RUNGS = {
    "none": (),
    "checkpointing": (CHECKPOINTING,),
    "checkpointing, its inputs in RAM": (IN_RAM,),
    "optimizer in RAM": (OPTIMIZER_AWAY,),
    "FP8 base": FP8,
    "int8 base": INT8,
    "nf4 base (bitsandbytes)": NF4,
    "model CPU offload": (AWAY,),
    "FP8 and checkpointing": (*FP8, CHECKPOINTING),
    "int8 and checkpointing": (*INT8, CHECKPOINTING),
    "nf4 and checkpointing": (*NF4, CHECKPOINTING),
    "model CPU offload and checkpointing": (AWAY, CHECKPOINTING),
    "int8, checkpointing, optimizer in RAM": (*INT8, CHECKPOINTING, OPTIMIZER_AWAY),
    "FP8, model CPU offload, checkpoints in RAM": (*FP8, AWAY, IN_RAM),
    "the same, and the optimizer in RAM": (*FP8, AWAY, IN_RAM, OPTIMIZER_AWAY),
}
FULL = ("--trainable_models", "dit")
OPTIMIZERS = {
    "AdamW, without checkpointing": (),
    "AdamW": (CHECKPOINTING,),
    "AdamW, checkpoints in RAM": (IN_RAM,),
    "AdamW, optimizer CPU offload": (CHECKPOINTING, OPTIMIZER_AWAY),
    "AdamW, checkpoints in RAM, optimizer CPU offload": (IN_RAM, OPTIMIZER_AWAY),
    "Adafactor": (CHECKPOINTING, "--customized_optimizer", "adafactor"),
    "Lion": (CHECKPOINTING, "--customized_optimizer", "lion"),
    "AdamW in 8 bits (bitsandbytes)": (CHECKPOINTING, "--customized_optimizer", "adamw8bit"),
}


def ladder(num_layers: int = 8, width: int = 1024) -> None:
    """A LoRA of rank 16 at 256 x 256, batch 4."""
    _table(RUNGS, num_layers, width, "--lora_rank", "16", "--batch_size", "4")


def optimizers(num_layers: int = 3, width: int = 1024) -> None:
    """Full training, where the optimizer's state outweighs everything else."""
    rows = {name: (*FULL, *flags) for name, flags in OPTIMIZERS.items()}
    _table(rows, num_layers, width, "--batch_size", "1")


def _table(rows: dict, num_layers: int, width: int, *common: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, count = make_model(Path(folder) / "model", num_layers, width)
        print(f"{count / 1e6:.0f} M parameters")
        print(
            "| | weights, MiB | optimizer | a step adds | together | peak RSS | CPU s/step | load "
            "|\n|---|---|---|---|---|---|---|---|"
        )
        for name, flags in rows.items():
            argv = [
                sys.executable,
                str(Path(__file__)),
                folder,
                "--model",
                str(model),
                "--max_pixels",
                str(256 * 256),
                *common,
                *flags,
            ]
            done = subprocess.run(
                argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(f"| {name} | {(done.stderr.strip().splitlines() or ['?'])[-1]} |", flush=True)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            sizes = [
                found["weights"],
                found["optimizer"],
                found["adds"],
                found["weights"] + found["optimizer"] + found["adds"],
                found["rss"],
            ]
            cells = [f"{value / MIB:.0f}" for value in sizes] + [f"{found['seconds']:.2f}", f"{os.getloadavg()[0]:.0f}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def make_model(folder: Path, num_layers: int, width: int) -> tuple[Path, int]:
    """The starter with a larger transformer of random weights, and how many numbers that has."""
    import torch
    from diffusers import QwenImageTransformer2DModel

    shutil.copytree(PROJECT / "assets" / "starter", folder, ignore=shutil.ignore_patterns("transformer"))
    text = json.loads((folder / "text_encoder" / "config.json").read_text())["text_config"]["hidden_size"]
    channels = json.loads((PROJECT / "assets" / "starter" / "transformer" / "config.json").read_text())
    torch.manual_seed(0)
    module = QwenImageTransformer2DModel(
        num_layers=num_layers,
        num_attention_heads=width // 128,
        joint_attention_dim=text,
        in_channels=channels["in_channels"],
        out_channels=channels["out_channels"],
    )
    module.to(torch.bfloat16).save_pretrained(folder / "transformer")
    return folder, sum(weight.numel() for weight in module.parameters())


def measure(folder: str, flags: list[str]) -> dict[str, float]:
    """Bytes of one step and its CPU seconds, for one row."""
    sys.path[:0] = [str(PROJECT), str(Path(__file__).parent)]
    import torch
    from training import make_run

    from backend.engine.devices import device_memory
    from backend.engine.tracing import allocation_recorder
    from backend.training import loop

    run = make_run(Path(folder), *flags)
    batch = loop._epochs(run)(0)[0]
    for _ in range(2):
        loop.train_step(run, [[batch]])
    device_memory.empty_cache("cpu")
    watched = device_memory.Peak("cpu")
    seconds = -time.process_time()
    for _ in range(2):
        loop.train_step(run, [[batch]])
    seconds += time.process_time()
    rss = watched.look()
    known = [
        thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)
    ]  # what was there before the step is not counted
    recorded = allocation_recorder.record(lambda _: loop.train_step(run, [[batch]]), weights=known, fake=False)
    weights = sum(_held(module) for module in run.learner.parts.values())
    states = sum(_bytes(optimizer.state_dict()["state"]) for optimizer in run.optimizers)
    beside = sum(copy.nbytes for copy in run.optimizer_offload.copies.values()) if run.optimizer_offload else 0
    away = (
        (states + beside, 0) if run.optimizer_offload else (0, states)
    )  # in RAM, though here that is where everything is
    return {
        "weights": weights,
        "optimizer": away[1],
        "adds": allocation_recorder.peak(recorded),
        "rss": rss,
        "seconds": seconds / 2,
    }


def _held(module) -> int:
    """Bytes of a part's weights: of a placed one those that wait or stay and its buffers, which the step's own tensors
    do not count."""
    from backend.engine.offload import placement

    placed = placement.of(module)
    if placed is None:
        kept = [*module.parameters(), *module.buffers(), *_factors(module)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())
    owned = [weight for weight in module.parameters() if weight.requires_grad]
    return sum(placed.held_bytes().values()) + sum(weight.nbytes for weight in owned)


def _factors(module) -> list:
    """What bitsandbytes keeps beside its 4-bit weights."""
    states = [weight.quant_state for weight in module.parameters() if getattr(weight, "quant_state", None) is not None]
    return [value for state in states for value in vars(state).values() if hasattr(value, "untyped_storage")]


def _bytes(value) -> int:
    from backend.training.checkpoint.async_writer import nbytes

    return nbytes(value)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2:])))
