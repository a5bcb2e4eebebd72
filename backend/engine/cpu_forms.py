"""Working memory of a run on a CPU, as closed forms: of its steps with all gradients, and of a sample's pass.

The backward pass has two sections: activations are most where it begins, gradients where it ends, and what lies between is less than
one of them.
"""

from __future__ import annotations

import torch

from backend.engine import cpu_step, forms, shallow
from backend.engine.cpu_step import BOTTOM, FORWARD, TOP
from backend.engine.tape import Tape, fakes

SECTIONS = {"forward": ("", FORWARD), "begins": (FORWARD, TOP), "ends": (BOTTOM, "end")}
SPAN = {"plain": {"n": (16, 512), "t": (4, 128)}, "fused": {"n": (256, 8192), "t": (8, 256)}}
RANKS, PICTURES = (4, 128), (2, 16)
RANK = 16
GRID = ((8, 8), (16, 24), (12, 20), (32, 32), (8, 40), (24, 24), (36, 8), (16, 16), (20, 28), (12, 44))
TEXTS, MANY, WIDE = (12, 40, 7, 25, 60, 18, 33, 90, 5, 51), (2, 3, 5, 2, 4, 7, 3, 2, 6, 4), (4, 16, 32, 8, 24, 48, 12, 20, 6, 40)


def forms_of(network: str, config: dict, known: dict, dtype: torch.dtype, name: str) -> dict:
    """All forms of a run in `dtype` (called `name`): of steps under "KERNEL/TARGETS/checkpointed|kept/DTYPE", with features and, of each
    section, the pieces of each depth, for one picture ("b1") and more ("bn"); of samples under "KERNEL/sample/TARGETS/DTYPE" ("b1", "b2")."""
    found = {}
    for kernel in cpu_step.KERNELS if dtype != torch.float32 else cpu_step.KERNELS[:1]:
        for targets in (*known["lora"], "full") if kernel == "plain" else ("usual", "full"):
            for checkpointed in (True, False):
                key = f"{kernel}/{targets}/{'checkpointed' if checkpointed else 'kept'}/{name}"
                found[key] = steps(network, config, known, dtype, kernel, targets, checkpointed=checkpointed)
        for targets in ("usual", "full"):
            found[f"{kernel}/sample/{targets}/{name}"] = _samples(network, config, known, dtype, kernel, targets)
    return found


def steps(network: str, config: dict, known: dict, dtype: torch.dtype, kernel: str, targets: str, *, checkpointed: bool) -> dict:
    wanted, found = known["lora"].get(targets, []), {}
    for many in (False, True):
        names = names_of(kernel, many=many, adapted=bool(wanted))
        points = points_of(len(names) + 1, many=many)
        span = SPAN[kernel] | ({"b": PICTURES} if many else {"b": (1, 1)}) | ({"r": RANKS} if wanted else {})
        found["bn" if many else "b1"] = one = {"features": names, **{section: [] for section in SECTIONS}}
        for depths in shallow.depths_of(known):
            few = shallow.config_of(config, known, depths)
            tapes = [step_tape(network, few, known, dtype, wanted, point, kernel, checkpointed=checkpointed) for point in points]
            for section, between in SECTIONS.items():
                one[section].append(_centred(forms.fit(names, points, tapes, span, section=between)["pieces"]))
    return found


def _centred(pieces: list[list[float]]) -> list[list[float]]:
    """Lifted by half of what leaving out the others takes: a depth multiplies the difference of two of these."""
    return [[float(f"{value * (1 + forms.TOLERANCE / 2):.6g}") for value in piece] for piece in pieces]


def names_of(kernel: str, *, many: bool, adapted: bool) -> list[str]:
    """Features of a step of one picture or of `many`; attention in products has a matrix of all pairs of tokens (s)."""
    varied = ["n", "t", *(["nr", "tr"] if adapted else []), *(["ss"] if kernel == "plain" else [])]
    return ["1", *(["r"] if adapted else []), *(["b", *(f"b{one}" for one in varied)] if many else varied)]


def points_of(count: int, *, many: bool) -> list[dict]:
    """Points in general position."""
    rows = list(zip(GRID, TEXTS, MANY, WIDE, strict=True))[:count]
    return [{"h": h, "w": w, "n": h * w // 4, "t": t, "b": b if many else 1, "r": r} for (h, w), t, b, r in rows]


def step_tape(
    network: str, config: dict, known: dict, dtype: torch.dtype, targets: list[str], point: dict, kernel: str, *, checkpointed: bool,
) -> Tape:  # fmt: skip
    """A step of a run on a CPU at `point`, with adapters on `targets` or (none) of all weights."""
    with fakes():
        module = cpu_step.network(
            network, config, dtype, targets=targets, rank=point["r"], checkpointed=checkpointed, kernel=kernel,
        )  # fmt: skip
        blocks = [block for name in known["blocks"] for block in module.get_submodule(name)]
        return cpu_step.step_tape(module, blocks, point, dtype, lean=bool(targets))


def _samples(network, config, known, dtype, kernel, targets) -> dict:
    names = ["1", "n", "t", *(["ss"] if kernel == "plain" else [])]
    found, wanted = {}, known["lora"].get(targets, [])
    with fakes():
        few = shallow.config_of(config, known, shallow.depths_of(known)[0])
        module = cpu_step.network(network, few, dtype, targets=wanted, rank=RANK, checkpointed=False, kernel=kernel)
        for batch in (1, 2):
            points = [{**point, "b": batch} for point in points_of(len(names) + 1, many=False)]
            tapes = [cpu_step.sample_tape(module, point, dtype) for point in points]
            found[f"b{batch}"] = forms.fit(names, points, tapes, {**SPAN[kernel], "b": (batch, batch)})
    return found
