"""Some steps of training the starter in each way to save memory, and one run that is killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

from backend.engine.devices import device_memory
from backend.schema.paths import ASSETS
from tests.gpu.runner import ROOT, Outcome

NEAR = 1e-3  # of losses; rounded weights may differ more
NEAR_FP8 = 0.1
STEADY_STEP, STEADY_BYTES = 3, 1 << 20  # from that step on no more memory is held
RESUMING_SECONDS = 40
WAYS = {
    "plain": (),
    "checkpointing": ("--use_gradient_checkpointing",),
    "checkpoints in RAM": ("--use_gradient_checkpointing_offload",),
    "weights in RAM": ("--enable_model_cpu_offload",),
    "weights on disk": ("--enable_model_cpu_offload", "--offload_device", "disk"),
    "FP8": ("--fp8_models", "dit"),
    "optimizer in RAM": ("--enable_optimizer_cpu_offload",),
}
EXACT = (
    "checkpoints in RAM",
    "weights in RAM",
    "weights on disk",
    "resumed",
)  # to the bit, with deterministic algorithms
BELOW = ("checkpointing", "checkpoints in RAM", "weights in RAM", "weights on disk")  # plain training's peak
TINY_WAYS = ("plain", "checkpoints in RAM", "weights on disk")


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    peak_bytes: int
    growth_bytes: int
    seconds: float


def training(device: torch.device, tiny: bool) -> Outcome:
    steps, found = 3 if tiny else 20, {}
    with tempfile.TemporaryDirectory() as folder:
        flags = _flags(Path(folder), steps, device, tiny)
        for name in TINY_WAYS if tiny else WAYS:
            found[name] = _trained([*flags, *WAYS[name]], Path(folder) / name.replace(" ", "_"), device)
        resumed = _resumed(flags, Path(folder) / "resumed", device, tiny)
    off = {name: _off(one.losses, found["plain"].losses) for name, one in found.items()}
    off["resumed"] = _off(resumed, found["plain"].losses)
    measured = {
        "loss": found["plain"].losses[-1],
        "losses off": off,
        "peak MiB": {name: one.peak_bytes / 2**20 for name, one in found.items()},
        "growth bytes": {name: one.growth_bytes for name, one in found.items()},
        "seconds": {name: one.seconds for name, one in found.items()},
    }
    wrong = _wrong(found, off, steps, counted=not device_memory.is_ram(device))
    return Outcome(not wrong, measured, "; ".join(wrong))


def _wrong(found: dict[str, Trained], off: dict[str, float], steps: int, *, counted: bool) -> list[str]:
    """`counted`: whether the device's memory is; a process's own says nothing."""
    most = {name: 0.0 if name in EXACT else NEAR_FP8 if name == "FP8" else NEAR for name in off}
    wrong = [f"losses of {name} are {value:.2g} off" for name, value in off.items() if not value <= most[name]]
    wrong += [
        f"{name} made {len(one.losses)} of {steps} steps" for name, one in found.items() if len(one.losses) != steps
    ]
    if counted:
        plain = found["plain"].peak_bytes
        wrong += [
            f"the peak of {name} is no less" for name in BELOW if name in found and found[name].peak_bytes >= plain
        ]
        wrong += [f"{name} grows" for name, one in found.items() if one.growth_bytes > STEADY_BYTES]
    return wrong


def _off(losses: Sequence[float], plain: Sequence[float]) -> float:
    """The largest difference, of steps that both have; infinite where there is none."""
    pairs = list(zip(losses[::-1], plain[::-1]))
    return max((abs(one - other) for one, other in pairs), default=float("inf"))


def _flags(folder: Path, steps: int, device: torch.device, tiny: bool) -> list[str]:
    side = 64 if tiny else 512
    pictures = folder / "pictures"
    pictures.mkdir()
    for number in range(4):
        picture = Image.linear_gradient("L").resize((side, side)).convert("RGB")
        ImageDraw.Draw(picture).ellipse((8, 8, 40 + number, 40), fill=(50 * number, 90, 200 - 30 * number))
        picture.save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text(f"a ball, number {number}", encoding="utf-8")
    named = ["--model", str(ASSETS / "starter"), "--dataset_base_path", str(pictures), "--deterministic"]
    sizes = ["--max_pixels", str(side**2), "--lora_rank", "4", "--learning_rate", "1e-3", "--max_steps", str(steps)]
    if device.type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    return [*named, *sizes, "--dataset_repeat", str(steps)]


def _trained(flags: Sequence[str], run: Path, device: torch.device) -> Trained:
    """A run in this process."""
    from accelerate.state import AcceleratorState

    from backend.training import loop
    from backend.training.__main__ import main

    AcceleratorState._reset_state(reset_partial_state=True)
    held, train_step, began = [], loop.train_step, time.monotonic()

    def step(*given):
        found = train_step(*given)
        held.append(device_memory.allocated(device))
        return found

    device_memory.empty_cache(device)
    peak = device_memory.Peak(device)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "train_step", step)
        status = main([*flags, "--output_path", str(run)])
    if status != 0:
        raise RuntimeError(f"training ended with {status}: {_last(run)}")
    growth = held[-1] - held[min(STEADY_STEP, len(held)) - 1]
    return Trained(_losses(run), peak.look(), growth, time.monotonic() - began)


def _resumed(flags: Sequence[str], run: Path, device: torch.device, tiny: bool) -> list[float]:
    """Losses of the steps after the last state of a run that was killed."""
    saving = [*flags, "--save_steps", "1" if tiny else "5", "--output_path", str(run), "--keep_checkpoints", "99"]
    if tiny:
        _trained(saving, run, device)
        for state in sorted((run / "checkpoints").iterdir())[1:]:  # as if killed after the first
            shutil.rmtree(state)
    else:
        _killed(saving, run)
    before = len(_losses(run))
    _trained([*saving, "--resume_from_checkpoint", "latest"], run, device)
    return _losses(run)[before:]


def _killed(flags: Sequence[str], run: Path) -> None:
    """A process that is killed when its first state is there."""
    child = subprocess.Popen([sys.executable, "-m", "backend.training", *flags], cwd=ROOT)
    until = time.monotonic() + RESUMING_SECONDS
    try:
        while not any((run / "checkpoints").glob("step-*/state.json")):
            if child.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the run to be killed saved no state: {_last(run)}")
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()


def _events(run: Path) -> list[dict]:
    path = run / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _losses(run: Path) -> list[float]:
    return [event["loss"] for event in _events(run) if event.get("event") == "step"]


def _last(run: Path) -> str:
    found = _events(run)
    return json.dumps(found[-1])[:300] if found else "it said nothing"
