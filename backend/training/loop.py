"""The training loop: gradient accumulation, gradient clipping, NaN/Inf check, optimizer step, EMA, saving, validation.

Steps are optimizer steps; everything in one follows from its number.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from backend.dataset.bucket_sampler import Batch, epoch_batches, of_step, steps_of_epoch
from backend.schema.messages import Trouble
from backend.training.checkpoint.state import clear_leftovers
from backend.training.encoding.peak_meter import BACKWARD, FORWARD, OPTIMIZER
from backend.training.model import fsdp
from backend.training.model.flow_matching_loss import seed_of
from backend.training.optim.optimizers import rate_factor, set_rates
from backend.training.run.evaluation import draw_samples, memory, validation_loss
from backend.training.run.peak_report import keep, library_bytes, tell
from backend.training.run.resume import restore
from backend.training.run.save import save
from backend.training.run.state import Run, sum_over_processes

MAX_NONFINITE_STEPS = 5  # in a row, after which a run ends


@dataclass
class RunLength:
    """How long a run is: optimizer steps in all and in an epoch."""

    total: int
    per_epoch: int

    def epoch_of(self, step: int) -> int:
        return step // self.per_epoch


def train(run: Run) -> str:
    """Trains to the end, or until asked to stop. Returns "complete" or "stopped". However it ends, what is being saved
    is saved first."""
    try:
        return _train(run)
    except BaseException:
        _finish_saving(run)
        raise


def _finish_saving(run: Run) -> None:
    """Waits for the save in progress when the run ends by something else, which must not be hidden by its failure."""
    try:
        run.writer.finish()
    except Trouble as trouble:
        run.reporter.trouble(trouble)


def _train(run: Run) -> str:
    pace = run_length(run)
    if run.accelerator.process_index:  # dropout is to differ between processes
        torch.manual_seed(seed_of(run.config.training.seed, run.accelerator.process_index, "dropout"))
    start = restore(run, pace.total)
    if run.is_main_process:
        clear_leftovers(run.folder, run.output)
    stop = Stop(run)
    batches_of = _epochs(run)
    run.reporter.phase("training")
    if start == 0:
        draw_samples(run, 0)
    bad, owed = 0, False
    for step in range(start, pace.total):
        began = time.monotonic()
        epoch = pace.epoch_of(step)
        rate = set_rates(run.optimizers, partial(rate_factor, step, pace.total, run.config.training))
        groups = of_step(
            batches_of(epoch), step % pace.per_epoch, processes=_processes(run), accumulation=_accumulation_steps(run)
        )
        with run.peaks.step(groups):
            loss = train_step(run, groups)
        skipped = loss is None
        bad = 0 if not skipped or _is_lowering_loss_scale(run) else bad + 1
        _check_finite(run, bad, step)
        if loss is not None and run.ema:
            run.ema.update(step + 1)
        if loss is not None:
            run.reporter.step(
                step=step + 1,
                total_steps=pace.total,
                epoch=epoch + 1,
                loss=loss,
                learning_rate=rate,
                seconds=time.monotonic() - began,
            )
        asked = stop()
        owed = after_step(run, step + 1, pace, asked=asked, bad=skipped, owed=owed)
        if asked:
            return "complete" if step + 1 == pace.total else "stopped"
    return "complete"


def run_length(run: Run) -> RunLength:
    count = len(_epochs(run)(0))
    per_epoch = steps_of_epoch(count, processes=_processes(run), accumulation=_accumulation_steps(run))
    return RunLength(
        total=run.config.training.max_steps or run.config.training.num_epochs * per_epoch, per_epoch=per_epoch
    )


def _processes(run: Run) -> int:
    return run.accelerator.num_processes


def _accumulation_steps(run: Run) -> int:
    return run.config.training.gradient_accumulation_steps


def _epochs(run: Run) -> Callable[[int], list[Batch]]:
    """The batches of an epoch; the last one asked for is remembered."""
    known: dict[int, list[Batch]] = {}
    config = run.config

    def batches(epoch: int) -> list[Batch]:
        if epoch not in known:
            known.clear()
            known[epoch] = epoch_batches(
                run.source.items,
                run.source.shapes,
                batch_size=config.training.batch_size,
                repeat=config.dataset.dataset_repeat,
                prior_share=config.prior.prior_share,
                seed=config.training.seed,
                epoch=epoch,
            )
        return known[epoch]

    return batches


def train_step(run: Run, groups: list[list[Batch]]) -> float | None:
    """One optimizer step over `groups` [accumulation][process]: the mean loss of its samples, or None where the
    gradient norm is NaN or Inf (the step is then skipped).

    What the save before it failed by is raised here, and the step is then not made.

    The gradient is that of the mean over all samples of the step, however they are spread over batches and processes.
    """
    accelerator, model = run.accelerator, run.model
    count = sum(len(batch.items) for group in groups for batch in group)
    errors = torch.zeros((), device=run.device)
    for turn, group in enumerate(groups):
        batch = group[accelerator.process_index]
        inputs = run.source.load_batch(batch, scale=_processes(run) / count).to(run.device)
        run.peaks.moment(FORWARD)
        with accelerator.no_sync(model) if turn + 1 < len(groups) else contextlib.nullcontext():
            loss, each = model(inputs, run.config.loss)
            run.peaks.moment(BACKWARD)
            accelerator.backward(loss)
        errors += each.sum()
    run.peaks.moment(OPTIMIZER)
    accelerator.unscale_gradients()
    norm = torch.nn.utils.clip_grad_norm_(list(run.weights.values()), run.config.training.max_grad_norm or float("inf"))
    good = math.isfinite(fsdp.number(norm))
    # What is being saved is what this step begins from: nothing changes, and nothing is made, before it is on the disk
    run.writer.wait()
    if run.optimizer_offload:
        run.optimizer_offload.step(run.optimizers, good=good)
    elif good or accelerator.scaler is not None:  # a scaler skips the step itself, and lowers its scale
        for optimizer in run.optimizers:
            optimizer.step()
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if _processes(run) > 1:
        errors = sum_over_processes(accelerator, errors)
    return float(errors) / count if good else None


def _is_lowering_loss_scale(run: Run) -> bool:
    """Whether fp16's GradScaler is still lowering its loss scale: skipped steps are normal while it does."""
    scaler = run.accelerator.scaler
    lowering = scaler is not None and scaler.get_scale() >= 1
    if scaler is not None and lowering:
        run.reporter.note(
            f"A step was skipped: its fp16 gradients overflowed, and the loss scale is now {scaler.get_scale():g}."
        )
    return lowering


def _check_finite(run: Run, bad: int, step: int) -> None:
    if bad:
        run.reporter.note(f"Step {step + 1}: the gradient norm is NaN or Inf; the step was skipped.", step=step + 1)
    if bad >= MAX_NONFINITE_STEPS:
        raise Trouble(
            "not_finite",
            f"The gradient norm was NaN or Inf {bad} steps in a row, up to step {step + 1}; the run ends here.",
            hint=(
                "Lower the learning rate, or compute in bf16. If the newest checkpoint gives NaN too, resume from the "
                "one before it."
            ),
        )


def after_step(run: Run, step: int, pace: RunLength, *, asked: bool, bad: bool, owed: bool) -> bool:
    """Saves, draws and measures what is due after `step`. After a `bad` one (gradient norm NaN or Inf) saving waits
    (the answer: it is `owed`): states that may be worthless are not to push out the good ones."""
    config = run.config
    last = step == pace.total
    due = owed or step % (config.output.save_steps or pace.per_epoch) == 0
    if due and bad and not (asked or last):
        return True
    by_epoch = due and not config.output.save_steps
    every = config.samples.sample_every
    draws = (every and step % every == 0) or (not every and due) or last
    if (
        draws and not asked
    ):  # before saving, as a result carries the newest picture; whoever wants to end is not kept waiting
        draw_samples(run, step)
    if due or asked or last:
        epoch = step // pace.per_epoch
        save(run, f"epoch-{epoch - 1}" if by_epoch else f"step-{step}", step=step, epoch=epoch, wait=asked or last)
    if draws and asked:
        draw_samples(run, step)
    if run.validation_items and (step % config.samples.validation_every == 0 or last):
        run.reporter.event("validation", step=step, loss=validation_loss(run))
    if step in (1, 10):
        run.reporter.event("memory", **memory(), **library_bytes(run))
    if due or asked or last:
        keep(run)
    if asked or last:
        tell(run)
    return False


class Stop:
    """Whether the run was asked to end: by the file `stop` in its folder, or by a signal. All processes agree."""

    def __init__(self, run: Run):
        self.run, self.signalled = run, False
        for name in ("SIGTERM", "SIGINT"):
            signal.signal(getattr(signal, name), self._on_signal)

    def _on_signal(self, number, frame) -> None:
        self.signalled = True

    def __call__(self) -> bool:
        asked = self.signalled or (self.run.folder / "stop").exists()
        if _processes(self.run) == 1:
            return asked
        total = sum_over_processes(self.run.accelerator, torch.tensor(float(asked), device=self.run.device))
        return bool(total > 0)
