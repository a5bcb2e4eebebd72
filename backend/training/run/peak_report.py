"""Measured against predicted peak memory, phase by phase: reported at a run's end and kept for the next estimate."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from backend.catalog.family import takes_negative
from backend.dataset.generated_prompts import EMPTY
from backend.engine.devices.device_memory import probe
from backend.engine.tracing import live_tensors
from backend.planner import history, predict_peak
from backend.planner.costs import required_traces
from backend.planner.costs.layout import Fixed
from backend.planner.costs.model_sizes import ModelSizes, sizes_of
from backend.planner.costs.phase_costs import point_of
from backend.planner.plan import fixed_of
from backend.planner.workload import work_of_training
from backend.schema.memory_plan import GIB, Card
from backend.schema.paths import places
from backend.schema.training.config import TrainingConfig
from backend.training.encoding.peak_meter import LargestBatch
from backend.training.run.evaluation import memory
from backend.training.run.state import Run

MEASURED = "measured.json"


def tell(run: Run) -> None:
    """Says the peaks of `run` at its end."""
    both = _both(run)
    if not both:
        return
    predicted, measured = _highest(both)
    run.reporter.event("memory", **memory(), predicted_bytes=predicted, measured_bytes=measured, phases=both)
    guess = " (a guess)" if is_guess(run) else ""
    run.reporter.note(
        f"Memory at most: predicted {_size(predicted)}{guess}, measured {_size(measured)} ({_sentence(both)})."
    )


def library_bytes(run: Run) -> dict[str, int]:
    """On a CPU, what the process holds beside weights and the optimizer's state, between two steps: its libraries,
    mostly. Who watches the process from outside sees them in everything that it takes."""
    if run.device.type != "cpu":
        return {}
    parts = {**run.learner.parts, "vae": run.vae}
    state = sum(
        value.nbytes
        for one in run.optimizers
        for values in one.state.values()
        for value in values.values()
        if hasattr(value, "nbytes")
    )
    held = live_tensors.weight_bytes(parts, run.device) + state
    return {"libraries_bytes": max(0, memory()["ram_bytes"] - held)}


def keep(run: Run) -> None:
    """Keeps the peaks of `run` for the next estimate, once, as soon as a step, a sample and a save were seen."""
    both = _both(run)
    if not both or run.peaks.kept or is_guess(run):
        return
    run.peaks.kept = True
    predicted, measured = _highest(both)
    with contextlib.suppress(OSError):  # a full disk is no reason to end a run over statistics
        history.remember(
            places().user / MEASURED,
            probe(run.device),
            run.base.spec.family,
            kind=history.kind_of(run.config),
            predicted_bytes=predicted,
            measured_bytes=measured,
            known=batch_facts(run.peaks.largest),
            phases=both,
        )


def _both(run: Run) -> dict[str, list[int]]:
    """Phase -> [predicted, measured]; nothing where the estimate does not know what trains, and in all processes but
    the first."""
    if not run.is_main_process or not is_known(run):
        return {}
    predicted = predicted_by(run)
    return {name: [predicted[name], value] for name, value in run.peaks.by_phase.items() if name in predicted}


def is_known(run: Run) -> bool:
    """Whether the estimate foresees what trains: the denoiser's weights, or adapters on them, in one process."""
    return run.accelerator.num_processes == 1 and all(name.startswith("dit.") for name in run.weights)


def is_guess(run: Run) -> bool:
    """Whether that rests on something that no table knows of this network or method, and so teaches nothing."""
    sizes = _sizes(run)
    work, own = work_of_training(run.config, sizes)
    work = replace(work, **batch_facts(run.peaks.largest), **sample_facts(run))
    return required_traces.is_guess(sizes, work, own, point_of(sizes, work), on_cpu=run.device.type == "cpu")


def _highest(both: dict[str, list[int]]) -> tuple[int, int]:
    return max(pair[0] for pair in both.values()), max(pair[1] for pair in both.values())


def predicted_by(run: Run) -> dict[str, int]:
    """Phase -> bytes that `run` should take, with what it has found out about its pictures and captions, and what
    earlier runs taught."""
    card, sizes = probe(run.device), _sizes(run)
    run.peaks.fixed = run.peaks.fixed or fixed_bytes_here(card, sizes)  # once, for this run teaches too
    return predict_peak.run_bytes(
        run.config,
        sizes,
        run.peaks.fixed,
        **batch_facts(run.peaks.largest),
        **sample_facts(run),
        batch=run.peaks.largest.count,
    )


def predicted_bytes(config: TrainingConfig, sizes: ModelSizes, card: Card, largest: LargestBatch) -> dict[str, int]:
    """The same of a run of `config` whose largest batch is `largest`."""
    return predict_peak.run_bytes(
        config, sizes, fixed_bytes_here(card, sizes), **batch_facts(largest), batch=largest.count
    )


def fixed_bytes_here(card: Card, sizes: ModelSizes) -> Fixed:
    return history.corrected(fixed_of(card), card, sizes.family, places().user / MEASURED, kind=history.TRAINING)


def batch_facts(largest: LargestBatch) -> dict[str, int]:
    """What of a batch does not follow from the settings alone."""
    more = {name: getattr(largest, name) for name in ("text_tokens", "reference_tokens") if getattr(largest, name)}
    return {"width": largest.width, "height": largest.height, **more}


def sample_facts(run: Run) -> dict:
    """What of the first of a run's samples, the one that is looked at, does not follow from the settings alone."""
    if not run.source.samples:
        return {}
    first = run.source.samples[0]
    base = run.base
    guided = takes_negative(base.family, base.spec.variant, run.config.samples.sample_guidance)
    tokens = [
        run.peaks.text_tokens(prompt, first.references) for prompt in (first.prompt, *((EMPTY,) if guided else ()))
    ]
    height, width = first.size
    cells = run.base.family.sizes(run.base.spec.variant).patch ** 2
    references = sum(one.shape[-2] * one.shape[-1] // cells for one in run.source.latents_of(first.references))
    return {"sample_size": (width, height), "sample_tokens": max(tokens), "sample_references": references}


def _sizes(run: Run) -> ModelSizes:
    return sizes_of(run.base.spec, folder=places().user / "memory")


def _sentence(both: dict[str, list[int]]) -> str:
    return "; ".join(f"{name} {_size(predicted)} and {_size(measured)}" for name, (predicted, measured) in both.items())


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"
