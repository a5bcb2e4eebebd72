"""The Preferences tab: the form of `Preferences`, kept as it is changed, and where everything lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from backend.schema.memory_plan import Card
from backend.schema.preferences import Preferences
from backend.schema.settings import knobs_of, to_values
from backend.schema.untrusted import is_folder
from backend.system import gpu_probe
from studio.state.context import Studio
from studio.state.saved_forms import preferences_file, read_preferences, write_config
from studio.widgets import form, theme
from studio.widgets.field_sync import Keeping, keeping
from studio.widgets.form import Form
from studio.widgets.formatting import faults_style, notice, safe
from studio.widgets.svg import facts

GROUPS = (
    ("Folders", ("model_folders", "lora_folders")),
    ("Memory and device", ("reserve_gib", "device", "allow_fp8", "allow_tiles", "allow_8bit_optimizer")),
    ("Downloads and uploads", ("download_source", "offline", "largest_model_upload_gib", "largest_picture_upload_mib")),
    ("Look", ("theme",)),
)
UNSEEN = ("xpu", "npu")  # kinds of cards that only torch, in the worker, can see


@dataclass(frozen=True)
class PreferencesTab:
    form: Form
    said: gr.HTML
    faults: gr.HTML
    keeping: Keeping


def build(studio: Studio) -> PreferencesTab:
    """Lays the tab out."""
    kept = read_preferences(studio.places)
    values, knobs = to_values(kept), {item.name: item for item in knobs_of(Preferences)}
    named = {name for _, names in GROUPS for name in names}
    groups = (*GROUPS, ("More", tuple(name for name in knobs if name not in named)))
    controls = {}
    with gr.Column(elem_classes="narrow"):
        said = gr.HTML("", elem_id="preferences-said")
        faults = gr.HTML("", elem_id="preference-faults", elem_classes="faults")
        for heading, names in groups:
            if not names:
                continue
            with gr.Column(elem_classes="settings"):
                gr.HTML(f'<h3 class="section">{heading}</h3>')
                for name in names:
                    look: dict[str, Any] = {"elem_id": f"preference-{name}"}
                    if name == "device":
                        look |= {
                            "choices": _devices(),
                            "label": "Device",
                            "info": knobs[name].help,
                            "value": kept.device,
                        }
                        controls[name] = gr.Dropdown(allow_custom_value=True, **look)
                    else:
                        controls[name] = form.control(knobs[name], values[name], **look)
        gr.HTML(_places(studio), elem_id="places")
        gr.HTML(_this_browser(studio), elem_id="this-browser")
    return PreferencesTab(Form(Preferences, controls), said, faults, keeping())


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


def _this_browser(studio: Studio) -> str:
    """A form of its own, since only a POST of this very page ends a login."""
    action = f"{studio.root_path.rstrip('/')}/logout"
    return (
        f'<h3 class="section">This browser</h3><form method="post" action="{safe(action)}"><button class="quiet">Sign '
        "out</button>"
        '<p class="caption">This browser forgets the token or the login, and the page asks for it again. Other '
        "browsers stay signed in.</p></form>"
    )


def _devices() -> list[tuple[str, str]]:
    """(label, device) of those that are here; others can be written."""
    found = [(f"{one.device} ({one.name})", one.device) for one in gpu_probe.probe() if one.device != "cpu"]
    return [
        ("Automatic", "auto"),
        *found,
        (f"cpu ({gpu_probe.cpu_name()})", "cpu"),
    ]


def device_fault(device: str, cards: Sequence[Card]) -> str:
    """Why nothing can compute on `device`, in a sentence; "" where something can, or where only torch could tell."""
    kind, _, number = device.partition(":")
    here = [one.device for one in cards if one.device != "cpu"]
    if device in ("auto", "cpu", *here) or device in {name.partition(":")[0] for name in here}:
        return ""
    if kind in UNSEEN and (not number or number.isdigit()):
        return ""
    return f"There is no device {device!r} here. It can be {', '.join(['auto', *here, 'cpu'])}."


def wire(studio: Studio, tab: PreferencesTab) -> None:
    """Every change is kept at once; what cannot be is said at its field; folders that do not exist are named."""

    def keep(*values):
        wrong = form.faults(tab.form, values)
        device = str(values[list(tab.form.controls).index("device")] or "").strip()
        fault = device_fault(device, gpu_probe.probe())
        wrong |= {"device": fault} if fault else {}
        if wrong:
            return "", faults_style(wrong, prefix="preference-")
        try:
            wanted = form.read(tab.form, values, base=studio.preferences())
            write_config(preferences_file(studio.places), wanted)
        except OSError as error:
            return notice(f"The preferences could not be written: {error.strerror}.", kind="bad"), ""
        absent = [path for path in (*wanted.model_folders, *wanted.lora_folders) if not is_folder(path)]
        if absent:
            return notice(f"Kept, but there is no folder {absent[0]}.", kind="warn"), ""
        return notice("Kept.", kind="good"), ""

    fields = tab.form.components
    tab.keeping.keep(keep, fields, [], fields, [tab.said, tab.faults])
    wish = tab.form.controls["theme"]
    wish.input(None, wish, None, js=theme.APPLY_THEME)
