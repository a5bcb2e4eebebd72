"""Evaluation while training: sample images, the validation loss on held-out images, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from backend.dataset.bucket_sampler import Batch
from backend.dataset.generated_prompts import EMPTY
from backend.engine.devices.oom_retry import attempt
from backend.planner.rules.check_training import strengths_of
from backend.schema.messages import Trouble
from backend.training.encoding.conditioning import encode_prompts
from backend.training.encoding.draw import draw_latents, drawing, save_sample
from backend.training.encoding.sample_source import Sample
from backend.training.model import fsdp
from backend.training.model.peft_adapters import ADAPTER
from backend.training.run.state import Run

T = TypeVar("T")
VALIDATION_LEVELS = (0.2, 0.5, 0.8, 0.95)  # noise levels; the noise of each picture and level is always the same


def draw_samples(run: Run, step: int) -> None:
    """Generates the sample images on the main process, with the EMA weights where there is an EMA."""
    samples = run.source.samples
    if samples and (run.is_main_process or fsdp.asked()):  # weights that are spread are put together by all
        run.reporter.phase("sampling")
        if run.ema:
            run.ema.swap()
        try:
            with run.peaks.sample(), drawing(run.learner):
                _draw_all(run, step)
        finally:
            if run.ema:
                run.ema.swap()
        run.reporter.phase("training", 1, 1)
    if samples:
        run.accelerator.wait_for_everyone()


def _draw_all(run: Run, step: int) -> None:
    strengths = strengths_of(run.config.samples)
    for strength in strengths:
        with adapter_scaled(run.learner, strength):
            for number, sample in enumerate(run.source.samples):
                said = f"{number}" if len(strengths) == 1 else f"{number}-strength-{strength:g}"
                _draw_one(run, step, number, sample, strength, f"{said}.png")
                run.peaks.enough()


@contextlib.contextmanager
def adapter_scaled(module: torch.nn.Module, strength: float) -> Iterator[None]:
    """The adapter in `module`, if there is one, counting `strength` times as much."""
    found = [getattr(inner, "scaling", None) for inner in module.modules()]
    found = [
        scaling for scaling in found if isinstance(scaling, dict) and ADAPTER in scaling
    ]  # attention has a number of that name
    before = [scaling[ADAPTER] for scaling in found]
    for scaling in found:
        scaling[ADAPTER] *= strength
    try:
        yield
    finally:
        for scaling, value in zip(found, before, strict=True):
            scaling[ADAPTER] = value


@torch.no_grad()
def _draw_one(run: Run, step: int, number: int, sample: Sample, strength: float, name: str) -> None:
    section, family, source, prompt = run.config.samples, run.base.family, run.source, sample.prompt
    parts = {**run.learner.named_parts(), "vae": run.vae}
    told = [(prompt, sample.references), (EMPTY, sample.references)]
    if source.texts is not None:
        positive, negative = (source.text(*one) for one in told)
    else:
        with torch.autocast(run.device.type, dtype=run.dtype, enabled=run.dtype != torch.float32):
            positive, negative = encode_prompts(told, parts, source, run.base)
    positive, negative = (source.with_references(one, sample.references) for one in (positive, negative))
    seed = section.sample_seed + number

    def draw(together: bool) -> torch.Tensor:
        return draw_latents(
            family,
            parts,
            replace(source.levels.settings(sample.size), guidance=section.sample_guidance),
            [positive],
            [negative],
            seeds=[seed],
            steps=section.sample_inference_steps,
            dtype=run.dtype,
            together=together,
        )

    latents = _with_oom_fallback(run, draw, step)
    if not run.is_main_process or latents is None:
        return
    path = run.folder / "samples" / f"step-{step:06d}" / name
    settings = {"prompt": prompt, "seed": seed, "step": step, "strength": strength, "run": run.config.output.name}
    try:
        if (
            _with_oom_fallback(
                run, lambda whole: save_sample(family, parts, latents, path, settings, tiled=not whole) or path, step
            )
            is None
        ):
            return
    except Trouble as trouble:
        if trouble.kind not in ("cannot_write", "not_finite"):
            raise
        run.reporter.note(f"A sample of step {step} is missing: {trouble.message}", step=step)
        return
    shown = prompt if strength == 1.0 else f"{prompt} (strength {strength:g})"
    run.reporter.event("sample", step=step, prompt=shown, path=str(path), strength=strength)


def _with_oom_fallback(run: Run, work: Callable[[bool], T], step: int) -> T | None:
    """`work(True)`, and where memory runs out `work(False)`, which takes less; None where that is too much as well: a
    sample is no reason to end a run. Of several processes none may be another's match here, so theirs begin anew."""
    if run.accelerator.num_processes > 1:
        return work(True)
    found = None if run.sample_fallback else attempt(lambda: work(True))
    if found is not None:
        return found
    if not run.sample_fallback:
        run.reporter.note(
            (
                "Memory ran out while a sample was drawn; guidance is computed in two passes, and samples are decoded "
                "in "
                "tiles."
            ),
            step=step,
        )
    run.sample_fallback = True
    found = attempt(lambda: work(False))
    if found is None:
        run.reporter.note(
            f"A sample of step {step} is missing: memory ran out. Lower --sample_width and --sample_height.", step=step
        )
    return found


@torch.no_grad()
def validation_loss(run: Run) -> float:
    """The validation loss: mean loss of the held-out images, at fixed noise levels and fixed noise."""
    total = 0.0
    with drawing(run.learner):
        for number in run.validation_items:
            count = len(VALIDATION_LEVELS)
            places = tuple(-1 - number * count - turn for turn in range(count))
            alone = run.accelerator.num_processes == 1
            errors = attempt(partial(_errors, run, number, places, VALIDATION_LEVELS)) if alone else None
            if errors is None:
                each = zip(places, VALIDATION_LEVELS, strict=True)
                errors = [error for place, level in each for error in _errors(run, number, (place,), (level,))]
            total += sum(errors) / count
    return total / len(run.validation_items)


def _errors(run: Run, number: int, places: tuple[int, ...], levels: tuple[float, ...]) -> list[float]:
    """The error of one picture at each of `levels`, with the noise of `places`."""
    inputs = run.source.load_batch(Batch(items=(number,) * len(places), places=places), scale=1.0)
    inputs.draws.sigma.copy_(torch.tensor(levels))
    with run.accelerator.autocast():
        plain = replace(run.config.loss, loss_weighting="none")  # the levels are few and fixed: each counts as much
        return run.learner(inputs.to(run.device), plain)[1].float().tolist()


def memory() -> dict[str, int]:
    """Peak bytes: of the device where there is one, and of this process."""
    import psutil

    values = {"ram_bytes": psutil.Process().memory_info().rss}
    if torch.cuda.is_available():
        values["device_bytes"] = torch.cuda.max_memory_allocated()
    return values
