"""What the LoRAs and models tab's buttons do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gradio as gr

from backend.catalog import library
from studio import again, shelf, tools
from studio.asking import QUIET
from studio.models import UNKNOWN, ModelsTab, chosen
from studio.pictures import is_inside, to_trash
from studio.session import training_file, write_config
from studio.studio import Studio
from studio.train import Train, fill, remembered
from studio.words import notice


def wire(
    studio: Studio, tab: ModelsTab, ui, looks: gr.State, redraw: Callable, use_lora: Callable, train: Train, tabs
) -> None:
    """Binds search, choice and the buttons. `use_lora(event)` leads to Generate with the chosen LoRA."""
    _wire_search(tab, looks, redraw)
    tools.wire(studio, tab.tools, redraw)

    def pick(event: gr.EventData, choice: dict):
        return choice | {"lora": event.what}, ""

    redraw(tab.cards.act(pick, ui, [ui, tab.said], **QUIET))
    use_lora(tab.buttons["use"].click(lambda: "", None, tab.said, **QUIET))

    def discard(choice: dict, seen: int):
        path = Path(choice["lora"])
        if not path.is_file() or not is_inside(path, tuple(shelf.lora_folders(studio))):
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

    def train_again(choice: dict):
        spec = chosen(studio, choice["lora"])
        if spec is None:
            return [choice, gr.skip(), *[gr.skip()] * len(train.form_outputs), gr.skip()]
        config = again.config_of(spec, remembered(studio))
        write_config(training_file(studio.places), config)
        words = notice(
            f"The form holds what {spec.path.name} says about its training. Choose the pictures.", kind="good"
        )
        return [choice, gr.Tabs(selected="train"), *fill(studio, train, config), words]

    redraw(tab.buttons["again"].click(train_again, ui, [ui, tabs, *train.form_outputs, train.said], **QUIET))


def _wire_search(tab: ModelsTab, looks: gr.State, redraw: Callable) -> None:
    """Search and filter are read by the tick itself; looking again raises a number that it compares."""
    redraw(tab.search.input(lambda: None, None, None, trigger_mode="always_last", **QUIET))
    redraw(tab.only.input(lambda: None, None, None, **QUIET))
    redraw(tab.refresh.click(lambda seen: seen + 1, looks, looks, **QUIET))
