"""What an optimizer's step makes and drops beside weights, gradients and states, as the plans of a card count it."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from backend.engine.tracing import allocation_recorder
from backend.planner.costs.layout import Update
from backend.planner.workload import STATE_BYTES, UPDATES
from backend.training.optim.optimizers import make_optimizers

pytestmark = pytest.mark.torch
SHAPES = {
    f"dit.blocks.{index}.{name}": shape
    for index in range(3)
    for name, shape in (("weight", (128, 256)), ("bias", (128,)))
}
TOGETHER = '{"foreach": true}'  # as torch decides by itself on a card
PACKAGES = {"adamw8bit": "bitsandbytes", "pagedadamw8bit": "bitsandbytes", "prodigy": "prodigyopt"}


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


@pytest.mark.parametrize("name", STATE_BYTES)
def test_a_step_makes_what_plans_count(name):
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    if name == "pagedadamw8bit" and not torch.cuda.is_available():
        pytest.skip("its pages are a card's")
    made, held = step_bytes(name)
    numel, largest = sum(torch.Size(shape).numel() for shape in SHAPES.values()), 128 * 256
    update = UPDATES.get(name, Update())
    assert made == pytest.approx(update.at_once * numel + update.in_turn * largest, rel=0.02, abs=0.01 * 4 * numel)
    assert held == pytest.approx(STATE_BYTES[name] * numel, rel=0.05, abs=0.1 * numel)
