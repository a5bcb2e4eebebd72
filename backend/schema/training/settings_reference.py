"""Writes docs/settings.md, the page of all settings: `python -m backend.schema.training.settings_reference`."""

from __future__ import annotations

from pathlib import Path

from backend.schema.paths import PROJECT
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest
from backend.schema.settings import reference
from backend.schema.training.config import TrainingConfig

PAGE = PROJECT / "docs" / "settings.md"
HEAD = """# Settings

Computed from the code by `python -m backend.schema.training.settings_reference`; a test holds it up to date.

A setting has one name: `--name value` on the command line (`--name` and `--no-name` where it is on or off), `name` in
a run's `config.json` and in a preset, a field in the form.

"""
CONFIGS = (
    (TrainingConfig, "Training"),
    (GenerationRequest, "Generating"),
    (Preferences, "Preferences"),
)


def page() -> str:
    return HEAD + "\n".join(reference(cls, title) for cls, title in CONFIGS)


def main(path: Path = PAGE) -> None:
    path.write_text(page(), encoding="utf-8")
    print(f"Wrote {path}.")


if __name__ == "__main__":
    main()
