"""docs/settings.md says what the code says."""

from __future__ import annotations

from backend.schema import reference
from backend.schema.knobs import knobs_of


def test_the_page_is_current():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run python -m backend.schema.reference"


def test_the_page_names_every_setting():
    page = reference.page()
    for cls, title in reference.CONFIGS:
        assert f"\n## {title}\n" in page
        for item in knobs_of(cls):
            assert f"| `--{item.name}` |" in page


def test_no_cell_breaks_its_table():
    rows = [line for line in reference.page().splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}
