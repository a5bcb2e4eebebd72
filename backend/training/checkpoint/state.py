"""The training state, from which a run resumes bit for bit, and exported weights.

A state is a folder `checkpoints/step-000100/` that appears by one rename: weights that train (float32), optimizers,
EMA, scaler, the random state of every process, and the step, from which order, noise and learning rate follow.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from safetensors.torch import load_file, save_file

from backend.engine.devices import out_of_memory
from backend.schema.json_values import whole
from backend.schema.messages import Trouble
from backend.schema.untrusted import exists, is_file, is_folder, read_object
from backend.system.atomic_files import discard_folder, disk_full, is_disk_full, replacing, replacing_folder

FORMAT = 1
T = TypeVar("T")

MOST_FACTS_BYTES = 2**28


@dataclass
class TrainingState:
    """Everything of a run that a later process needs. `facts` are compared on resume, and what differs is said."""

    step: int
    weights: Mapping[str, torch.Tensor]
    optimizers: list[dict[str, Any]]
    ema: Mapping[str, torch.Tensor] | None = None
    scaler: dict | None = None
    random: list[dict] = field(default_factory=list)  # one per process
    facts: dict = field(default_factory=dict)

    def tensors(self) -> list:
        """What weighs something."""
        return [self.weights, self.optimizers, self.ema]


def save_state(folder: Path, state: TrainingState) -> Path:
    """Writes `folder/checkpoints/step-…`. Raises Trouble("disk_full") with nothing of it left behind."""
    target = folder / "checkpoints" / f"step-{state.step:06d}"
    try:
        with replacing_folder(target) as making:
            save_file(_own(state.weights), making / "weights.safetensors")
            if state.ema is not None:
                save_file(_own(state.ema), making / "mean.safetensors")
            torch.save({"optimizers": state.optimizers, "scaler": state.scaler}, making / "optimizers.pt")
            torch.save(state.random, making / "random.pt")
            text = json.dumps(
                {"format": FORMAT, "step": state.step, "facts": state.facts}, ensure_ascii=False, indent=2
            )
            (making / "state.json").write_text(text, encoding="utf-8")
    except Exception as error:
        if is_disk_full(error):
            raise disk_full(folder, f"The state of step {state.step}") from error
        raise
    return target


def _own(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def load_state(path: Path) -> TrainingState:
    """The state in a folder written by `save_state`. Raises Trouble for one that is not whole."""
    step, facts = _read(path / "state.json", _step_and_facts)
    optimizers, scaler = _read(path / "optimizers.pt", _optimizers_and_scaler)
    ema = path / "mean.safetensors"  # the name that states of all versions have
    return TrainingState(
        step=step,
        weights=_read(path / "weights.safetensors", load_file),
        optimizers=optimizers,
        ema=_read(ema, load_file) if exists(ema) else None,
        scaler=scaler,
        random=_read(path / "random.pt", _unpickled),
        facts=facts,
    )


def _read(file: Path, reader: Callable[[Path], T]) -> T:
    """What `reader` finds in a state's `file`, or a Trouble that says which file is damaged and what to resume from
    instead."""
    try:
        return reader(file)
    except Exception as error:  # each reader has its own
        if out_of_memory.is_oom(error):  # the state is whole
            raise
        path, why = file.parent, "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        others = [other for other in list_states(path.parent.parent) if other != path]
        raise Trouble(
            "damaged",
            f"The saved state {path} is damaged: its {file.name} {why}.",
            hint=f"Resume from another: --resume_from_checkpoint {others[-1]}"
            if others
            else "There is no other: begin anew.",
            detail=str(error),
        ) from None


def _step_and_facts(file: Path) -> tuple[int, dict]:
    said = read_object(file, most=MOST_FACTS_BYTES)
    step = whole(said["step"])
    if step is None or not isinstance(said["facts"], dict):
        raise ValueError("its step or its facts are not as they were written")
    return step, said["facts"]


def _optimizers_and_scaler(file: Path) -> tuple[list[dict], dict | None]:
    said = _unpickled(file)
    return said["optimizers"], said["scaler"]


def _unpickled(file: Path):
    return torch.load(file, map_location="cpu", weights_only=True)


def list_states(folder: Path) -> list[Path]:
    """The states in a run's folder, the newest last."""
    found = [path for path in (folder / "checkpoints").glob("step-*") if is_file(path / "state.json")]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def prune_states(folder: Path, *, keep: int, keep_every: int | None) -> None:
    """Deletes all but the newest `keep` states and those of every `keep_every`-th step; also what a killed process
    left."""
    states = list_states(folder)
    for path in states[:-keep]:
        if not (keep_every and step_of(path) % keep_every == 0):
            discard_folder(path)
    for left in (folder / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def clear_leftovers(folder: Path, output: Path) -> None:
    """Deletes what a killed process had begun to write in a run's folders. For the one process that writes there."""
    for left in [
        *folder.glob(".preflight-*"),
        *folder.glob("samples/*/.*.tmp"),
        *(folder / "checkpoints").glob(".step-*.tmp"),
    ]:
        if is_folder(left):
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
    for left in output.glob(".*.safetensors.*.tmp"):  # other runs may save their results there too
        writer = left.name.split(".")[-2]
        if writer == str(os.getpid()) or not (writer.isdigit() and psutil.pid_exists(int(writer))):
            left.unlink(missing_ok=True)


def save_exported(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """Writes a result, whole or not at all. Raises Trouble("disk_full")."""
    try:
        with replacing(path) as making:
            save_file(tensors, making, metadata=metadata)
            making.chmod(0o644)  # safetensors makes files that their owner alone may read; a result is to be passed on
    except Exception as error:
        if is_disk_full(error):
            raise disk_full(path.parent, path.name) from error
        raise
    return path


def random_state() -> dict:
    """The states of the generators that nothing but dropout inside networks uses."""
    state = {"torch": torch.get_rng_state(), "python": _plain(random.getstate())}
    if torch.cuda.is_available():  # of the card that this process trains on; other cards are other processes' own
        state["cuda"] = [torch.cuda.get_rng_state()]
    return state


def set_random_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, rest = state["python"]
    random.setstate((version, tuple(numbers), rest))
    if state.get("cuda") and torch.cuda.is_available():
        kept = state["cuda"]  # older states have one for each card of the machine that made them
        torch.cuda.set_rng_state(kept[min(torch.cuda.current_device(), len(kept) - 1)])


def _plain(state) -> list:
    return [state[0], list(state[1]), state[2]]
