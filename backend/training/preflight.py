"""A try before hours are spent: one step at the largest size, one sample, one save, and what each took. It changes nothing."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from backend.engine import memory
from backend.training.batches import Batch
from backend.training.checkpoint import State, random_state, save_result, save_state, set_random_state
from backend.training.loop import one_step
from backend.training.optimizers import set_rates
from backend.training.progress import draw_samples
from backend.training.results import result_tensors
from backend.training.run import Run


def preflight(run: Run) -> dict[str, int]:
    """Peak bytes of "step", "sample" and "save": of the card where there is one, else of this process. All are also events."""
    state = random_state()
    peaks = {"step": _peak(run, lambda: _largest_step(run)), "save": _peak(run, lambda: _save(run))}
    if run.config.samples.sample_prompts.strip():
        peaks["sample"] = _peak(run, lambda: draw_samples(run, 0))
    for optimizer in run.optimizers:
        optimizer.state.clear()
    set_random_state(state)
    run.reporter.event("memory", phase="preflight", **{f"{name}_bytes": value for name, value in peaks.items()})
    run.reporter.say("Peaks: " + ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in peaks.items()))
    return peaks


def _largest_step(run: Run) -> None:
    """A real step with a rate of 0, so that the optimizer takes the memory that it will take."""
    number = max(range(len(run.source.items)), key=run.source.pixels)
    count = run.config.training.batch_size
    batch = Batch(items=(number,) * count, places=tuple(range(count)))
    set_rates(run.optimizers, 0.0)
    one_step(run, [[batch] * run.accelerator.num_processes])


def _save(run: Run) -> None:
    if not run.first:
        return
    folder = Path(tempfile.mkdtemp(prefix=".preflight-", dir=run.folder))
    try:
        save_result(folder / "result.safetensors", result_tensors(run), {})
        states = [optimizer.state_dict() for optimizer in run.optimizers]
        save_state(folder, State(step=0, weights=run.weights, optimizers=states, random=[random_state()]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _peak(run: Run, work: Callable[[], None]) -> int:
    """The highest memory while `work` runs: counted by the allocator on a card, watched every few milliseconds on a CPU."""
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
        work()
        return torch.cuda.max_memory_reserved(run.device)
    with _Watch(run.device) as watch:
        work()
    return watch.peak.look()


class _Watch:
    """The highest memory while it is open, for systems that do not keep count themselves looked up every few milliseconds."""

    def __init__(self, device: torch.device):
        self.peak, self.open = memory.Peak(device), True
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self.thread.start()
        return self

    def _look(self) -> None:
        while self.open:
            self.peak.look()
            time.sleep(0.02)

    def __exit__(self, *error) -> None:
        self.open = False
        self.thread.join()
