"""Working memory of a training run on a CPU: other kernels run there than on a card, and for short sequences another attention."""

from __future__ import annotations

from backend.catalog.arrangement import Layout, Work
from backend.catalog.estimate import BASE_DEPTH, evaluate, greatest
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
    bytes_of = {name: [greatest(form["features"], pieces, point) for pieces in form[name]] for name in ("forward", "begins", "ends")}
    deeper = [depth - BASE_DEPTH for depth in part.depths.values()]
    return {
        name: int(factor * (base + sum(count * (more - base) for count, more in zip(deeper, others))))
        for name, (base, *others) in bytes_of.items()
    }  # fmt: skip


def sample(part: PartSizes, point: dict, work: Work, pictures: int) -> int | None:
    """Live bytes of a pass of a sample on a CPU; `pictures` 2: both halves of guidance. The attention is that of the run's `point`."""
    table = part.table.get("cpu", {})
    targets = "full" if work.targets == "full" else "usual"
    found, factor = _form(table, f"{_kernel(table, point)}/sample/{targets}/{{}}", work.computing)
    return None if found is None else int(factor * evaluate(found[f"b{pictures}"], point))


def _kernel(table: dict, point: dict) -> str:
    return "plain" if point["n"] <= table.get("plain_tokens", 0) else "fused"


def _form(table: dict, key: str, dtype: str) -> tuple[dict | None, float]:
    wanted = "float32" if dtype == "float32" else "bfloat16"
    found = table.get(key.format(wanted))
    return (found, 1.0) if found is not None else (table.get(key.format("bfloat16")), DTYPE_BYTES[wanted] / 2)
