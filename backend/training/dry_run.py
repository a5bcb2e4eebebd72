"""Preflight (dry run): one step on the largest batch, one sample, one save, and the peak memory of each. Changes
nothing."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from backend.dataset.bucket_sampler import Batch
from backend.training.checkpoint.state import TrainingState, random_state, save_exported, save_state, set_random_state
from backend.training.encoding.peak_meter import STEP
from backend.training.loop import train_step
from backend.training.optim.optimizers import set_rates
from backend.training.run.evaluation import draw_samples
from backend.training.run.export import exported_tensors
from backend.training.run.peak_report import is_known, predicted_by
from backend.training.run.state import Run


def preflight(run: Run) -> dict[str, int]:
    """Peak bytes of live tensors on the device: of a step's "forward", "backward" and "optimizer", of "step", "save"
    and "sample". All are also an event, beside what was predicted."""
    state = random_state()
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    values = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    _largest_step(run)
    _save(run)
    if run.config.samples.sample_prompts.strip():
        draw_samples(run, 0)
    for optimizer in run.optimizers:
        optimizer.state.clear()
    for group, before in zip(groups, values, strict=True):  # Prodigy keeps what it has learnt of the rate there
        params = group["params"]
        group.clear()
        group.update(before, params=params)
    set_random_state(state)
    peaks = run.peaks.by_phase
    peaks |= {"step": max(peaks[name] for name in STEP)} if run.is_main_process else {}
    predicted = predicted_by(run) if run.is_main_process and is_known(run) else {}
    measured = {f"{name}_bytes": value for name, value in peaks.items()}
    run.reporter.event("memory", phase="preflight", **measured, predicted=predicted)
    run.reporter.say(
        "Peaks: " + ", ".join(f"{name} {_words(value, predicted.get(name))}" for name, value in peaks.items())
    )
    return peaks


def _words(nbytes: int, predicted: int | None) -> str:
    return f"{nbytes / 2**20:.1f} MiB" + (f" (predicted {predicted / 2**20:.1f})" if predicted else "")


def _largest_step(run: Run) -> None:
    """Two real steps with a rate of 0: the first makes what the optimizer keeps, the second has it from its start."""
    number = max(range(len(run.source.items)), key=run.source.pixels)
    count = run.config.training.batch_size
    batch = Batch(items=(number,) * count, places=tuple(range(count)))
    set_rates(run.optimizers, 0.0)
    groups: list[list[Batch]] = [[batch] * run.accelerator.num_processes]
    for _ in range(2):
        with run.peaks.step(groups):
            train_step(run, groups)


def _save(run: Run) -> None:
    if not run.is_main_process:
        return
    folder = Path(tempfile.mkdtemp(prefix=".preflight-", dir=run.folder))
    try:
        with run.peaks.save():
            save_exported(folder / "result.safetensors", exported_tensors(run), {})
        states = [optimizer.state_dict() for optimizer in run.optimizers]
        save_state(folder, TrainingState(step=0, weights=run.weights, optimizers=states, random=[random_state()]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
