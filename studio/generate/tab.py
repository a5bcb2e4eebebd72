"""The Generate tab: what its form means, keeps and shows; `generate_layout` lays it out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr

from backend.catalog.models.supported import check_draws
from backend.host.engine.client import EngineSnapshot
from backend.schema.json_values import dicts, finite, text, texts
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, LoraUse, request_to_values
from studio.generate import gallery, lora_rows, reference_images
from studio.generate.lora_rows import LoraRows
from studio.panels import memory_estimate
from studio.panels.engine_status import busy, progress_panel, stalled_words
from studio.panels.memory_graph import Use, graph, watched
from studio.state import library
from studio.state.context import Studio
from studio.state.output_files import is_inside, is_ours, keep_input, stamp
from studio.state.saved_forms import config_from, read_values, request_file, settled, write_values
from studio.widgets import form
from studio.widgets.field_sync import Keeping
from studio.widgets.form import Form
from studio.widgets.formatting import trouble_notice

STRONGEST = 100.0  # of what is remembered of a LoRA's strength
FRESH = "fresh_seed"  # in the file of the form, beside the request's own settings


@dataclass(frozen=True)
class Generate:
    """The tab's components that others touch."""

    form: Form
    edited: gr.HTML
    fresh: gr.Checkbox
    dice: gr.Button
    again: gr.Button
    start_picture: gr.Image
    start_fold: gr.Accordion
    rows: LoraRows
    go: gr.Button
    cancel: gr.Button
    said: gr.HTML
    progress: gr.HTML
    stage: gr.HTML
    receipt: gr.HTML
    thumbs: gr.HTML
    actions: tuple[gr.Button, ...]
    drop: gr.File
    plan: gr.HTML
    faults: gr.HTML
    keeping: Keeping

    @property
    def fields(self) -> list:
        """What the user types or chooses; the first of what `fill` has updates for."""
        return [*self.form.components, self.fresh, *self.rows.inputs]

    @property
    def others(self) -> list:
        """What else `fill` has updates for."""
        return [self.start_picture, *self.rows.boxes, self.rows.add, self.rows.count]

    @property
    def inputs(self) -> list:
        """Everything that makes a request, in the order `read_inputs` takes."""
        return [*self.fields, self.start_picture]

    @property
    def live_outputs(self) -> list:
        regions = [self.progress, self.stage, self.receipt, self.thumbs, self.go, self.cancel, self.plan, self.edited]
        return [*regions, *self.actions]


def remembered(studio: Studio) -> tuple[GenerationRequest, tuple[LoraUse, ...]]:
    """The last request, as `user/request.json` keeps it."""
    values = read_values(request_file(studio.places))
    uses = tuple(
        LoraUse(text(use["path"]), _strength(use.get("strength")))
        for use in dicts(values.get("loras"))
        if text(use.get("path"))
    )
    request = config_from(GenerationRequest, values)
    start = request.input_image if request.input_image and is_ours(request.input_image, studio.places) else None
    edited = tuple(path for path in request.edit_images if is_ours(path, studio.places))
    return replace(request, input_image=start, edit_images=edited), uses


def _strength(value: object) -> float:
    number = finite(value, low=-STRONGEST, high=STRONGEST)
    return 1.0 if number is None else number


def wants_fresh_seed(studio: Studio) -> bool:
    """Whether a new seed is drawn for each request, as it was set last."""
    return bool(read_values(request_file(studio.places)).get(FRESH, True))


def keep(studio: Studio, tab: Generate, request: GenerationRequest, values: tuple) -> None:
    """Writes what a reload brings back: the request, and what the form (`values` of `tab.fields`) holds beside it."""
    fresh = bool(values[len(tab.form.controls)])
    write_values(request_file(studio.places), request_to_values(request) | {FRESH: fresh})


def fault_of_edits(studio: Studio, request: GenerationRequest, *, must: bool = False) -> str:
    """Why the model of `request` cannot work from its pictures to edit, in a sentence; `must`: it has to have one."""
    try:
        library.check_edits(library.models(studio), request, studio, must=must)
    except Trouble as trouble:
        return str(trouble)
    return ""


def for_its_model(studio: Studio, request: GenerationRequest) -> GenerationRequest:
    """`request` without pictures to edit where its model edits none: their row is not shown, and the form keeps
    them."""
    found = library.models(studio) if request.edit_images else ()
    return (
        request
        if not request.edit_images or library.edits(found, request.model, studio)
        else replace(request, edit_images=())
    )


def whole_request(studio: Studio) -> GenerationRequest:
    request, loras = remembered(studio)
    return replace(request, loras=loras)


def read_inputs(tab: Generate, values: tuple, studio: Studio) -> GenerationRequest:
    """The request that the values of `tab.inputs` mean. Raises Trouble for a value that cannot be."""
    count = len(tab.form.controls)
    request = form.read(tab.form, values[:count])
    *rows, picture = values[count + 1 :]
    edited = reference_images.paths_of(values[list(tab.form.controls).index("edit_images")])
    reference_images.check_here(edited, studio.places)
    if picture and not is_inside(Path(picture), (studio.places.user / "inputs", studio.places.outputs)):
        picture = str(keep_input(Path(picture), studio.places))
    return replace(request, input_image=picture or None, edit_images=edited, loras=lora_rows.read(rows))


def fill(
    tab: Generate, request: GenerationRequest, loras: tuple[LoraUse, ...], choices=None, *, fresh: bool
) -> tuple[list, list]:
    """Updates for `tab.fields` and for `tab.others`. `fresh`: a new seed each time."""
    rows = lora_rows.show([(use.path, use.strength) for use in loras], choices)
    boxes, ends = len(tab.rows.boxes), len(rows) - 2
    fields = [*form.fill(tab.form, request), fresh, *rows[boxes:ends]]
    return fields, [request.input_image, *rows[:boxes], *rows[ends:]]


def view(
    studio: Studio, tab: Generate, choice: dict, seen: dict, snapshot: EngineSnapshot, use: Use | None = None
) -> tuple[list, dict]:
    """Updates for `tab.live_outputs`, and what was seen; skips what has not changed since."""
    use = use if snapshot.job else None
    seen = watched(seen, snapshot.job.id if snapshot.job else "", use)
    making = snapshot.job is not None and not choice["picture"]
    preview = snapshot.job.preview if snapshot.job else ""
    most = choice["most"]
    kept = read_values(request_file(studio.places))
    now = {
        "progress": (snapshot.revision, use, stalled_words(snapshot, time.monotonic())),
        "stage": (making, preview) if making else (choice["picture"], stamp(studio.places.outputs)),
        "thumbs": (choice["picture"], stamp(studio.places.outputs), most),
        "busy": busy(snapshot),
        "edited": (text(kept.get("model")), tuple(texts(kept.get("edit_images")))),
        "plan": (
            kept if "plan" not in seen or settled(request_file(studio.places)) else seen["plan"][0],
            (choice["card"], choice.get("asked", "")),
            snapshot.state,
            memory_estimate.answers(studio),
        ),
    }
    fresh = {name for name, value in now.items() if seen.get(name) != value}
    picture = None
    if {"stage", "thumbs"} & fresh:
        picture = gallery.chosen_picture(studio, choice["picture"])
    out: list[Any] = [gr.skip()] * len(tab.live_outputs)
    if "progress" in fresh:
        predicted = predicted_bytes(studio, snapshot.job.request) if snapshot.job else 0
        out[0] = progress_panel(snapshot) + graph(seen.get("use", ()), use, predicted=predicted, told=snapshot.memory)
    if "stage" in fresh:
        out[1] = gallery.preview_stage(Path(preview) if preview else None) if making else gallery.stage(studio, picture)
        out[2] = "" if making else gallery.receipt(studio, picture)
        for i in range(len(tab.actions)):
            out[8 + i] = gr.update(visible=not making and picture is not None)
    if "thumbs" in fresh:
        out[3] = gallery.thumbs(studio, shown=picture, most=most)
    if "busy" in fresh:
        out[4] = gr.update(value="Generate another" if now["busy"] else "Generate")
        out[5] = gr.update(interactive=now["busy"])
    if "edited" in fresh:
        out[7] = drawn_edits(studio, *now["edited"])
    if "plan" in fresh:
        out[6] = plan_of(studio, whole_request(studio), choice["card"], choice.get("asked", ""))
    return out, seen | now


def drawn_edits(studio: Studio, model: str, paths: tuple[str, ...]) -> str:
    """The row of pictures to edit, where the model called `model` edits any."""
    return reference_images.row(studio, paths, shown=library.edits(library.models(studio), model, studio))


def predicted_bytes(studio: Studio, request: GenerationRequest) -> int:
    """The likely peak of a request on this machine, 0 where nothing is known."""
    try:
        return memory_estimate.estimate(studio, request.model, request, what_if="").plan.peak_high_bytes
    except Trouble:
        return 0


def plan_of(studio: Studio, request: GenerationRequest, what_if: str, asked: str = "") -> str:
    """The estimate for a request; it offers to be made smaller where it does not fit. `asked`: what of it was asked
    besides."""
    request = for_its_model(studio, request)
    try:
        found = memory_estimate.estimate(studio, request.model, request, what_if=what_if)
        told = memory_estimate.told(studio, request.model, request, what_if=what_if, asked=asked)
    except Trouble as trouble:
        return memory_estimate.no_panel(trouble)
    fit, refused = found.plan.verdict == "red", _refused_model(studio, request)
    if refused:
        return memory_estimate.panel(found, what_if=what_if, refused=refused, refused_as="Not drawn here", answers=told)
    refused = _refused_size(studio, request)
    return memory_estimate.panel(found, what_if=what_if, fit=fit, refused=refused, answers=told)


def _refused_model(studio: Studio, request: GenerationRequest) -> str:
    """A notice where no pictures are made here with the model of `request`, else ""."""
    sizes, _, _ = memory_estimate.sizes_of_model(studio, request.model)
    family = next((one for one in studio.families if sizes.family == one.NAME), None)
    try:
        if family is not None:
            check_draws(family, variant=sizes.variant, title=sizes.title)
    except Trouble as trouble:
        return trouble_notice(trouble)
    return ""


def _refused_size(studio: Studio, request: GenerationRequest) -> str:
    """A notice where the model of `request` does not draw pictures of that size, else ""."""
    try:
        library.check_size(library.models(studio), request, studio)
    except Trouble as trouble:
        return trouble_notice(trouble)
    return ""
