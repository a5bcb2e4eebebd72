"""Working memory of a run on a CPU, as closed forms: of its steps with all gradients, and of a sample's pass.

The backward pass has two sections: activations are most where it begins, gradients where it ends, and what lies between
is less than one of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from backend.engine.tracing import cpu_training_step, fit, sample_points
from backend.engine.tracing.allocation_recorder import Tape, fakes
from backend.engine.tracing.cpu_training_step import BOTTOM, FORWARD, TOP
from backend.engine.tracing.forward_calls import LORA
from backend.planner.costs.training_method import Method, method_of

SECTIONS = {"forward": ("", FORWARD), "begins": (FORWARD, TOP), "ends": (BOTTOM, "end")}
SPAN = {"plain": {"n": (16, 512), "t": (4, 128)}, "fused": {"n": (256, 8192), "t": (8, 256)}}
RANKS, PICTURES = (4, 128), (2, 16)
RANK = 16
# three points in general position, within the span of each kernel
CELLS = {"plain": ((12, 20), (16, 26), (8, 10)), "fused": ((48, 80), (64, 104), (32, 40))}
TEXTS, MANY, WIDE = (14, 33, 23), (2, 3, 5), (20, 8, 14)


KERNELS = cpu_training_step.KERNELS


def forms_of(network: str, config: dict, known: dict, dtype: torch.dtype, name: str) -> Iterator[tuple[str, dict]]:
    """All forms of a run in `dtype` (called `name`), what is asked for most often first.

    Of steps under "KERNEL/TARGETS/checkpointed|kept/DTYPE": features and, of each section, the pieces of each depth,
    for one picture ("b1") and more ("bn"). Of samples under "KERNEL/sample/TARGETS/DTYPE": one picture, and both halves
    of guidance ("b2").
    """
    for key in names_of_forms(known, dtype, name):
        yield key, form_of(network, config, known, key)


def names_of_forms(known: dict, dtype: torch.dtype, name: str) -> Iterator[str]:
    """Those of `forms_of`."""
    for kernel in cpu_training_step.KERNELS if dtype != torch.float32 else cpu_training_step.KERNELS[:1]:
        sets = (
            sorted((*known["lora"], "full"), key=lambda name: name != "usual")
            if kernel == "plain"
            else ("usual", "full")
        )
        for targets in sets:
            for checkpointed in (False, True):
                yield f"{kernel}/{targets}/{'checkpointed' if checkpointed else 'kept'}/{name}"
            if targets in ("usual", "full"):
                yield f"{kernel}/sample/{targets}/{name}"


def form_of(network: str, config: dict, known: dict, key: str) -> dict:
    """The form that is called `key`, as `forms_of` names them; after "@" targets may name a method other than a lean
    LoRA. Raises ValueError for what is no such name."""
    kernel, *words, name = key.split("/")
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(name)
    if dtype is None or kernel not in cpu_training_step.KERNELS or len(words) != 2:
        raise ValueError(f"{key!r} names no form of a run on a CPU.")
    sample = words[0] == "sample"
    targets, _, word = words[sample].partition("@")
    method = method_of(word)
    if sample:
        return samples(network, config, known, dtype, kernel, targets, method=method)
    return steps(network, config, known, dtype, kernel, targets, checkpointed=words[1] == "checkpointed", method=method)


def steps(
    network: str,
    config: dict,
    known: dict,
    dtype: torch.dtype,
    kernel: str,
    targets: str,
    *,
    checkpointed: bool,
    method: Method = LORA,
) -> dict:
    """Forms of a step of one picture and of several."""
    wanted = known["lora"].get(targets, [])
    return {
        name: step_form(
            network, config, known, dtype, kernel, wanted, many=many, checkpointed=checkpointed, method=method
        )
        for name, many in (("b1", False), ("bn", True))
    }


def step_form(
    network: str,
    config: dict,
    known: dict,
    dtype: torch.dtype,
    kernel: str,
    targets: list[str],
    *,
    many: bool,
    checkpointed: bool,
    method: Method = LORA,
) -> dict:
    """The form of a step with adapters on `targets`, or (none) of all weights: features, and each section's pieces at
    each depth."""
    names, points = names_of(many=many), points_of(kernel, many=many, rank=method.rank)
    span = SPAN[kernel] | {"b": PICTURES if many else (1, 1), "r": RANKS if targets else (1, 1)}
    sections = {section: [] for section in SECTIONS}
    for depths in sample_points.depths_of(known):
        few = sample_points.config_of(config, known, depths)
        tapes = [
            step_tape(network, few, known, dtype, targets, point, kernel, checkpointed=checkpointed, method=method)
            for point in points
        ]
        for section, between in SECTIONS.items():
            form = fit.fit(names, points, tapes, span, section=between, single=True)
            sections[section].append(_centred(form["pieces"]))
    return _without_zeros(names, sections)


def _centred(pieces: list[list[float]]) -> list[list[float]]:
    """Lifted by half of what leaving out the others takes: a depth multiplies the difference of two of these."""
    return [[fit.tidy(value * (1 + fit.TOLERANCE / 2), digits=5) for value in piece] for piece in pieces]


def names_of(*, many: bool) -> list[str]:
    """What a storage of a step of one picture, or of `many`, can be a multiple of: s is all tokens, which attention may
    square."""
    apart = ["1", "r", "n", "t", "s", "nr", "tr", "sr", "ss"]
    return [*apart, *("b" if one == "1" else f"b{one}" for one in apart)] if many else apart


def points_of(kernel: str, *, many: bool, rank: int = 0) -> list[dict]:
    """Where a network is traced; `rank`: everywhere at this one."""
    rows = zip(CELLS[kernel], TEXTS, MANY, WIDE, strict=True)
    return [
        {"h": h, "w": w, "n": h * w // 4, "t": t, "b": b if many else 1, "r": rank or r} for (h, w), t, b, r in rows
    ]


def _without_zeros(names: list[str], sections: dict[str, list]) -> dict:
    """The features that matter, and the pieces in these alone."""
    used = [
        any(piece[at] for depths in sections.values() for pieces in depths for piece in pieces)
        for at in range(len(names))
    ]
    short = {
        name: [[[value for value, wanted in zip(piece, used) if wanted] for piece in pieces] for pieces in depths]
        for name, depths in sections.items()
    }
    return {"features": [name for name, wanted in zip(names, used) if wanted], **short}


def step_tape(
    network: str,
    config: dict,
    known: dict,
    dtype: torch.dtype,
    targets: list[str],
    point: dict,
    kernel: str,
    *,
    checkpointed: bool,
    method: Method = LORA,
) -> Tape:
    """A step of a run on a CPU at `point`, with adapters on `targets` or (none) of all weights."""
    with fakes():
        module = cpu_training_step.network(
            network,
            config,
            dtype,
            targets=targets,
            rank=point["r"],
            checkpointed=checkpointed,
            kernel=kernel,
            method=method,
        )
        blocks = [block for name in known["blocks"] for block in module.get_submodule(name).children()]
        lean = bool(targets) and method.lean
        return cpu_training_step.step_tape(module, blocks, point, dtype, lean=lean, drawing=method.drawing)


def samples(
    network: str, config: dict, known: dict, dtype: torch.dtype, kernel: str, targets: str, *, method: Method = LORA
) -> dict:
    """Forms of a sample's pass, one picture and both halves of guidance: autocast keeps copies of all weights that
    train in float32."""
    names, wanted = ["1", "n", "t", "s", "ss"], known["lora"].get(targets, [])
    found = {name: {"features": names, "pieces": []} for name in ("b1", "b2")}
    with fakes():
        for depths in sample_points.depths_of(known):
            few = sample_points.config_of(config, known, depths)
            module = cpu_training_step.network(
                network,
                few,
                dtype,
                targets=wanted,
                rank=method.rank or RANK,
                checkpointed=False,
                kernel=kernel,
                method=method,
            )
            for batch in (1, 2):
                points = [{**point, "b": batch, "r": method.rank or RANK} for point in points_of(kernel, many=False)]
                tapes = [cpu_training_step.sample_tape(module, point, dtype) for point in points]
                form = fit.fit(names, points, tapes, SPAN[kernel], single=True)
                found[f"b{batch}"]["pieces"].append(_centred(form["pieces"]))
    return found
