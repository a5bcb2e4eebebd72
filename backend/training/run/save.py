"""Saving a checkpoint: exported weights and the training state, written by a thread while the next step computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from backend.engine.devices.oom_retry import attempt
from backend.engine.lora.trained_adapters import TURNING
from backend.schema.messages import Trouble
from backend.schema.settings import to_values
from backend.training.checkpoint.async_writer import fits_in_ram, in_ram, nbytes
from backend.training.checkpoint.state import (
    TrainingState,
    list_states,
    prune_states,
    random_state,
    save_exported,
    save_state,
)
from backend.training.model import fsdp
from backend.training.run.export import exported_metadata, exported_tensors
from backend.training.run.state import Run, gather


def save(run: Run, name: str, *, step: int, epoch: int, wait: bool) -> None:
    """The result `name`, then the full state: a run that dies between the two makes the result again.

    A thread writes them while the next step computes; its optimizer waits for them (`loop.train_step`), so that no more
    steps than those between two saves are ever lost, and so that nothing written changes meanwhile. With `wait`, or
    where RAM has no room for what lies on a card, they are on the disk when this returns.
    """
    run.reporter.phase("saving")
    states = gather(run.accelerator, random_state())
    if run.is_main_process or fsdp.asked():  # weights that are spread are put together by all
        with run.peaks.save():
            state, result = _state(run, step, states), _result(run)
            beside = not wait and fits_in_ram(nbytes(state.tensors(), elsewhere=True) * 2)
            copied = (
                attempt(lambda: _in_ram(state)) if beside else None
            )  # no room after all: what is saved is waited for
            beside, state = copied is not None, copied or state
    if run.is_main_process:
        run.writer.start(lambda kept: _write(run, name, result, state, epoch=epoch, kept=kept))
        if not beside:
            run.writer.finish()
    if wait:
        run.accelerator.wait_for_everyone()
    run.reporter.phase("training", 1, 1)


def _state(run: Run, step: int, states: list[dict]) -> TrainingState:
    """The state as it is now: tensors that train themselves, or what spread ones are put together to."""
    return TrainingState(
        step=step,
        weights=fsdp.whole(run.weights),
        optimizers=fsdp.whole([one.state_dict() for one in run.optimizers]),
        ema=fsdp.whole(run.ema.values) if run.ema else None,
        scaler=run.accelerator.scaler.state_dict() if run.accelerator.scaler else None,
        random=states,
    )


def _in_ram(state: TrainingState) -> TrainingState:
    return dataclasses.replace(
        state, weights=in_ram(state.weights), optimizers=in_ram(state.optimizers), ema=in_ram(state.ema)
    )


def _result(run: Run) -> dict:
    """What the result holds, in RAM: the running mean's weights where there is one."""
    if not run.ema:
        return exported_tensors(run)
    run.ema.swap()
    try:
        return {name: tensor.clone() for name, tensor in exported_tensors(run).items()}  # they are swapped back below
    finally:
        run.ema.swap()


def _write(run: Run, name: str, tensors: dict, state: TrainingState, *, epoch: int, kept: Callable[[], None]) -> None:
    _check_weights_finite(state)
    metadata = exported_metadata(run, step=state.step, epoch=epoch)
    path = run.output / f"{name}.safetensors"
    _freeing_disk_space(run, lambda: save_exported(path, tensors, metadata))
    tensors.clear()
    run.reporter.event("saved", path=str(path), step=state.step)
    state.facts = facts(run)
    path = _freeing_disk_space(run, lambda: save_state(run.folder, state))
    run.reporter.event("checkpoint", step=state.step, path=str(path))
    kept()
    prune_states(run.folder, keep=run.config.output.keep_checkpoints, keep_every=run.config.output.keep_every)


def _check_weights_finite(state: TrainingState) -> None:
    """Raises Trouble for weights that are NaN or Inf: they stay so, and would push out the
    states that are good."""
    for name, weight in state.weights.items():
        if not weight.detach().sum().isfinite():
            raise Trouble(
                "not_finite",
                (
                    f"After step {state.step} the weights of {name} are NaN or Inf; they are not saved, and the run "
                    "ends here."
                ),
                hint="Lower the learning rate and resume from the last checkpoint.",
            )


def _freeing_disk_space(run: Run, write: Callable[[], Path]) -> Path:
    """What `write` gives. On a full disk the older states that nobody asked to keep are given up, and it is tried once
    more."""
    try:
        return write()
    except Trouble as trouble:
        if trouble.kind != "disk_full" or len(list_states(run.folder)) < 2:
            raise
        prune_states(run.folder, keep=1, keep_every=run.config.output.keep_every)
        return write()


def facts(run: Run) -> dict:
    """What the order of samples and the meaning of a state depend on."""
    from backend.training.encoding.encoding_cache import key_of

    pictures = key_of(
        *[f"{item.digest}|{item.captions}|{item.weight}" for item in run.source.items],
        *[one.digest for item in run.source.items for one in item.edits],
    )
    found = {"config": to_values(run.config), "processes": run.accelerator.num_processes, "pictures": pictures}
    if run.adapter and run.adapter.algorithm == "oft":
        found["turning"] = TURNING.fields()
    return found
