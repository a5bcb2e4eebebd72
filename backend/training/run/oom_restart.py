"""Restart after running out of memory (OOM): the same run with the next memory fallback, from its last checkpoint."""

from __future__ import annotations

import os
import sys

from backend.schema.messages import Trouble
from backend.schema.training.config import TrainingConfig
from backend.training.checkpoint.reporter import Reporter

BEFORE = (
    "loading",
    "caching",
)  # phases before anything trains: there is nothing to be gained from how steps are computed


def next_fallback(config: TrainingConfig, phase: str = "training") -> tuple[list[str], str] | None:
    """Flags that need less memory than `config` in `phase`, and a sentence; None at the foot of the ladder.

    Only what leaves the result as it is, or (FP8) nearly so: never the pictures' size, the batch or the rank.
    """
    rungs = _fallbacks_before_training(config) if phase in BEFORE else _fallbacks(config)
    return next(((flags, sentence) for possible, flags, sentence in rungs if possible), None)


def _fallbacks_before_training(config: TrainingConfig) -> list[tuple[bool, list[str], str]]:
    """Of loading and encoding: what frozen weights take."""
    whole = config.model.quant_options or config.lora.lora_algorithm == "dora"  # weights that must be there in full
    away = not config.memory.enable_model_cpu_offload and not whole
    eight = [rung for rung in _fallbacks(config) if "--fp8_models" in rung[1]]
    return [
        (away, ["--enable_model_cpu_offload"], "keeping frozen weights away from the device until they compute"),
        *eight,
    ]


def _fallbacks(config: TrainingConfig) -> list[tuple[bool, list[str], str]]:
    """All rungs from the cheapest down: whether it is still to be taken here, its flags, and what it is called."""
    memory, model, part = config.memory, config.model, config.adapter_part
    checkpointing = memory.use_gradient_checkpointing or memory.use_gradient_checkpointing_offload
    on_ram = not memory.enable_optimizer_cpu_offload and config.training.mixed_precision != "fp16"
    frozen = (
        part is not None and config.lora.lora_algorithm != "dora"
    )  # the base of an adapter that needs no weights in full
    in_eight = model.fp8_models or model.quant_options or part in config.trained_parts
    return [
        (not checkpointing, ["--use_gradient_checkpointing"], "computing activations again instead of keeping them"),
        (
            not memory.use_gradient_checkpointing_offload,
            ["--use_gradient_checkpointing_offload"],
            "keeping what activations begin from in RAM",
        ),
        (
            bool(config.trained_parts) and on_ram and _has_card(),
            ["--enable_optimizer_cpu_offload"],
            "keeping the optimizer in RAM",
        ),
        (bool(memory.resident_blocks), ["--resident_blocks", "0"], "keeping none of the fetched blocks on the device"),
        (frozen and not in_eight, ["--fp8_models", f"{part}"], f"storing {part} in FP8"),
        (
            frozen and not memory.enable_model_cpu_offload and not model.quant_options,
            ["--enable_model_cpu_offload"],
            "keeping frozen weights in RAM",
        ),
    ]


def _has_card() -> bool:
    import torch

    return torch.accelerator.is_available()


def out_of_memory(config: TrainingConfig, phase: str = "training") -> Trouble:
    """The sentence where no process can be started anew, or nothing is left to try."""
    found = next_fallback(config, phase)
    hint = f"Add {' '.join(found[0])}." if found else "Lower --max_pixels, --batch_size or --lora_rank."
    return Trouble("out_of_memory", "The memory of the device is not enough for this run.", hint=hint)


def restart_with_fallback(config: TrainingConfig, argv: list[str], reporter: Reporter) -> None:
    """Replaces this process by one that is a rung lower and goes on from the last state. Returns only where that cannot
    be."""
    found = next_fallback(config, reporter.now)
    if found is None or sys.platform == "win32" or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    flags, sentence = found
    reporter.note(f"Memory ran out; going on from the last state by {sentence}.", flags=flags)
    sys.stdout.flush()
    sys.stderr.flush()
    again = [*argv, *flags, "--resume_from_checkpoint", "latest"]
    os.execv(sys.executable, [sys.executable, "-m", "backend.training", *again])
