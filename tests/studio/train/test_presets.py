"""Presets: every shipped one can be used, keeps what is trained, and is recognised again."""

from __future__ import annotations

import pytest

from backend.schema.messages import Trouble
from backend.schema.settings import from_values, to_values
from backend.schema.training.config import TrainingConfig
from studio.train import dataset_captions, presets, tab

SHIPPED = presets.presets()


def test_there_are_presets_with_a_sentence_each():
    assert SHIPPED and all(preset.title and preset.about.endswith(".") for preset in SHIPPED)


@pytest.mark.parametrize("preset", SHIPPED, ids=lambda preset: preset.name)
def test_a_preset_keeps_what_is_trained_and_is_recognised(preset):
    mine = {
        "name": "cat",
        "dataset_base_path": "/pictures",
        "sample_prompts": "a cat",
        "trigger_word": "zork",
        "flip": True,
    }
    values = to_values(presets.apply(preset, from_values(TrainingConfig, mine)))
    assert {name: values[name] for name in mine if name != "flip"} == {n: v for n, v in mine.items() if n != "flip"}
    assert values["flip"] == preset.values.get("flip", False)
    assert presets.matching(from_values(TrainingConfig, values), SHIPPED) == preset.name


def test_a_preset_with_an_unknown_setting_is_told_by_its_title():
    with pytest.raises(Trouble, match="Mine"):
        presets.apply(presets.Preset("mine", "Mine", "", {"no_such_setting": 1}), TrainingConfig())


def test_settings_of_no_preset_have_a_name_too(data):
    assert presets.matching(from_values(TrainingConfig, SHIPPED[0].values | {"max_steps": 77}), SHIPPED) == presets.OWN
    assert ("Own settings", presets.OWN) in presets.choices(data)


def test_another_set_brings_its_words_and_leaves_what_was_typed(data, tmp_path):
    character, style = dataset_captions.shipped()
    first = tab.with_dataset(TrainingConfig(), str(character))
    second = tab.with_dataset(first, str(style))
    assert second.dataset.trigger_word == "neon style" and second.output.name == "neon"
    plain = tab.with_dataset(second, str(tmp_path))
    assert plain.dataset.trigger_word == "" and plain.output.name == TrainingConfig().output.name
    typed = from_values(TrainingConfig, {"name": "mine", "trigger_word": "zork"})
    assert tab.with_dataset(typed, str(tmp_path)).dataset.trigger_word == "zork"
    (tmp_path / "metadata.csv").write_text("image,prompt\n")
    assert tab.with_dataset(typed, str(tmp_path)).dataset.dataset_metadata_path == str(tmp_path / "metadata.csv")


def test_a_file_that_is_no_preset_is_passed_over(data):
    folder = data.user / "presets"
    folder.mkdir(parents=True)
    (folder / "broken.json").write_text("{")
    (folder / "own.json").write_text('{"title": "My own", "max_steps": 3}')
    assert [preset.title for preset in presets.presets(data)[len(SHIPPED) :]] == ["My own"]


def test_the_first_form_is_the_first_preset_on_the_first_shipped_set(data):
    from backend.families import FAMILIES
    from backend.host.engine.client import Engine
    from studio.state.context import Studio

    engine = Engine(data, fake=True)
    config = tab.remembered(Studio(data, engine, FAMILIES))
    engine.stop()
    first = dataset_captions.shipped()[0]
    assert config.dataset.dataset_base_path == str(first)
    assert config.dataset.trigger_word == dataset_captions.hints(first).get("trigger_word", "")
    assert presets.matching(config, SHIPPED) == SHIPPED[0].name
