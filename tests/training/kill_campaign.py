"""Saves states one after the other and kills the saver at random moments: `python -m tests.training.kill_campaign FOLDER ROUNDS`.

Prints `rounds steps killed_inside`. Fails where anything under a final name is torn. A process of its own, for it forks.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from backend.training.checkpoint import (
    State,
    list_states,
    load_state,
    prune_states,
    random_state,
    save_result,
    save_state,
    step_of,
)


def state(step: int, megabytes: int = 1) -> State:
    weights = {"dit.a": torch.full((megabytes, 2**18), float(step))}
    optimizers = [{"state": {0: {"mean": weights["dit.a"] / 2}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}]
    return State(
        step=step, weights=weights, optimizers=optimizers, mean=dict(weights), random=[random_state()], facts={"a": [1]}
    )


def save_on_and_on(folder: Path, step: int) -> None:
    for number in range(step + 1, step + 10_000):
        save_state(folder, state(number))
        save_result(folder / "newest.safetensors", {"a": torch.full((2**18,), float(number))}, {})
        prune_states(folder, keep=2, keep_every=None)


def newest_whole(folder: Path) -> int:
    """The newest step, after every state and result was read whole."""
    newest = 0
    for path in list_states(folder):
        found = load_state(path)
        assert found.step == step_of(path) and float(found.weights["dit.a"][0, 0]) == found.step
        newest = found.step
    if (folder / "newest.safetensors").exists():
        values = load_file(folder / "newest.safetensors")["a"]
        assert float(values.min()) == float(values.max())
    return newest


def main(folder: Path, rounds: int) -> None:
    torch.set_num_threads(1)  # a forked child has none of the others
    chance, step, inside = random.Random(0), 0, 0
    for _ in range(rounds):
        child = os.fork()
        if child == 0:
            save_on_and_on(folder, step)
            os._exit(0)
        end = time.monotonic() + 60
        while not any(step_of(path) > step for path in list_states(folder)):
            assert time.monotonic() < end, "nothing was saved"
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        inside += any((folder / "checkpoints").glob(".step-*.tmp"))
        step = newest_whole(folder)
    print(rounds, step, inside)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
