"""LoRA tools on the page: convert, merge, resize, extract, bake, edit metadata. Each is the command of the same name,
given its settings as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gradio as gr

from backend.host import lora_tool_process
from backend.schema.messages import Trouble
from studio.state import library
from studio.state.context import Studio, live
from studio.widgets.field_sync import QUIET
from studio.widgets.formatting import notice, safe
from studio.widgets.svg import progress

TOOLS = {
    "Convert to another layout": "convert",
    "Merge several": "merge",
    "Make smaller": "resize",
    "Bake into a model": "bake",
    "Extract from a tuned model": "extract",
    "Edit the metadata": "metadata",
    "Pickle to safetensors": "to_safetensors",
}
# Which fields a tool has, besides the name of the file it writes.
FIELDS = {
    "convert": ("file", "layout", "family"),
    "merge": ("files", "strengths", "rank", "layout", "family"),
    "resize": ("file", "rank", "energy", "layout", "family"),
    "bake": ("base", "files", "strengths"),
    "extract": ("tuned", "base", "rank", "layout"),
    "metadata": ("file", "changes", "strip"),
    "to_safetensors": ("path",),
}
RANKS = {  # what the rank means to each tool that has one
    "merge": "0: exact, as large as all of them together.",
    "resize": "0: by the share below.",
    "extract": "0: 32.",
}
PATHS = {
    "file": "path",
    "path": "path",
    "base": "base",
    "tuned": "tuned",
}  # fields with a file or a folder, and what tools call it
OPTIONS = {"rank": int, "energy": float, "layout": str, "family": str}
SUFFIX, LONGEST_NAME = ".safetensors", 200
LAYOUTS = ("diffusers", "comfyui", "kohya")


@dataclass(frozen=True)
class Tools:
    """The fold's components. `fields` in the order `request` takes their values."""

    fold: gr.Accordion
    which: gr.Dropdown
    fields: dict[str, gr.components.Component]
    out: gr.Textbox
    overwrite: gr.Checkbox
    run: gr.Button
    cancel: gr.Button
    said: gr.HTML
    state: gr.HTML

    @property
    def inputs(self) -> list:
        return [self.which, self.out, self.overwrite, *self.fields.values()]

    @property
    def live_outputs(self) -> list:
        return [self.state, self.cancel]


def build(families: list[tuple[str, str]]) -> Tools:
    """Lays the fold out. `families`: (title, name) of each."""
    with gr.Accordion("Tools", open=False, elem_id="tools-fold", elem_classes="fold") as fold:
        which = gr.Dropdown(list(TOOLS), value=next(iter(TOOLS)), label="What to do", elem_id="tool-which")
        fields = {
            "file": gr.Dropdown(label="LoRA", allow_custom_value=True, elem_id="tool-file"),
            "files": gr.Dropdown(label="LoRAs", multiselect=True, allow_custom_value=True, elem_id="tool-files"),
            "strengths": gr.Textbox(
                label="Strengths", info="One for each file, comma-separated. Empty: 1.", elem_id="tool-strengths"
            ),
            "base": gr.Textbox(label="Base model", info="A folder or a file.", elem_id="tool-base"),
            "tuned": gr.Textbox(label="Tuned model", info="A folder or a file.", elem_id="tool-tuned"),
            "path": gr.Textbox(label="File", info="A .pt, .ckpt or .bin file.", elem_id="tool-path"),
            "rank": gr.Number(label="Rank", precision=0, minimum=0, elem_id="tool-rank"),
            "energy": gr.Number(
                label="Share of the strength to keep",
                info="Such as 0.95; 0: by the rank.",
                minimum=0,
                maximum=1,
                step=0.01,
                elem_id="tool-energy",
            ),
            "layout": gr.Radio(LAYOUTS, value="diffusers", label="Layout", elem_id="tool-layout"),
            "family": gr.Dropdown(
                [("As recognised", ""), *families],
                value="",
                label="Family",
                elem_id="tool-family",
                info="Say it where the file does not tell.",
            ),
            "changes": gr.Textbox(
                label="Changes", lines=3, info="key=value sets, -key removes, one per line.", elem_id="tool-changes"
            ),
            "strip": gr.Checkbox(label="Remove everything else", container=False, elem_id="tool-strip"),
        }
        for name, field in fields.items():
            field.visible = name in FIELDS["convert"]
        out = gr.Textbox(label="Name of the new file", placeholder="my-lora-kohya", elem_id="tool-out")
        overwrite = gr.Checkbox(label="Replace a file of that name", container=False, elem_id="tool-overwrite")
        with gr.Row(elem_classes="actions"):
            run = gr.Button("Run", size="sm", variant="primary", elem_id="tool-run")
            cancel = gr.Button("Cancel", size="sm", variant="stop", interactive=False, elem_id="tool-cancel")
        said = gr.HTML("", elem_id="tool-said")
        state = live(name="tool-state")
    return Tools(fold, which, fields, out, overwrite, run, cancel, said, state)


def request(title: str, name: str, overwrite: bool, values: dict, folder: Path) -> tuple[dict, Path]:
    """The tool's settings by name and the file that it writes. Raises Trouble for a field that is missing or cannot
    be."""
    kind = TOOLS.get(title)
    if kind is None:
        raise Trouble("bad_value", f"There is no tool {str(title)[:80]!r}.", hint="Choose one of the list.")
    for field in FIELDS[kind]:
        if field in ("file", "files", "base", "tuned", "path") and not values.get(field):
            raise Trouble("bad_value", f"{title}: the field “{field}” is empty.", hint="Choose or write one.")
    stem = name.strip().removesuffix(SUFFIX)
    if not stem or Path(name).name != name.strip() or "\0" in name or len(stem.encode()) > LONGEST_NAME:
        raise Trouble("bad_value", f"{name[:80]!r} is no name for a file.", hint="Write a short one without folders.")
    out = folder / f"{stem}{SUFFIX}"
    wanted: dict[str, object] = {"tool": kind, "out": str(out), "overwrite": bool(overwrite)}
    wanted |= {name: str(values[field]) for field, name in PATHS.items() if field in FIELDS[kind]}
    if "files" in FIELDS[kind]:
        wanted |= _files(values)
    if kind == "metadata":
        wanted |= _edits(values)
    for option, of in OPTIONS.items():
        if option in FIELDS[kind] and values.get(option) not in (None, "", 0):
            wanted[option] = _value_of(option, of, values[option])
    return wanted, out


def _value_of(option: str, of: type, value: object) -> object:
    try:
        return of(value)
    except (TypeError, ValueError, OverflowError):
        raise Trouble("bad_value", f"The field “{option}” is {str(value)[:80]!r}, which it cannot be.") from None


def _files(values: dict) -> dict[str, list]:
    files = [str(file) for file in values["files"]]
    said = [part.strip() for part in str(values.get("strengths") or "").split(",") if part.strip()]
    if said and len(said) != len(files):
        raise Trouble(
            "bad_value", f"There are {len(files)} LoRAs and {len(said)} strengths.", hint="Write one for each."
        )
    return {"paths": files, "strengths": [_value_of("strengths", float, one) for one in said or ["1"] * len(files)]}


def _edits(values: dict) -> dict[str, object]:
    changed: dict[str, str] = {}
    removed: list[str] = []
    for line in filter(None, map(str.strip, str(values.get("changes") or "").splitlines())):
        key, sign, value = line.partition("=")
        if line.startswith("-"):
            removed.append(line[1:].strip())
        elif sign:
            changed[key] = value
        else:
            raise Trouble("bad_value", f"{line!r} is neither key=value nor -key.")
    strip = bool(values.get("strip"))
    if not changed and not removed and not strip:
        raise Trouble("bad_value", "There is nothing to change.", hint="Write key=value or -key, or remove everything.")
    return {"set": changed, "remove": removed, "strip": strip}


def written(seen: dict) -> str:
    """What the newest tool has written; another answer means that the folders are to be read again."""
    now = seen.get("tool")
    return f"{now.out} {now.said}" if now is not None and now.done else ""


def view(studio: Studio, seen: dict) -> tuple[list, dict]:
    """Updates for `Tools.live_outputs`, and what was seen."""
    now = lora_tool_process.read(studio.places)
    if seen.get("tool") == now:
        return [gr.skip(), gr.skip()], {"tool": now}
    if now is None:
        return ["", gr.update(interactive=False)], {"tool": now}
    if now.live:
        html = f'<p class="sentence">{safe(now.tool)}: {safe(now.said or "starting")}</p>{_bar(now.said)}'
    else:
        words = now.said or "It ended without a word."
        html = notice(words, kind="good" if now.done else "warn")
    return [html, gr.update(interactive=now.live)], {"tool": now}


def _bar(said: str) -> str:
    """The command says how far it is in per cent, a line at a time."""
    percent = said.strip().removesuffix("%").strip()
    return progress(int(percent), 100) if percent.isdigit() else progress(0, 0)


def wire(studio: Studio, tab: Tools, redraw) -> None:
    """Binds choice, run and cancel."""

    def choose(title: str):
        title = title if title in TOOLS else next(iter(TOOLS))
        choices = library.lora_choices(library.loras(studio), studio)
        updates = []
        for name in tab.fields:
            more = {"choices": choices} if name in ("file", "files") else {}
            if name == "rank":
                more = {"info": RANKS.get(TOOLS[title], "")}
            updates.append(gr.update(visible=name in FIELDS[TOOLS[title]], **more))
        return updates

    tab.which.input(choose, tab.which, list(tab.fields.values()), **QUIET)
    tab.fold.expand(choose, tab.which, list(tab.fields.values()), **QUIET)
    tab.which.focus(choose, tab.which, list(tab.fields.values()), **QUIET)

    def run(title: str, name: str, overwrite: bool, *values):
        try:
            given = dict(zip(tab.fields, values, strict=True))
            wanted, out = request(title, name or "", overwrite, given, studio.places.loras)
            out.parent.mkdir(parents=True, exist_ok=True)
            lora_tool_process.start(wanted, out=out, places=studio.places)
        except Trouble as trouble:
            return notice(str(trouble), kind="bad")
        except OSError as error:
            return notice(f"The tool could not be started: {error.strerror or error}.", kind="bad")
        return ""

    redraw(tab.run.click(run, tab.inputs, tab.said, **QUIET))
    redraw(tab.cancel.click(lambda: lora_tool_process.cancel(studio.places), None, None, **QUIET))
