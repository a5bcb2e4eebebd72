"""A part that is dropped while its next blocks are on their way: nothing of them lands in what takes its memory over."""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path

import torch

from tests.gpu.checks.chain import STATES, Late, Written, hold_up, late, written
from tests.gpu.runner import Outcome

ROUNDS, TINY_ROUNDS = 25, 2  # in each of two states
PATTERN = 0x5A
READING_SECONDS = 0.02  # for a thread that still reads


def dropped(device: torch.device, tiny: bool) -> Outcome:
    rounds, changed, faults = TINY_ROUNDS if tiny else ROUNDS, {}, []
    with tempfile.TemporaryDirectory() as folder:
        chain = written(Path(folder), tiny=tiny)
        for seed, name in enumerate(("RAM", "disk")):
            with late(device, seed) as there:
                changed[name] = sum(_changed_bytes(chain, STATES[name], there) > 0 for _ in range(rounds))
                faults += there.faults
    held = not any(changed.values()) and not faults
    return Outcome(
        held, {"rounds": rounds, "rounds with changed bytes": changed}, "; ".join(dict.fromkeys(faults))[:300]
    )


def _changed_bytes(chain: Written, states: dict, there: Late) -> int:
    """Of new tensors that take up the memory of a dropped part at once."""
    module, nbytes = chain.placed(states, there.device), 2 * chain.width**2
    hold_up(module, there)
    with torch.no_grad():
        module(chain.input(there.device))
    del module
    gc.collect()
    new = [torch.full((nbytes,), PATTERN, dtype=torch.uint8, device=there.device) for _ in range(8)]
    time.sleep(READING_SECONDS)
    if there.device.type != "cpu":
        torch.accelerator.synchronize(there.device)
    return int(sum((one != PATTERN).sum() for one in new))
