"""What a reload brings back, also from files that a crash, an editor or an older version left."""

from __future__ import annotations

import pytest

from backend.schema.preferences import Preferences
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from studio.state import saved_forms


def test_a_config_comes_back(data):
    config = from_values(TrainingConfig, {"name": "cat", "max_steps": 7, "flip": True, "data_file_keys": "a,b"})
    saved_forms.write_config(saved_forms.training_file(data), config)
    assert saved_forms.read_config(saved_forms.training_file(data), TrainingConfig) == config


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "null", "\x00\x01"])
def test_a_file_that_holds_no_settings_gives_the_defaults(data, text):
    file = saved_forms.preferences_file(data)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert saved_forms.read_preferences(data) == Preferences()


def test_one_bad_value_costs_only_itself(data):
    saved_forms.write_values(
        saved_forms.preferences_file(data),
        {"reserve_gib": 2.5, "theme": "purple", "gone_since": 1, "device": "cpu", "offline": "maybe"},
    )
    kept = saved_forms.read_preferences(data)
    assert kept == Preferences(reserve_gib=2.5, device="cpu")


def test_only_what_differs_is_kept(data):
    saved_forms.write_config(saved_forms.preferences_file(data), Preferences(theme="dark"))
    assert saved_forms.read_values(saved_forms.preferences_file(data)) == {"theme": "dark"}
