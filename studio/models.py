"""The LoRAs and models tab: what lies in the folders, whether it fits the chosen model, and what can be done with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gradio as gr

from backend.catalog.spec import LoraSpec
from studio import cards, shelf
from studio.pictures import is_inside, to_trash
from studio.session import read_values, request_file
from studio.studio import Studio, live
from studio.words import notice

QUIET = {"show_progress": "hidden", "queue": False}
ALL, FITTING = "All", "What fits the chosen model"


@dataclass(frozen=True)
class ModelsTab:
    search: gr.Textbox
    only: gr.Radio
    refresh: gr.Button
    cards: gr.HTML
    details: gr.HTML
    buttons: dict[str, gr.Button]
    said: gr.HTML
    models: gr.HTML

    @property
    def live_outputs(self) -> list:
        return [self.cards, self.details, self.models, *self.buttons.values()]


def build(studio: Studio) -> ModelsTab:
    """Lays the tab out."""
    with gr.Row(elem_classes="columns"):
        with gr.Column(scale=7, min_width=330, elem_classes="left"):
            with gr.Row(elem_classes="fields search-row"):
                search = gr.Textbox(
                    show_label=False,
                    container=False,
                    placeholder="Search by name, family, trigger word",
                    elem_id="lora-search",
                    scale=4,
                )
                only = gr.Radio(
                    [ALL, FITTING], value=ALL, show_label=False, container=False, elem_id="lora-only", scale=4
                )
                refresh = gr.Button("Look again", size="sm", scale=0, min_width=100, elem_id="lora-refresh")
            region = live(name="lora-cards")
            gr.HTML('<h3 class="section">Models</h3>')
            models = live(name="model-cards")
        with gr.Column(scale=5, min_width=330, elem_classes="right"):
            said = gr.HTML("", elem_id="lora-said")
            with gr.Row(elem_classes="actions"):
                labels = {
                    "use": "Use in Generate",
                    "again": "Train again with these settings",
                    "discard": "Move to trash",
                }
                buttons = {
                    name: gr.Button(words, size="sm", min_width=110, visible=False, elem_id=f"lora-{name}")
                    for name, words in labels.items()
                }
            details = live(name="lora-details")
    return ModelsTab(search, only, refresh, region, details, buttons, said, models)


def model_family(studio: Studio) -> str:
    """The family of the model that Generate has now."""
    value = str(read_values(request_file(studio.places)).get("model", shelf.STARTER))
    return shelf.family_of(shelf.models(studio), value, studio)


def view(studio: Studio, tab: ModelsTab, choice: dict, seen: dict) -> tuple[list, dict]:
    """Updates for `tab.live_outputs`, and what was seen. The folders are read again when the tab, search or choice changes."""
    key = (choice["lora"], seen.get("search", ""), seen.get("only", ALL), seen.get("looks", 0))
    if seen.get("key") == key:
        return [gr.skip()] * len(tab.live_outputs), seen
    found, family = shelf.loras(studio), model_family(studio)
    spec = next((s for s in found if isinstance(s, LoraSpec) and str(s.path) == choice["lora"]), None)
    listed = cards.searched(found, seen.get("search", ""), studio)
    if seen.get("only") == FITTING:
        listed = [s for s in listed if isinstance(s, LoraSpec) and not shelf.fits(s, family, studio)]
    listed.sort(key=lambda s: -getattr(s, "modified", 0.0))
    out = [
        cards.lora_cards(listed, model_family=family, shown=choice["lora"], studio=studio, now=time.time()),
        cards.lora_details(spec, model_family=family, strengths="", studio=studio),
        cards.model_cards(shelf.models(studio), studio),
        *[gr.update(visible=spec is not None)] * len(tab.buttons),
    ]
    return out, seen | {"key": key}


def wire(studio: Studio, tab: ModelsTab, ui, shown: gr.State, redraw: Callable, use_lora: Callable) -> None:
    """Binds search, choice and the buttons. `use_lora(event)` leads to Generate with the chosen LoRA."""

    def look(seen: dict, search: str, only: str):
        mine = seen.get("models", {})
        return seen | {"models": mine | {"search": search, "only": only}}

    def look_again(seen: dict):
        mine = seen.get("models", {})
        return seen | {"models": mine | {"looks": mine.get("looks", 0) + 1}}

    inputs = [shown, tab.search, tab.only]
    redraw(tab.search.input(look, inputs, shown, trigger_mode="always_last", **QUIET))
    redraw(tab.only.input(look, inputs, shown, **QUIET))
    redraw(tab.refresh.click(look_again, shown, shown, **QUIET))

    def pick(event: gr.EventData, choice: dict):
        return choice | {"lora": event.what}, ""

    redraw(tab.cards.act(pick, ui, [ui, tab.said], **QUIET))
    use_lora(tab.buttons["use"].click(None, None, None))

    def discard(choice: dict, seen: dict):
        path = Path(choice["lora"])
        if not path.is_file() or not is_inside(path, tuple(shelf.lora_folders(studio))):
            return choice, seen, notice("That file is not in a LoRA folder.", kind="warn")
        try:
            target = to_trash(path, studio.places)
        except OSError as error:
            return choice, seen, notice(f"{path.name} could not be moved: {error.strerror}.", kind="bad")
        return choice | {"lora": ""}, look_again(seen), notice(f"Moved to {target}.", kind="good")

    redraw(tab.buttons["discard"].click(discard, [ui, shown], [ui, shown, tab.said], **QUIET))
