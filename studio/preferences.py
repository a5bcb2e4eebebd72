"""The Preferences tab: the form of `Preferences`, kept as it is changed, and where everything lies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import gradio as gr

from backend.schema.knobs import knobs_of, to_values
from backend.schema.messages import Trouble
from backend.schema.preferences import Preferences
from studio import form, theme
from studio.draw import facts
from studio.form import Form
from studio.session import preferences_file, read_preferences, write_config
from studio.studio import Studio
from studio.words import notice, trouble_notice

GROUPS = (
    ("Folders", ("model_folders", "lora_folders")),
    ("Memory and device", ("reserve_gib", "device", "allow_fp8")),
    ("Downloads", ("download_source", "offline")),
    ("Look", ("theme",)),
)


@dataclass(frozen=True)
class PreferencesTab:
    form: Form
    said: gr.HTML
    places: gr.HTML

    @property
    def outputs(self) -> list:
        return [*self.form.components, self.places]


def build(studio: Studio) -> PreferencesTab:
    """Lays the tab out."""
    kept = read_preferences(studio.places)
    values, knobs = to_values(kept), {item.name: item for item in knobs_of(Preferences)}
    named = {name for _, names in GROUPS for name in names}
    groups = (*GROUPS, ("More", tuple(name for name in knobs if name not in named)))
    controls = {}
    with gr.Column(elem_classes="narrow"):
        said = gr.HTML("", elem_id="preferences-said")
        for heading, names in groups:
            if not names:
                continue
            with gr.Column(elem_classes="settings"):
                gr.HTML(f'<h3 class="section">{heading}</h3>')
                for name in names:
                    controls[name] = form.control(knobs[name], values[name], elem_id=f"preference-{name}")
        places = gr.HTML(_places(studio), elem_id="places")
    return PreferencesTab(Form(Preferences, controls), said, places)


def _places(studio: Studio) -> str:
    places = studio.places
    rows = [
        ("Models", str(places.models)),
        ("LoRAs", str(places.loras)),
        ("Runs", str(places.runs)),
        ("Pictures", str(places.outputs)),
        ("Datasets", str(places.datasets)),
        ("Cache", f"{places.cache} (may be deleted at any time)"),
        ("Trash", str(places.trash)),
    ]
    return f'<h3 class="section">Where things lie</h3>{facts(rows)}'


def fill(studio: Studio, tab: PreferencesTab) -> list:
    """Updates for `tab.outputs`."""
    return [*form.fill(tab.form, read_preferences(studio.places)), _places(studio)]


def wire(studio: Studio, tab: PreferencesTab) -> None:
    """Every change is kept at once; folders that do not exist are named."""

    def keep(*values):
        try:
            wanted = form.read(tab.form, values, base=replace(read_preferences(studio.places)))
            write_config(preferences_file(studio.places), wanted)
        except Trouble as trouble:
            return trouble_notice(trouble)
        except OSError as error:
            return notice(f"The preferences could not be written: {error.strerror}.", kind="bad")
        absent = [path for path in (*wanted.model_folders, *wanted.lora_folders) if not Path(path).is_dir()]
        if absent:
            return notice(f"There is no folder {absent[0]}.", kind="warn")
        return notice("Kept.", kind="good")

    for part in tab.form.components:
        part.input(keep, tab.form.components, tab.said, show_progress="hidden", queue=False, trigger_mode="always_last")
    wish = tab.form.controls["theme"]
    wish.input(None, wish, None, js=theme.APPLY_THEME)
