"""docs/settings.md says what the code says."""

from __future__ import annotations

from backend.schema.settings import knobs_of
from backend.schema.training import settings_reference


def test_the_page_is_current():
    assert settings_reference.PAGE.read_text(encoding="utf-8") == settings_reference.page(), (
        "run python -m backend.schema.training.settings_reference"
    )


def test_the_page_names_every_setting():
    page = settings_reference.page()
    for cls, title in settings_reference.CONFIGS:
        assert f"\n## {title}\n" in page
        for item in knobs_of(cls):
            assert f"| `--{item.name}` |" in page


def test_no_cell_breaks_its_table():
    rows = [line for line in settings_reference.page().splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}
