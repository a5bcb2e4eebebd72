"""What a reload brings back: forms in `user/*.json`, and the few choices that belong to one browser."""

from __future__ import annotations

import json
import time
from pathlib import Path

import gradio as gr

from backend.schema.json_values import printable, text
from backend.schema.messages import Trouble
from backend.schema.paths import Places
from backend.schema.preferences import Preferences
from backend.schema.settings import from_values, knobs_of, to_values
from backend.schema.untrusted import read_object_or_empty
from backend.system.atomic_files import write_text

TYPING_SECONDS = 1.5
# What one browser remembers; anything else is on disk or in the engine's snapshot.
CHOICES = {"picture": "", "run": "", "lora": "", "card": "", "asked": "", "fitted": ""}


def browser_choices() -> gr.BrowserState:
    """The picture, run and LoRA chosen in this browser; the tab is remembered by the page's script. The key is fixed so
    that a restart of the studio keeps them."""
    gr.BrowserState.preprocess = _known_choices  # of each call that carries them
    return gr.BrowserState(dict(CHOICES), storage_key="loft-choices", secret="loft")


def _known_choices(_: gr.BrowserState, kept: object) -> dict[str, str]:
    return known_choices(kept)


def known_choices(kept: object) -> dict[str, str]:
    """Every one of `CHOICES` as a browser has `kept` them: it may have those of an older version, or anything else."""
    kept = kept if isinstance(kept, dict) else {}
    return {name: text(kept.get(name, value)) for name, value in CHOICES.items()}


def settled(path: Path) -> bool:
    """Whether a form was not edited for a moment: whoever types is answered by the form's own event, and the timer
    keeps out of the way."""
    try:
        return time.time() - path.stat().st_mtime > TYPING_SECONDS
    except OSError:
        return True


def write_values(path: Path, values: dict) -> None:
    write_text(path, printable(json.dumps(values, ensure_ascii=False, indent=2)) + "\n")


def read_values(path: Path) -> dict:
    """The JSON object in `path`; empty where there is none, or where a crash or an editor left something else."""
    return read_object_or_empty(path)


def config_from(cls: type, values: dict):
    """A config of `cls` from remembered values. A name or value that an older version left is passed over, one by
    one."""
    return with_known(cls(), values)


def with_known(config, values: dict):
    """`config` with those of `values` that are its settings and can be."""
    known = {item.name for item in knobs_of(type(config))}
    values = {name: value for name, value in values.items() if name in known}
    try:
        return from_values(type(config), values, base=config)
    except Trouble:
        pass  # one of them cannot be: take the others
    for name, value in values.items():
        try:
            config = from_values(type(config), {name: value}, base=config)
        except Trouble:
            continue
    return config


def read_config(path: Path, cls: type):
    return config_from(cls, read_values(path))


def write_config(path: Path, config) -> None:
    """Keeps what differs from the defaults, so that better defaults of a later version reach the form."""
    defaults = to_values(type(config)())
    write_values(path, {name: value for name, value in to_values(config).items() if value != defaults[name]})


def preferences_file(places: Places) -> Path:
    return places.user / "preferences.json"


def read_preferences(places: Places) -> Preferences:
    return read_config(preferences_file(places), Preferences)


def request_file(places: Places) -> Path:
    return places.user / "request.json"


def training_file(places: Places) -> Path:
    return places.user / "training.json"
