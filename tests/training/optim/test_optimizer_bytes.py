"""What an optimizer's step makes and drops beside weights, gradients and states, as the plans of a card count it."""

from __future__ import annotations

import importlib.util
import inspect
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from backend.engine.tracing import allocation_recorder
from backend.planner.costs.optimizers import OPTIMIZERS
from backend.training.optim.optimizers import find_class, make_optimizers

pytestmark = pytest.mark.torch
SHAPES = {
    f"dit.blocks.{index}.{name}": shape
    for index in range(3)
    for name, shape in (("weight", (128, 256)), ("bias", (128,)))
}
TOGETHER = '{"foreach": true}'  # as torch decides by itself on a card


def step_bytes(name: str) -> tuple[int, int]:
    """(most bytes that the second step of the optimizer `name` makes, bytes of its states)."""
    arguments = TOGETHER if name in ("adamw", "adam", "sgd") else None
    section = SimpleNamespace(
        allow_custom_code=False,
        customized_optimizer=name,
        optimizer_args=arguments,
        learning_rates="",
        learning_rate=1e-4,
        lr_schedulers="",
        lr_scheduler="constant",
        weight_decay=0.01,
    )
    weights = {name: torch.nn.Parameter(torch.full(shape, 0.1)) for name, shape in SHAPES.items()}
    optimizers = make_optimizers(weights, section)
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 0.1)

    def step(_):
        for optimizer in optimizers:
            optimizer.step()

    step(None)
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    there = [*weights.values(), *(weight.grad for weight in weights.values()), *states]
    return allocation_recorder.peak(allocation_recorder.record(step, weights=there, fake=False)), sum(
        one.nbytes for one in states
    )


def skip_if_lacking(name: str) -> None:
    if importlib.util.find_spec(OPTIMIZERS[name].package) is None:
        pytest.skip(f"{OPTIMIZERS[name].package} is not installed")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_makes_what_plans_count(name):
    skip_if_lacking(name)
    if name == "pagedadamw8bit" and not torch.cuda.is_available():
        pytest.skip("its pages are a card's")
    made, held = step_bytes(name)
    numel, largest = sum(torch.Size(shape).numel() for shape in SHAPES.values()), 128 * 256
    row = OPTIMIZERS[name]
    counted = row.update.at_once * numel + row.update.in_turn * largest
    assert made == pytest.approx(counted, rel=0.02, abs=0.01 * 4 * numel)
    assert held == pytest.approx(row.state_bytes * numel, rel=0.05, abs=0.1 * numel)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_arguments_of_the_table_are_those_of_the_class(name):
    skip_if_lacking(name)
    taken = inspect.signature(find_class(OPTIMIZERS[name].class_name)).parameters
    assert {*OPTIMIZERS[name].arguments, "lr"} <= set(taken)
    assert set(taken) - {"params", "lr", "weight_decay"} <= set(OPTIMIZERS[name].arguments)
