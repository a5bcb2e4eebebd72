"""What a plan has set in the Train form goes with the model that it was set for, and only where nobody has changed it since."""

from __future__ import annotations

import gradio as gr
import pytest

from backend.schema.training.config import TrainingConfig
from studio.train import applied_plan
from studio.widgets import form

LARGE, STARTER = "Qwen/Qwen-Image", "loft/starter"
PLAN = {"offload_models": "transformer", "resident_blocks": 7, "offload_device": "disk"}


@pytest.fixture(scope="module")
def shown():
    """The form's controls, and its values as a browser sends them."""
    config = TrainingConfig()
    with gr.Blocks():
        made = form.Form(TrainingConfig, form.folds(TrainingConfig, config))
    return made, dict(zip(made.controls, form.fill(made, config), strict=True))


def test_another_model_takes_back_what_the_plan_set_and_nobody_changed(shown):
    made, at_first = shown
    note = applied_plan.noted(made, PLAN, tuple(at_first.values()), LARGE, "")
    fit = at_first | PLAN
    assert applied_plan.taken_back(made, tuple(fit.values()), LARGE, note) == {}
    assert applied_plan.taken_back(made, tuple(fit.values()), STARTER, note) == {name: at_first[name] for name in PLAN}
    edited = fit | {"resident_blocks": 9}
    assert set(applied_plan.taken_back(made, tuple(edited.values()), STARTER, note)) == {
        "offload_models",
        "offload_device",
    }


def test_a_second_plan_goes_back_to_what_was_there_before_the_first(shown):
    made, at_first = shown
    first = applied_plan.noted(made, PLAN, tuple(at_first.values()), LARGE, "")
    second = applied_plan.noted(made, PLAN | {"resident_blocks": 3}, tuple((at_first | PLAN).values()), LARGE, first)
    now = at_first | PLAN | {"resident_blocks": 3}
    assert applied_plan.taken_back(made, tuple(now.values()), STARTER, second) == {
        name: at_first[name] for name in PLAN
    }


@pytest.mark.parametrize(
    "note", ["", "{", "[]", "3", '{"model": "a"}', '{"model": "a", "set": {"resident_blocks": 1}}']
)
def test_a_note_that_is_none_takes_nothing_back(shown, note):
    made, at_first = shown
    assert applied_plan.taken_back(made, tuple(at_first.values()), STARTER, note) == {}
