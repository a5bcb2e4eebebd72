"""The loop, from top to bottom. Steps are optimizer steps; everything in one follows from its number."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.schema.knobs import to_values
from backend.schema.messages import Trouble
from backend.training.batches import Batch, epoch_batches, of_step, steps_of_epoch
from backend.training.captions import lines_of
from backend.training.checkpoint import State, prune_states, random_state, save_result, save_state
from backend.training.optimizers import rate_factor, set_rates
from backend.training.results import result_metadata, result_tensors
from backend.training.resume import restore
from backend.training.run import Run, gather
from backend.training.samples import EMPTY, draw_latents, drawing, save_sample

MOST_BAD_STEPS = 5  # in a row, after which a run ends


@dataclass
class Pace:
    """How long a run is: optimizer steps in all and in an epoch."""

    total: int
    per_epoch: int

    def epoch_of(self, step: int) -> int:
        return step // self.per_epoch


def train(run: Run) -> str:
    """Trains to the end, or until asked to stop. Returns "complete" or "stopped"."""
    pace = pace_of(run)
    start = restore(run, pace.total)
    stop = Stop(run)
    batches_of = _epochs(run)
    run.reporter.phase("training")
    if start == 0:
        draw_samples(run, 0)
    bad = 0
    for step in range(start, pace.total):
        began = time.monotonic()
        epoch = pace.epoch_of(step)
        rate = set_rates(run.optimizers, rate_factor(step, pace.total, run.config.training))
        groups = of_step(batches_of(epoch), step % pace.per_epoch, processes=_processes(run), accumulation=_turns(run))
        loss = one_step(run, groups)
        bad = 0 if loss is not None else bad + 1
        _check_bad(run, bad, step)
        if loss is not None and run.mean:
            run.mean.update(step + 1)
        if loss is not None:
            run.reporter.step(step=step + 1, total_steps=pace.total, epoch=epoch + 1, loss=loss, learning_rate=rate,
                              seconds=time.monotonic() - began)  # fmt: skip
        asked = stop()
        after_step(run, step + 1, pace, asked=asked)
        if asked:
            return "complete" if step + 1 == pace.total else "stopped"
    return "complete"


def pace_of(run: Run) -> Pace:
    count = len(_epochs(run)(0))
    per_epoch = steps_of_epoch(count, processes=_processes(run), accumulation=_turns(run))
    return Pace(total=run.config.training.max_steps or run.config.training.num_epochs * per_epoch, per_epoch=per_epoch)


def _processes(run: Run) -> int:
    return run.accelerator.num_processes


def _turns(run: Run) -> int:
    return run.config.training.gradient_accumulation_steps


def _epochs(run: Run) -> Callable[[int], list[Batch]]:
    """The batches of an epoch; the last one asked for is remembered."""
    known: dict[int, list[Batch]] = {}
    config = run.config

    def batches(epoch: int) -> list[Batch]:
        if epoch not in known:
            known.clear()
            known[epoch] = epoch_batches(
                run.source.items, run.source.sizes, batch_size=config.training.batch_size,
                repeat=config.dataset.dataset_repeat, prior_share=config.prior.prior_share, seed=config.training.seed,
                epoch=epoch,
            )  # fmt: skip
        return known[epoch]

    return batches


def one_step(run: Run, groups: list[list[Batch]]) -> float | None:
    """One optimizer step over `groups` [accumulation][process]: the mean error of its samples, or None where it was no number.

    The gradient is that of the mean over all samples of the step, however they are spread over batches and processes.
    """
    accelerator, model = run.accelerator, run.model
    count = sum(len(batch.items) for group in groups for batch in group)
    errors = torch.zeros((), device=run.device)
    for turn, group in enumerate(groups):
        batch = group[accelerator.process_index]
        material = run.source.material(batch, scale=_processes(run) / count).to(run.device)
        if turn + 1 < len(groups):
            with accelerator.no_sync(model):
                loss, each = model(material, run.config.loss)
                accelerator.backward(loss)
        else:
            loss, each = model(material, run.config.loss)
            accelerator.backward(loss)
        errors += each.sum()
    norm = accelerator.clip_grad_norm_(list(run.weights.values()), run.config.training.max_grad_norm or float("inf"))
    good = bool(torch.isfinite(torch.as_tensor(float(norm))))
    if run.beside:
        run.beside.bring_gradients()
    if good or accelerator.scaler is not None:  # a scaler skips the step itself, and lowers its scale
        for optimizer in run.optimizers:
            optimizer.step()
        if run.beside:
            run.beside.return_weights()
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if _processes(run) > 1:
        errors = accelerator.reduce(errors, reduction="sum")
    return float(errors) / count if good else None


def _check_bad(run: Run, bad: int, step: int) -> None:
    if bad:
        run.reporter.note(f"Step {step + 1} gave no number and was left out.", step=step + 1)
    if bad >= MOST_BAD_STEPS:
        raise Trouble(
            "not_finite", f"The loss was no number {bad} steps in a row, at step {step + 1}; the run ends here.",
            hint="Lower the learning rate, or compute in bf16. The last state saved is good.",
        )  # fmt: skip


def after_step(run: Run, step: int, pace: Pace, *, asked: bool) -> None:
    """Saves, draws and measures what is due after `step`."""
    config = run.config
    last = step == pace.total
    if config.output.save_steps:
        due = step % config.output.save_steps == 0
    else:
        due = step % pace.per_epoch == 0
    if due or asked or last:
        save(run, step, pace, needed=asked or last)
    every = config.samples.sample_every
    if (every and step % every == 0) or (not every and due) or last:
        draw_samples(run, step)
    if run.aside and (step % config.samples.validation_every == 0 or last):
        run.reporter.event("validation", step=step, loss=validation_loss(run))
    if step in (1, 10):
        run.reporter.event("memory", **memory())


def save(run: Run, step: int, pace: Pace, *, needed: bool) -> None:
    """The result, then the full state: a run that dies between the two makes the result again.

    A full disk does not end a run that goes on: it is said, and the next save may find room. It does where this was `needed`.
    """
    run.reporter.phase("saving")
    states = gather(run.accelerator, random_state())
    try:
        if run.first:
            _save_here(run, step, pace, states)
    except Trouble as trouble:
        if trouble.kind != "disk_full" or needed:
            raise
        run.reporter.trouble(trouble)
    run.accelerator.wait_for_everyone()
    run.reporter.phase("training", 1, 1)


def _save_here(run: Run, step: int, pace: Pace, states: list[dict]) -> None:
    by_epoch = not run.config.output.save_steps and step % pace.per_epoch == 0
    name = f"epoch-{step // pace.per_epoch - 1}" if by_epoch else f"step-{step}"
    if run.mean:
        run.mean.swap()
    try:
        tensors = result_tensors(run)
    finally:
        if run.mean:
            run.mean.swap()
    metadata = result_metadata(run, step=step, epoch=step // pace.per_epoch)
    path = save_result(run.output / f"{name}.safetensors", tensors, metadata)
    run.reporter.event("saved", path=str(path), step=step)
    state = State(
        step=step, weights=run.weights, optimizers=[optimizer.state_dict() for optimizer in run.optimizers],
        mean=run.mean.values if run.mean else None,
        scaler=run.accelerator.scaler.state_dict() if run.accelerator.scaler else None, random=states, facts=facts(run),
    )  # fmt: skip
    path = save_state(run.folder, state)
    prune_states(run.folder, keep=run.config.output.keep_checkpoints, keep_every=run.config.output.keep_every)
    run.reporter.event("checkpoint", step=step, path=str(path))


def facts(run: Run) -> dict:
    """What the order of samples and the meaning of a state depend on."""
    from backend.training.cache import key_of

    pictures = key_of(*[f"{item.digest}|{item.captions}|{item.weight}" for item in run.source.items])
    return {"config": to_values(run.config), "processes": _processes(run), "pictures": pictures}


def draw_samples(run: Run, step: int) -> None:
    """Draws the sample prompts by the first process, with the running mean's weights where there is one."""
    prompts = lines_of(run.config.samples.sample_prompts)
    if prompts and run.first:
        run.reporter.phase("sampling")
        if run.mean:
            run.mean.swap()
        try:
            with drawing(run.learner):
                for number, prompt in enumerate(prompts):
                    _draw_one(run, step, number, prompt)
        finally:
            if run.mean:
                run.mean.swap()
        run.reporter.phase("training", 1, 1)
    if prompts:
        run.accelerator.wait_for_everyone()


@torch.no_grad()
def _draw_one(run: Run, step: int, number: int, prompt: str) -> None:
    section, family = run.config.samples, run.base.family
    parts = {**run.learner.named_parts(), "vae": run.vae}
    size = (section.sample_height or run.source.sizes[0][0], section.sample_width or run.source.sizes[0][1])
    if run.source.texts is not None:
        towards, away = run.source.text(prompt), run.source.text(EMPTY)
    else:
        with torch.autocast(run.device.type, dtype=run.dtype, enabled=run.dtype != torch.float32):
            towards, away = family.encode_text(parts, [prompt, EMPTY], device=run.device)
    latents = draw_latents(
        family, parts, run.base.spec.scheduler, towards, away, seed=section.sample_seed + number,
        steps=section.sample_inference_steps, guidance=section.sample_guidance, size=size, dtype=run.dtype,
    )  # fmt: skip
    path = run.folder / "samples" / f"step-{step:06d}" / f"{number}.png"
    settings = {"prompt": prompt, "seed": section.sample_seed + number, "step": step, "run": run.config.output.name}
    save_sample(family, parts, latents, path, settings)
    run.reporter.event("sample", step=step, prompt=prompt, path=str(path))


@torch.no_grad()
def validation_loss(run: Run) -> float:
    """Mean error of the pictures kept aside, at fixed noise levels and noise."""
    total = 0.0
    with drawing(run.learner):
        for number in run.aside:
            places = tuple(-1 - number * 4 - turn for turn in range(4))
            material = run.source.material(Batch(items=(number,) * 4, places=places), scale=1.0)
            material.draws.sigma.copy_(torch.tensor([0.2, 0.5, 0.8, 0.95]))
            with run.accelerator.autocast():
                total += float(run.learner(material.to(run.device), run.config.loss)[1].mean())
    return total / len(run.aside)


def memory() -> dict[str, int]:
    """Peak bytes: of the device where there is one, and of this process."""
    import psutil

    values = {"ram_bytes": psutil.Process().memory_info().rss}
    if torch.cuda.is_available():
        values["device_bytes"] = torch.cuda.max_memory_allocated()
    return values


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
        told = self.run.accelerator.reduce(torch.tensor(float(asked), device=self.run.device), reduction="sum")
        return bool(told > 0)
