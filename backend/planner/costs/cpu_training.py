"""Working memory of a training run on a CPU: other kernels run there than on a card, and for short sequences another
attention."""

from __future__ import annotations

from backend.planner.costs import required_traces
from backend.planner.costs.layout import Layout, Work
from backend.planner.costs.model_sizes import PartSizes
from backend.planner.costs.phase_costs import BASE_DEPTH, greatest
from backend.planner.costs.training_method import Method, method_of


def step(part: PartSizes, point: dict, work: Work, layout: Layout) -> dict[str, int] | None:
    """Live bytes of a run's step on a CPU, gradients among them, beside weights and states: "forward", and where the
    backward pass "begins" and "ends". None where no table has the attention that would run."""
    found, factor, name = _first(part, required_traces.step_names(part, point, work, layout))
    if found is None:
        return None
    form = found["bn" if point["b"] > 1 else "b1"]
    numbers = {
        section: factor * _at_depth(part, form["features"], form[section], point)
        for section in ("forward", "begins", "ends")
    }
    return {section: int(value + _besides(part, point, work, name, section)) for section, value in numbers.items()}


def sample(part: PartSizes, point: dict, work: Work, pictures: int, *, step: dict) -> int | None:
    """Live bytes of a pass of a sample at `point` on a CPU; `pictures` 2: both halves of guidance.

    The attention is that of the run's `step`.
    """
    found, factor, _ = _first(part, required_traces.sample_names(part, step, work))
    if found is None:
        return None
    form = found[f"b{pictures}"]
    return int(factor * _at_depth(part, form["features"], form["pieces"], point))


def _first(part: PartSizes, names: tuple[str, ...]) -> tuple[dict | None, float, str]:
    """(the first form of `names` that there is, the factor between its numbers' size and theirs, its name)."""
    table = part.table.get("cpu", {})
    for name in names:
        found, factor = _form(table, name)
        if found is not None:
            return found, factor, name
    return None, 1.0, ""


def _besides(part: PartSizes, point: dict, work: Work, name: str, section: str) -> float:
    """Roughly what a method takes more than a lean LoRA, whose form `name` stands in for its own that was not traced
    yet."""
    wanted = method_of(work.method)
    if "@" in name or wanted == Method() or section == "ends":
        return 0.0
    tokens = point["b"] * (point["n"] + point["t"])
    linears = [(rows, columns, count) for rows, columns, count in part.linears.values()]
    more = sum(tokens * columns * count * 4 for _, columns, count in linears) if not wanted.lean else 0
    if wanted.algorithm in ("dora", "loha", "lokr"):
        more = max(more, sum(rows * columns * count * 8 for rows, columns, count in linears))
    if wanted.drawing > 1:
        more += (wanted.drawing - 1) * tokens * sum(columns * count for _, columns, count in linears) * 4
    return more


def _at_depth(part: PartSizes, features: list[str], depths: list, point: dict) -> float:
    """Bytes at the part's own depth; `depths`: pieces at the base depth, then with one more block of each kind."""
    base, *others = [greatest(features, pieces, point) for pieces in depths]
    deeper = [depth - BASE_DEPTH for depth in part.depths.values()]
    return base + sum(count * (more - base) for count, more in zip(deeper, others))


def _form(table: dict, name: str) -> tuple[dict | None, float]:
    found = table.get(name)
    narrow = name.replace("/float32", "/bfloat16")
    return (found, 1.0) if found is not None or narrow == name else (table.get(narrow), 2.0)
