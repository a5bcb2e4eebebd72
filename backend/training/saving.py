"""What a run saves: results and full states, written beside the steps that follow where RAM has room for a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from backend.schema.knobs import to_values
from backend.schema.messages import Trouble
from backend.training import shards
from backend.training.checkpoint import State, list_states, prune_states, random_state, save_result, save_state
from backend.training.results import result_metadata, result_tensors
from backend.training.run import Run, gather
from backend.training.writer import copied, fits_beside, nbytes


def save(run: Run, name: str, *, step: int, epoch: int, wait: bool) -> None:
    """The result `name`, then the full state: a run that dies between the two makes the result again.

    Both are written by a thread while training goes on, after a copy in RAM, if there is room for one; with `wait`, or
    without room, they are on the disk when this returns. What the save before failed by is raised here.
    """
    run.reporter.phase("saving")
    states = gather(run.accelerator, random_state())
    spread = _spread(run, step, states) if shards.asked() else None
    if run.first:
        run.writer.finish()
        state = spread[0] if spread else _state(run, step, states)
        apart = not wait and fits_beside(nbytes([state.weights, state.optimizers, state.mean]) * 2)
        result = spread[1] if spread else _result(run, apart=apart)
        state = copied_state(state) if apart and not spread else state
        run.writer.start(lambda: _write(run, name, result, state, epoch=epoch))
        if not apart:
            run.writer.finish()
    if wait:
        run.accelerator.wait_for_everyone()
    run.reporter.phase("training", 1, 1)


def _spread(run: Run, step: int, states: list[dict]) -> tuple[State, dict]:
    """State and result put together from all processes, in RAM."""
    state = _state(run, step, states)
    for name in ("weights", "optimizers", "mean"):
        setattr(state, name, shards.whole(getattr(state, name)))
    return state, _result(run, apart=False)


def _state(run: Run, step: int, states: list[dict]) -> State:
    return State(
        step=step, weights=run.weights, optimizers=[optimizer.state_dict() for optimizer in run.optimizers],
        mean=run.mean.values if run.mean else None,
        scaler=run.accelerator.scaler.state_dict() if run.accelerator.scaler else None, random=states,
    )  # fmt: skip


def copied_state(state: State) -> State:
    """The same state with tensors of its own."""
    return State(step=state.step, weights=copied(state.weights), optimizers=copied(state.optimizers),
                 mean=copied(state.mean), scaler=copied(state.scaler), random=state.random)  # fmt: skip


def _result(run: Run, *, apart: bool) -> dict:
    """What the result holds: the running mean's weights where there is one. `apart`: no tensor is one that trains."""
    if run.mean:
        run.mean.swap()
    try:
        tensors = result_tensors(run)
        return copied(tensors) if apart or run.mean else tensors
    finally:
        if run.mean:
            run.mean.swap()


def _write(run: Run, name: str, tensors: dict, state: State, *, epoch: int) -> None:
    metadata = result_metadata(run, step=state.step, epoch=epoch)
    path = run.output / f"{name}.safetensors"
    _with_room(run, lambda: save_result(path, tensors, metadata))
    tensors.clear()
    run.reporter.event("saved", path=str(path), step=state.step)
    state.facts = facts(run)
    path = _with_room(run, lambda: save_state(run.folder, state))
    prune_states(run.folder, keep=run.config.output.keep_checkpoints, keep_every=run.config.output.keep_every)
    run.reporter.event("checkpoint", step=state.step, path=str(path))


def _with_room(run: Run, write: Callable[[], Path]) -> Path:
    """What `write` gives. On a full disk the older states that nobody asked to keep are given up, and it is tried once more."""
    try:
        return write()
    except Trouble as trouble:
        if trouble.kind != "disk_full" or len(list_states(run.folder)) < 2:
            raise
        prune_states(run.folder, keep=1, keep_every=run.config.output.keep_every)
        return write()


def facts(run: Run) -> dict:
    """What the order of samples and the meaning of a state depend on."""
    from backend.training.cache import key_of

    pictures = key_of(*[f"{item.digest}|{item.captions}|{item.weight}" for item in run.source.items])
    return {"config": to_values(run.config), "processes": run.accelerator.num_processes, "pictures": pictures}
