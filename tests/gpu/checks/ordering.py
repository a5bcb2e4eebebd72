"""Copies and blocks that are late at random: what is computed stays the same to the bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from backend.engine.devices import device_memory
from backend.engine.offload import placement
from tests.gpu.checks.chain import STATES, Late, gradient, hold_up, late, written
from tests.gpu.runner import Outcome

FORWARDS, BACKWARDS = 200, 50
TINY_FORWARDS, TINY_BACKWARDS = 3, 1


def late_copies(device: torch.device, tiny: bool) -> Outcome:
    forwards, backwards = (TINY_FORWARDS, TINY_BACKWARDS) if tiny else (FORWARDS, BACKWARDS)
    wrong: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        chain = written(Path(folder), tiny=tiny)
        for seed, name in enumerate(STATES):
            with late(device, seed) as there:
                found = _differences(chain, STATES[name], there, forwards, backwards)
                wrong[name] = [*found, *there.faults]
    measured = {
        "passes": forwards,
        "backwards": backwards,
        "differences": {name: len(one) for name, one in wrong.items()},
    }
    said = [one for found in wrong.values() for one in found]
    return Outcome(not said, measured, "; ".join(dict.fromkeys(said))[:300])


def sanitized(device: torch.device, tiny: bool) -> Outcome:
    """One state with few passes while torch's sanitizer looks at all that is launched: it raises at the first access that nothing orders."""
    with tempfile.TemporaryDirectory() as folder, late(device, 0) as there:
        found = _differences(written(Path(folder), tiny=tiny), STATES["RAM"], there, 3, 1)
        found += there.faults
    looks = device.type == "cuda" and _sanitizer_is_on()
    return Outcome(
        not found if looks else None, {"differences": len(found), "sanitizer": looks}, "; ".join(found)[:300]
    )


def _sanitizer_is_on() -> bool:
    from torch.cuda import _sanitizer

    return bool(_sanitizer.cuda_sanitizer.enabled)


def _differences(chain, states: dict, there: Late, forwards: int, backwards: int) -> list[str]:
    module = chain.placed(states, there.device)
    x, placed = chain.input(there.device), placement.of(module)
    plain = chain.build()
    for name in chain.part.tensors:
        path, _, leaf = name.rpartition(".")
        plain.get_submodule(path)._parameters[leaf] = torch.nn.Parameter(placed.read(name), requires_grad=False)
    with torch.no_grad():
        wanted = plain(x)
    wanted_gradient = gradient(plain, x)
    hold_up(module, there)
    found = []
    with torch.no_grad():
        found += ["an answer differs" for _ in range(forwards) if not torch.equal(module(x), wanted)]
    found += ["a gradient differs" for _ in range(backwards) if not torch.equal(gradient(module, x), wanted_gradient)]
    placed.close()
    device_memory.empty_cache(there.device)
    return found
