"""Every setting survives the way through its control, and a form reads what it shows."""

from __future__ import annotations

import gradio as gr
import pytest

from backend.schema.messages import Trouble
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest
from backend.schema.settings import from_values, knobs_of, to_values
from backend.schema.training.config import TrainingConfig
from studio.widgets import form

CLASSES = (TrainingConfig, GenerationRequest, Preferences)


def everything(cls) -> form.Form:
    with gr.Blocks(analytics_enabled=False):
        values = to_values(cls())
        return form.Form(cls, {item.name: form.control(item, values[item.name]) for item in knobs_of(cls)})


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_go_through_the_controls_unchanged(cls):
    made = everything(cls)
    assert form.read(made, form.fill(made, cls())) == cls()


def test_changed_values_go_through_too():
    made = everything(TrainingConfig)
    changes = {
        "learning_rate": 3e-7,
        "height": 64,
        "sample_prompts": "a\nb",
        "data_file_keys": ("image", "mask"),
        "flip": True,
        "max_steps": 12,
        "lora_alpha": 0.5,
        "caption_dropout": 0.35,
        "timestep_sampling": "mode",
        "enable_csv_log": False,
        "lora_base_model": "text_encoder",
        "seed": 2**53 - 1,
    }
    config = from_values(TrainingConfig, changes)
    assert form.read(made, form.fill(made, config)) == config


@pytest.mark.parametrize("cls", CLASSES)
def test_gradio_hands_back_what_it_was_given(cls):
    """The component's own conversion to the browser and back loses nothing either."""
    made = everything(cls)
    sent = [part.postprocess(value) for part, value in zip(made.components, form.fill(made, cls()), strict=True)]
    back = [part.preprocess(value) for part, value in zip(made.components, sent, strict=True)]
    assert form.read(made, back) == cls()


def test_an_empty_field_of_an_optional_setting_is_none_and_zero_is_zero():
    made = everything(TrainingConfig)
    values = dict(zip(made.controls, form.fill(made, from_values(TrainingConfig, {"height": 64})), strict=True))
    values |= {"height": None, "lora_alpha": 0, "model_paths": "  "}
    config = form.read(made, list(values.values()))
    assert config.dataset.height is None and config.lora.lora_alpha == 0 and config.model.model_paths is None


def test_a_value_out_of_range_is_refused_by_name():
    made = everything(GenerationRequest)
    values = dict(zip(made.controls, form.fill(made, GenerationRequest()), strict=True)) | {"width": 3}
    with pytest.raises(Trouble, match="Width"):
        form.read(made, list(values.values()))
    assert form.read_or_none(made, list(values.values())) is None


@pytest.mark.parametrize("cls", CLASSES)
def test_every_control_has_help_and_unit(cls):
    made = everything(cls)
    for item in knobs_of(cls):
        part = made.controls[item.name]
        assert part.info == item.help
        assert item.unit in part.label


def test_sections_show_every_setting_that_is_not_hidden_exactly_once():
    with gr.Blocks(analytics_enabled=False):
        made = form.folds(TrainingConfig, TrainingConfig(), skip=("name",))
    wanted = [item.name for item in knobs_of(TrainingConfig) if item.level != "hidden" and item.name != "name"]
    assert sorted(made) == sorted(wanted)


def test_a_slider_is_only_offered_where_it_can_hit_the_default():
    made = everything(TrainingConfig)
    assert isinstance(made.controls["learning_rate"], gr.Number)
    assert isinstance(made.controls["caption_dropout"], gr.Slider)


def test_what_cannot_be_is_told_for_each_field():
    made = everything(GenerationRequest)
    values = dict(zip(made.controls, form.fill(made, GenerationRequest()), strict=True)) | {
        "width": 3,
        "count": None,
        "seed": 1.5,
    }
    found = form.faults(made, list(values.values()))
    assert set(found) == {"width", "count", "seed"}
    assert found["width"] == "Width (px) is 3; the least is 16." and "needs a value" in found["count"]
    with pytest.raises(Trouble, match=r"^Width \(px\) is 3; the least is 16\. .*Count needs a value\.$"):
        form.read(made, list(values.values()))


def test_only_what_differs_or_is_wanted_is_changed():
    made = everything(TrainingConfig)
    shown = form.fill(made, TrainingConfig())
    config = from_values(TrainingConfig, {"max_steps": 7, "flip": True})
    assert form.differing(made, config, shown) == {"max_steps": 7, "flip": True}
    changes = dict(
        zip(made.controls, form.changes(made, {"max_steps": 7, "data_file_keys": ("image", "mask")}), strict=True)
    )
    assert changes["max_steps"] == 7 and changes["data_file_keys"] == "image\nmask"
    assert [name for name, change in changes.items() if change != gr.skip()] == ["data_file_keys", "max_steps"]


def test_a_number_typed_beside_a_slider_is_brought_into_its_range(monkeypatch):
    monkeypatch.setattr(gr.Slider, "preprocess", gr.Slider.preprocess)  # put back afterwards
    form.clamp_sliders()
    slider = everything(GenerationRequest).controls["num_inference_steps"]
    assert [slider.preprocess(typed) for typed in (0, 12, 999, None)] == [1, 12, 200, 1]
