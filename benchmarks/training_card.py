"""What a step of the trainer holds on a card, counted without one: `python benchmarks/training.py card` prints the
ladder's table, and what the plan says.

Every row is the trainer itself, put together and stepped twice on the device of `fake_card.py`.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from pathlib import Path

from training_ladder import FULL, OPTIMIZERS, RUNGS, SET, make_model

STEPS = 2  # the optimizer's state comes in the first
SIDES = (256, 1024)
MIB = 2**20


def tables() -> None:
    """All rows of both tables, at two sizes: MiB on the card at once, beside them what the plan says."""
    from fake_card import appear

    appear()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["LOFT_DATA"] = str(folder)
        model, count = make_model(folder / "lora", 8, 1024)
        trace(model, folder)
        common = ("--lora_rank", "16", "--batch_size", "4")
        _table(f"LoRA, {count / 1e6:.0f} M", model, {name: (*common, *flags) for name, flags in RUNGS.items()}, folder)
        model, count = make_model(folder / "whole", 3, 1024)
        rows = {name: ("--batch_size", "1", *FULL, *flags) for name, flags in OPTIMIZERS.items()}
        _table(f"whole parts, {count / 1e6:.0f} M", model, rows, folder)


def _table(title: str, model: Path, rows: dict, folder: Path) -> None:
    print(
        f"\n| {title} | "
        + " | ".join(f"{side} x {side} | plan" for side in SIDES)
        + " |\n|"
        + "---|" * (1 + 2 * len(SIDES))
    )
    for name, flags in rows.items():
        cells = []
        for side in SIDES:
            size = ("--height", str(side), "--width", str(side))
            try:
                found = measure(folder, ["--model", str(model), "--dataset_base_path", str(SET), *size, *flags])
                cells += [f"{found['card'] / MIB:.0f}", f"{found['planned'] / found['card'] - 1:+.1%}"]
            except Exception as error:
                cells += [f"{type(error).__name__}: {str(error)[:120]}", "-"]
            gc.collect()
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def measure(folder: Path, flags: list[str]) -> dict[str, int]:
    """Most bytes on the card at once over a few steps, what is there between two steps, and what the plan of the same
    run says of its steps."""
    from fake_card import card

    with card() as counted:
        import torch
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, PartialState

        from backend.schema.settings import from_flags
        from backend.schema.training.config import TrainingConfig
        from backend.training import loop
        from backend.training.checkpoint.reporter import Reporter
        from backend.training.setup import set_up

        AcceleratorState._reset_state(reset_partial_state=True)
        config = from_flags(TrainingConfig, flags)
        accelerator = Accelerator(cpu=True, mixed_precision=config.training.mixed_precision)
        PartialState().device = accelerator.state.device = torch.device(
            "cuda:0"
        )  # what later states begin from: autocast asks one for its device
        run = set_up(config, folder, folder, accelerator, Reporter(folder, silent=True), index=folder / "index.json")
        batch = loop._epochs(run)(0)[0]
        counted.highest = counted.now
        for _ in range(STEPS):
            loop.train_step(run, [[batch]])
        spec, texts = run.base.spec, run.source.load_batch(batch, scale=1.0).encodings
        longest = max(one["embeds"].shape[0] for one in texts)
    return {
        "card": counted.highest,
        "between": counted.now,
        "planned": planned(config, spec, folder, text_tokens=longest),
    }


def planned(config, spec, folder: Path, **known) -> int:
    """Bytes alive in a step, by the plan's arithmetic; `known`: what the run has found out."""
    from backend.planner.costs.model_sizes import sizes_of
    from backend.planner.costs.phase_costs import Fixed
    from backend.planner.predict_peak import run_bytes

    moments = run_bytes(config, sizes_of(spec, folder=folder / "memory"), Fixed(), **known)
    return max(moments[name] for name in ("forward", "backward", "optimizer"))


def trace(model: Path, folder: Path) -> None:
    """The plan's table for a transformer that no shipped table knows."""
    from backend.engine.tracing.trace import published, table, write

    said = json.loads((model / "transformer" / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in said.items() if not key.startswith("_")}
    (folder / "memory").mkdir(parents=True, exist_ok=True)
    write(
        folder / "memory" / "ladder.json",
        [table("diffusers:QwenImageTransformer2DModel", config, facts=published()["networks"])],
    )
