"""Working memory of a training run on a CPU: other kernels run there than on a card, and for short sequences another attention."""

from __future__ import annotations

from backend.catalog.arrangement import Layout, Work
from backend.catalog.estimate import BASE_DEPTH, greatest
from backend.catalog.sizes import PartSizes
from backend.schema.vram import DTYPE_BYTES


def step(part: PartSizes, point: dict, work: Work, layout: Layout) -> dict[str, int] | None:
    """Live bytes of a run's step on a CPU, gradients among them, beside weights and states: "forward", and where the backward pass
    "begins" and "ends". None where no table has the attention that would run."""
    table = part.table.get("cpu", {})
    kept = "checkpointed" if layout.checkpointed or layout.checkpoints_in_ram else "kept"
    for targets in (work.targets, "usual"):
        found, factor = _form(table, f"{_kernel(table, point)}/{targets}/{kept}/{{}}", work.computing)
        if found is not None:
            break
    else:
        return None
    form = found["bn" if point["b"] > 1 else "b1"]
    return {
        name: int(factor * _at_depth(part, form["features"], form[name], point))
        for name in ("forward", "begins", "ends")
    }


def sample(part: PartSizes, point: dict, work: Work, pictures: int, *, step: dict) -> int | None:
    """Live bytes of a pass of a sample at `point` on a CPU; `pictures` 2: both halves of guidance. The attention is that of the run's `step`."""
    table = part.table.get("cpu", {})
    targets = "full" if work.targets == "full" else "usual"
    found, factor = _form(table, f"{_kernel(table, step)}/sample/{targets}/{{}}", work.computing)
    if found is None:
        return None
    form = found[f"b{pictures}"]
    return int(factor * _at_depth(part, form["features"], form["pieces"], point))


def _at_depth(part: PartSizes, features: list[str], depths: list, point: dict) -> float:
    """Bytes at the part's own depth; `depths`: pieces at the base depth, then with one more block of each kind."""
    base, *others = [greatest(features, pieces, point) for pieces in depths]
    deeper = [depth - BASE_DEPTH for depth in part.depths.values()]
    return base + sum(count * (more - base) for count, more in zip(deeper, others))


def _kernel(table: dict, point: dict) -> str:
    return "plain" if point["n"] <= table.get("plain_tokens", 0) else "fused"


def _form(table: dict, key: str, dtype: str) -> tuple[dict | None, float]:
    wanted = "float32" if dtype == "float32" else "bfloat16"
    found = table.get(key.format(wanted))
    return (found, 1.0) if found is not None else (table.get(key.format("bfloat16")), DTYPE_BYTES[wanted] / 2)
