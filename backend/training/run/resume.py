"""Resume from a training state, or begin from weights; what was restored and what was not is reported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from backend.planner.costs.optimizers import arguments_of, class_name
from backend.schema.messages import Trouble
from backend.schema.settings import to_values
from backend.training.checkpoint.state import TrainingState, list_states, load_state, set_random_state
from backend.training.model import fsdp
from backend.training.run.state import Run

_FREE = frozenset(
    {"num_epochs", "max_steps", "resume_from_checkpoint", "save_steps", "keep_checkpoints", "keep_every", "name"}
)


def restore(run: Run, total_steps: int) -> int:
    """Restores what `resume_from_checkpoint` asks for; the step to go on from (0 for a fresh run)."""
    wanted = run.config.output.resume_from_checkpoint
    if not wanted:
        return 0
    if wanted.endswith(".safetensors"):
        _begin_from_weights(run, Path(wanted))
        return 0
    path = Path(wanted)
    if wanted == "latest":
        states = list_states(run.folder)
        if not states:
            run.reporter.note("There is no saved state yet: the run begins at step 1.")
            return 0
        path = states[-1]
    state = load_state(path)
    if state.step >= total_steps:
        raise Trouble(
            "already_complete",
            f"The run is already complete: it has made {state.step} of {total_steps} steps.",
            hint="Raise --num_epochs or --max_steps to train on.",
        )
    _check_oft_rotation(run, state)
    _take(run, state)
    run.reporter.rewind(state.step)
    run.reporter.event("resumed", step=state.step, **_receipt(run, state))
    run.reporter.say(f"Going on from step {state.step}.")
    return state.step


def _check_oft_rotation(run: Run, state: TrainingState) -> None:
    """Raises Trouble for a state of an OFT whose rotations are meant otherwise: its numbers would turn the other
    way."""
    if run.adapter is None or run.adapter.algorithm != "oft":
        return
    from backend.training.run.save import facts

    if state.facts.get("turning") != facts(run)["turning"]:
        raise Trouble(
            "bad_value",
            (
                "The saved state holds an OFT by Cayley's map, as earlier versions trained it; this one trains PEFT's "
                "default series."
            ),
            hint="Begin anew. Results of that run are read as they were meant.",
        )


@torch.no_grad()
def _take(run: Run, state: TrainingState) -> None:
    check_state({name: tuple(values.shape) for name, values in state.weights.items()}, run.weights)
    for name, weight in run.weights.items():
        fsdp.fill(weight, state.weights[name])
    if _has_same_optimizer(run, state):
        _load_optimizers(run, state)
    if run.optimizer_offload:
        run.optimizer_offload.refresh()
    if run.ema and state.ema:
        for name, values in run.ema.values.items():
            fsdp.fill(values, state.ema[name])
    elif run.ema:
        run.ema.begin()
    if run.accelerator.scaler and state.scaler:
        run.accelerator.scaler.load_state_dict(state.scaler)
    rank = run.accelerator.process_index
    if rank < len(state.random):
        set_random_state(state.random[rank])


def check_state(found: Mapping[str, tuple[int, ...]], weights: Mapping[str, torch.Tensor]) -> None:
    """Raises Trouble where a state's weights (name -> shape) are not those that train."""
    for name, weight in weights.items():
        if found.get(name) != tuple(weight.shape):
            raise Trouble(
                "bad_value",
                f"The saved state has no {name} of this run's size: it was made with other settings.",
                hint="Resume with the settings it was made with, or begin anew.",
            )
    if beyond := sorted(found.keys() - weights.keys()):
        raise Trouble(
            "bad_value",
            f"The saved state has {beyond[0]}, which does not train in this run: it was made with other settings.",
            hint="Resume with the settings it was made with, or begin anew.",
        )


def check_result(
    file: str, found: Mapping[str, tuple[int, ...]], weights: Mapping[str, torch.Tensor], *, prefix: str
) -> dict[str, str]:
    """Each weight that trains -> its name in a result (name -> shape) of whole parts. Raises Trouble where one is
    missing."""
    named = {
        name: next((key for key in (f"pipe.{name}".removeprefix(prefix), f"pipe.{name}", name) if key in found), "")
        for name in weights
    }
    missing = [name for name, key in named.items() if found.get(key) != tuple(weights[name].shape)]
    if missing:
        raise Trouble(
            "bad_value",
            f"{file} lacks {len(missing)} of the {len(weights)} weights that train, {missing[0]} for one.",
            hint="It belongs to another model, or trained other parts.",
        )
    return named


def _has_same_optimizer(run: Run, state: TrainingState) -> bool:
    """Whether the state's moments mean something to this run's optimizer."""
    now = run.config.training.customized_optimizer
    return class_name(state.facts.get("config", {}).get("customized_optimizer", now)) == class_name(now)


def _load_optimizers(run: Run, state: TrainingState) -> None:
    """The moments of the state. What the settings say of a group (rate, schedule, decay, arguments) rules over what the
    state says."""
    then = state.facts.get("config", {}).get("optimizer_args")
    named = {
        "initial_lr",
        "schedule",
        "weight_decay",
        *arguments_of(then),
        *arguments_of(run.config.training.optimizer_args),
    }
    for optimizer, saved in zip(run.optimizers, state.optimizers, strict=True):
        ours = [{name: group[name] for name in named & group.keys()} for group in optimizer.param_groups]
        optimizer.load_state_dict(fsdp.shard_optimizer_state(saved, optimizer))
        for group, values in zip(optimizer.param_groups, ours, strict=True):
            group.update(values)


def _receipt(run: Run, state: TrainingState) -> dict[str, list[str]]:
    """What was restored and what was not, in words."""
    restored, lacking = ["weights", "step"], []
    (restored if _has_same_optimizer(run, state) else lacking).append("optimizer")
    if run.ema:
        (restored if state.ema else lacking).append("running mean")
    (restored if len(state.random) >= run.accelerator.num_processes else lacking).append("random state")
    same = state.facts.get("processes") == run.accelerator.num_processes
    from backend.training.run.save import facts

    now = facts(run)
    if same and state.facts.get("pictures") == now["pictures"]:
        restored.append("place in the data")
    else:
        lacking.append("place in the data (pictures, captions or the number of processes changed)")
    old, new = state.facts.get("config", {}), to_values(run.config)
    for name, value in new.items():
        if name not in _FREE and name in old and _plain(old[name]) != _plain(value):
            lacking.append(f"{name} (was {old[name]}, is {value})")
    return {"restored": restored, "not_restored": lacking}


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


@torch.no_grad()
def _begin_from_weights(run: Run, path: Path) -> None:
    """Begins from the weights in a result's file, with a fresh optimizer."""
    from safetensors.torch import load_file

    if run.adapter:
        from backend.training.model.peft_adapters import load_file_adapter

        load_file_adapter(run.adapter, run.weights, path, flag="resume_from_checkpoint")
        _reset_offload_and_ema(run)
        return
    stored = load_file(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    named = check_result(path.name, shapes, run.weights, prefix=run.config.output.remove_prefix_in_ckpt)
    for name, weight in run.weights.items():
        weight.copy_(stored[named[name]])
    _reset_offload_and_ema(run)


def _reset_offload_and_ema(run: Run) -> None:
    """What is kept beside the weights begins from them as they are now."""
    if run.optimizer_offload:
        run.optimizer_offload.refresh()
    if run.ema:
        run.ema.begin()
