"""What a reload brings back, also from files that a crash, an editor or an older version left."""

from __future__ import annotations

import pytest

from backend.schema.knobs import from_values
from backend.schema.preferences import Preferences
from backend.schema.training import TrainingConfig
from studio import session


def test_a_config_comes_back(data):
    config = from_values(TrainingConfig, {"name": "cat", "max_steps": 7, "flip": True, "data_file_keys": "a,b"})
    session.write_config(session.training_file(data), config)
    assert session.read_config(session.training_file(data), TrainingConfig) == config


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "null", "\x00\x01"])
def test_a_file_that_holds_no_settings_gives_the_defaults(data, text):
    file = session.preferences_file(data)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert session.read_preferences(data) == Preferences()


def test_one_bad_value_costs_only_itself(data):
    session.write_values(
        session.preferences_file(data),
        {"reserve_gib": 2.5, "theme": "purple", "gone_since": 1, "device": "cpu", "offline": "maybe"},
    )
    kept = session.read_preferences(data)
    assert kept == Preferences(reserve_gib=2.5, device="cpu")


def test_only_what_differs_is_kept(data):
    session.write_config(session.preferences_file(data), Preferences(theme="dark"))
    assert session.read_values(session.preferences_file(data)) == {"theme": "dark"}
