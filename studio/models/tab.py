"""The LoRAs and models tab: what lies in the folders, whether it fits the chosen model, and what can be done with
it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import gradio as gr

from backend.catalog.lora.block_norms import block_strengths
from backend.catalog.spec import LoraSpec, ModelSpec
from backend.schema.messages import Trouble
from studio.models import cards
from studio.models import lora_tools as tools
from studio.state import library
from studio.state.context import Studio, live
from studio.state.saved_forms import read_values, request_file
from studio.widgets.svg import bars

ALL, FITTING = "All families", "Only what fits the chosen model"
UNKNOWN = "As recognised"


@dataclass(frozen=True)
class ModelsTab:
    search: gr.Textbox
    only: gr.Dropdown
    refresh: gr.Button
    cards: gr.HTML
    details: gr.HTML
    actions: gr.Row
    buttons: dict[str, gr.Button]
    family: gr.Dropdown
    said: gr.HTML
    models: gr.HTML
    tools: tools.Tools

    @property
    def live_outputs(self) -> list:
        return [self.cards, self.details, self.models, self.family, self.actions, *self.tools.live_outputs]


def build(studio: Studio) -> ModelsTab:
    """Lays the tab out."""
    families = [(module.TITLE, module.NAME) for module in studio.families]
    with gr.Row(elem_classes="columns"):
        with gr.Column(scale=7, min_width=330, elem_classes="left"):
            with gr.Row(elem_classes="fields search-row"):
                search = gr.Textbox(
                    show_label=False,
                    placeholder="Name, family, trigger word, trainer",
                    elem_id="lora-search",
                    scale=3,
                    min_width=180,
                    container=False,
                )
                only = gr.Dropdown(
                    [ALL, FITTING, *families],
                    value=ALL,
                    show_label=False,
                    elem_id="lora-only",
                    scale=3,
                    min_width=280,
                    container=False,
                )
                refresh = gr.Button("Look again", size="sm", scale=0, min_width=100, elem_id="lora-refresh")
            region = live(name="lora-cards")
            gr.HTML('<h3 class="section">Models</h3>')
            models = live(name="model-cards")
            made = tools.build(families)
        with gr.Column(scale=5, min_width=330, elem_classes="right"):
            said = gr.HTML("", elem_id="lora-said")
            with gr.Row(elem_classes="actions", visible=False) as actions:
                labels = {
                    "use": "Use in Generate",
                    "again": "Train again with these settings",
                    "discard": "Move to trash",
                }
                buttons = {
                    name: gr.Button(words, size="sm", min_width=110, elem_id=f"lora-{name}")
                    for name, words in labels.items()
                }
            details = live(name="lora-details")
            family = gr.Dropdown(
                [UNKNOWN, *families],
                value=UNKNOWN,
                visible=False,
                label="Family",
                elem_id="lora-family",
                info="Where it was not recognised, or wrongly, say what it is for.",
            )
    return ModelsTab(search, only, refresh, region, details, actions, buttons, family, said, models, made)


def model_family(studio: Studio) -> str:
    """The family of the model that Generate has now."""
    value = str(read_values(request_file(studio.places)).get("model", library.STARTER))
    return library.family_of(library.models(studio), value, studio)


def chosen_model(studio: Studio) -> ModelSpec | None:
    """The model that Generate has now; None where it is not here."""
    value = str(read_values(request_file(studio.places)).get("model", library.STARTER))
    return library.model_of(library.models(studio), value, studio)


def chosen(studio: Studio, wish: str) -> LoraSpec | None:
    return next((s for s in library.loras(studio) if isinstance(s, LoraSpec) and str(s.path) == wish), None)


def view(studio: Studio, tab: ModelsTab, choice: dict, seen: dict) -> tuple[list, dict]:
    """Updates for `tab.live_outputs`, and what was seen. The folders are read again when the tab, search or choice
    changes."""
    family, model = model_family(studio), chosen_model(studio)
    at_work, tool_seen = tools.view(studio, seen)
    key = (
        choice["lora"],
        choice["search"],
        choice["only"],
        choice["looks"],
        family,
        model and model.path,
        tools.written(tool_seen),
    )
    if seen.get("key") == key:
        return [*[gr.skip()] * (len(tab.live_outputs) - len(at_work)), *at_work], seen | tool_seen
    found = library.loras(studio)
    spec = next((s for s in found if isinstance(s, LoraSpec) and str(s.path) == choice["lora"]), None)
    listed = _filtered(cards.searched(found, choice["search"] or "", studio), choice["only"], family, studio, model)
    corrected = spec is not None and spec.evidence == ("corrected by hand",)
    out = [
        cards.lora_cards(
            listed,
            model_family=family,
            shown=choice["lora"],
            studio=studio,
            now=time.time(),
            some=bool(found),
            model=model,
        ),
        cards.lora_details(spec, model_family=family, strengths=_strengths(spec), studio=studio, model=model),
        cards.model_cards(library.models(studio), studio),
        gr.update(visible=spec is not None, value=spec.family if corrected else UNKNOWN),
        gr.update(visible=spec is not None),
        *at_work,
    ]
    return out, seen | {"key": key} | tool_seen


def _filtered(found: list, only: str, family: str, studio: Studio, model: ModelSpec | None) -> list:
    if only == FITTING:
        found = [s for s in found if isinstance(s, LoraSpec) and not library.fits(s, family, studio, model)]
    elif only != ALL:
        found = [s for s in found if isinstance(s, LoraSpec) and only in (s.family, *s.families_possible)]
    return sorted(found, key=lambda s: -s.modified if isinstance(s, LoraSpec) else 0.0)


def _strengths(spec: LoraSpec | None) -> str:
    """A bar for each block; nothing where the file changed or vanished meanwhile."""
    if spec is None:
        return ""
    try:
        return bars(block_strengths(spec.path), title="How strongly it changes each block (norm at strength 1)")
    except (Trouble, OSError):
        return ""
