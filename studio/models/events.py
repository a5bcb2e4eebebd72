"""What the LoRAs and models tab's buttons do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gradio as gr

from backend.catalog.models import library
from backend.schema.untrusted import known_file
from studio.models import config_from_lora, lora_tools
from studio.models.tab import UNKNOWN, ModelsTab, chosen
from studio.state import library as shelf
from studio.state.context import Studio
from studio.state.output_files import to_trash
from studio.train.tab import Train, remembered
from studio.widgets import form
from studio.widgets.field_sync import QUIET, ask, unchanged
from studio.widgets.formatting import notice


def wire(
    studio: Studio, tab: ModelsTab, ui, looks: gr.State, redraw: Callable, use_lora: Callable, train: Train, tabs
) -> None:
    """Binds search, choice and the buttons. `use_lora(event)` leads to Generate with the chosen LoRA."""
    _wire_search(tab, looks, redraw)
    lora_tools.wire(studio, tab.tools, redraw)

    def pick(event: gr.EventData, choice: dict):
        return choice | {"lora": event.what}, ""

    redraw(tab.cards.act(pick, ui, [ui, tab.said], **QUIET))
    use_lora(tab.buttons["use"].click(lambda: "", None, tab.said, **QUIET))

    def discard(choice: dict, seen: int):
        path = known_file(choice["lora"], shelf.lora_folders(studio)) if choice["lora"] else None
        if path is None:
            return choice, seen, notice("That file is not in a LoRA folder.", kind="warn")
        try:
            target = to_trash(path, studio.places)
        except OSError as error:
            return choice, seen, notice(f"{path.name} could not be moved: {error.strerror}.", kind="bad")
        return choice | {"lora": ""}, seen + 1, notice(f"Moved to {target}.", kind="good")

    redraw(tab.buttons["discard"].click(discard, [ui, looks], [ui, looks, tab.said], **QUIET))

    def correct(family: str, choice: dict, seen: int):
        library.correct_family(studio.places.user, Path(choice["lora"]), "" if family == UNKNOWN else family)
        return seen + 1

    redraw(tab.family.input(correct, [tab.family, ui, looks], looks, **QUIET))

    fields = train.form.components

    def train_again(choice: dict, *values):
        spec = chosen(studio, choice["lora"])
        if spec is None:
            return unchanged(fields), gr.skip(), gr.skip()
        wanted = form.differing(train.form, config_from_lora.config_of(spec, remembered(studio)), values)
        wanted = {name: value for name, value in wanted.items() if name in config_from_lora.TAKEN}
        words = f"The form holds what {spec.path.name} says about its training. Choose the pictures."
        return form.changes(train.form, wanted), gr.Tabs(selected="train"), notice(words, kind="good")

    redraw(ask(tab.buttons["again"].click, train_again, [ui], fields, [tabs, train.said], train.keeping))


def _wire_search(tab: ModelsTab, looks: gr.State, redraw: Callable) -> None:
    """Search and filter are read by the tick itself; looking again raises a number that it compares."""
    redraw(tab.search.input(lambda: None, None, None, trigger_mode="always_last", **QUIET))
    redraw(tab.only.input(lambda: None, None, None, **QUIET))
    redraw(tab.refresh.click(lambda seen: seen + 1, looks, looks, **QUIET))
