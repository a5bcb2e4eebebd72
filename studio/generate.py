"""The Generate tab: the request's form on the left, the picture, its receipt and earlier pictures on the right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import gradio as gr

from backend.host.engine import EngineSnapshot
from backend.schema.knobs import knobs_of, to_values
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, LoraUse, request_to_values
from studio import form, gallery, lora_rows, plan_panel
from studio.asking import Keeping, keeping
from studio.engine_view import busy, progress_panel
from studio.form import Form
from studio.lora_rows import LoraRows
from studio.pictures import is_inside, keep_input, stamp
from studio.session import config_from, read_values, request_file, write_values
from studio.studio import Studio, live
from studio.use_graph import Use, graph, watched

# Those that have a place of their own; whatever else a request can hold comes under "More settings".
FIELDS = (
    "model", "prompt", "negative_prompt", "width", "height", "num_inference_steps", "guidance", "seed", "count",
    "denoising_strength",
)  # fmt: skip
NO_FIELD = ("input_image",)
FRESH = "fresh_seed"  # in the file of the form, beside the request's own settings


@dataclass(frozen=True)
class Generate:
    """The tab's components that others touch."""

    form: Form
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
        return [self.progress, self.stage, self.receipt, self.thumbs, self.go, self.cancel, self.plan, *self.actions]


def build(studio: Studio) -> Generate:
    """Lays the tab out."""
    request, loras = remembered(studio)
    knobs = {item.name: item for item in knobs_of(GenerationRequest)}
    values = to_values(request)

    def control(name: str, **look):
        return form.control(knobs[name], values[name], **look)

    with gr.Row(elem_classes="columns"):
        with gr.Column(scale=5, min_width=330, elem_classes="left"):
            made = {
                "model": gr.Dropdown(label="Model", value=request.model, allow_custom_value=True, elem_id="set-model")
            }
            made["prompt"] = control("prompt", info=None, placeholder="a red apple on a blue background", max_lines=8)
            made["negative_prompt"] = control("negative_prompt", info=None, lines=1, max_lines=4)
            with gr.Row(elem_classes="go-row"):
                go = gr.Button("Generate", variant="primary", scale=3, min_width=140, elem_id="generate")
                cancel = gr.Button("Cancel", variant="stop", scale=1, min_width=90, elem_id="cancel", interactive=False)
            said = gr.HTML("", elem_id="said")
            faults = gr.HTML("", elem_id="faults", elem_classes="faults")
            plan = live(name="plan")
            with gr.Row(equal_height=True, elem_classes="fields"):
                made["width"] = control("width", info=None, label="Width", min_width=90)
                made["height"] = control("height", info=None, label="Height", min_width=90)
                made["count"] = gr.Number(
                    label="Pictures",
                    value=request.count,
                    precision=0,
                    step=1,
                    min_width=90,
                    elem_id="set-count",
                )
            with gr.Row(equal_height=True, elem_classes="fields"):
                made["num_inference_steps"] = control("num_inference_steps", info=None, min_width=150)
                made["guidance"] = control("guidance", info=None, min_width=150)
            with gr.Row(equal_height=True, elem_classes="fields seed-row"):
                made["seed"] = control("seed", info=None, min_width=110)
                dice = gr.Button("Roll", size="sm", min_width=60, scale=0, elem_id="seed-dice")
                again = gr.Button("Last one", size="sm", min_width=80, scale=0, elem_id="seed-last")
            fresh = gr.Checkbox(label="New seed each time", value=wants_fresh_seed(studio), container=False, elem_id="fresh-seed")
            with gr.Column(elem_classes="plain-group"):
                gr.HTML('<h3 class="section">LoRAs</h3>')
                rows = lora_rows.build([], loras)
            with gr.Accordion("Start from a picture", open=request.input_image is not None, elem_id="start-from") as start_fold:
                start_picture = gr.Image(
                    value=request.input_image,
                    type="filepath",
                    image_mode=None,
                    sources=["upload", "clipboard"],
                    height=180,
                    show_label=False,
                    buttons=[],
                    elem_id="start-picture",
                )
                made["denoising_strength"] = control("denoising_strength", label="Strength")
            made |= form.folds(GenerationRequest, request, skip=(*FIELDS, *NO_FIELD), title="More settings")
            with gr.Accordion("Settings from a picture", open=False, elem_id="settings-from"):
                drop = gr.File(
                    label="Drop a PNG that was made here",
                    file_types=[".png"],
                    type="filepath",
                    height=140,
                    elem_id="drop-png",
                )
        with gr.Column(scale=7, min_width=330, elem_classes="right"):
            stage = live(name="stage")
            progress = live(name="progress")
            thumbs = live(name="thumbs")
            with gr.Row(elem_classes="actions"):
                labels = ("Use these settings", "Start from this picture", "Move to trash")
                actions = tuple(
                    gr.Button(label, size="sm", min_width=90, visible=False, elem_id=f"picture-{i}")
                    for i, label in enumerate(labels)
                )
            receipt = live(name="receipt")
    return Generate(
        Form(GenerationRequest, made), fresh, dice, again, start_picture, start_fold, rows, go, cancel, said, progress, stage,
        receipt, thumbs, actions, drop, plan, faults, keeping(),
    )  # fmt: skip


def remembered(studio: Studio) -> tuple[GenerationRequest, tuple[LoraUse, ...]]:
    """The last request, as `user/request.json` keeps it."""
    values = read_values(request_file(studio.places))
    uses = tuple(
        LoraUse(str(use["path"]), float(use.get("strength", 1.0)))
        for use in values.get("loras") or ()
        if isinstance(use, dict) and "path" in use
    )
    request = config_from(GenerationRequest, values)
    if request.input_image and not Path(request.input_image).is_file():
        request = replace(request, input_image=None)
    return request, uses


def wants_fresh_seed(studio: Studio) -> bool:
    """Whether a new seed is drawn for each request, as it was set last."""
    return bool(read_values(request_file(studio.places)).get(FRESH, True))


def keep(studio: Studio, tab: Generate, request: GenerationRequest, values: tuple) -> None:
    """Writes what a reload brings back: the request, and what the form (`values` of `tab.fields`) holds beside it."""
    fresh = bool(values[len(tab.form.controls)])
    write_values(request_file(studio.places), request_to_values(request) | {FRESH: fresh})


def whole_request(studio: Studio) -> GenerationRequest:
    request, loras = remembered(studio)
    return replace(request, loras=loras)


def read_inputs(tab: Generate, values: tuple, studio: Studio) -> GenerationRequest:
    """The request that the values of `tab.inputs` mean. Raises Trouble for a value that cannot be."""
    count = len(tab.form.controls)
    request = form.read(tab.form, values[:count])
    *rows, picture = values[count + 1 :]
    if picture and not is_inside(Path(picture), (studio.places.user / "inputs", studio.places.outputs)):
        picture = str(keep_input(Path(picture), studio.places))
    return replace(request, input_image=picture or None, loras=lora_rows.read(rows))


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
    now = {
        "progress": (snapshot.revision, use),
        "stage": (making, preview) if making else (choice["picture"], stamp(studio.places.outputs)),
        "thumbs": (choice["picture"], stamp(studio.places.outputs), most),
        "busy": busy(snapshot),
        "plan": (read_values(request_file(studio.places)), choice["card"], snapshot.state, plan_panel.answers(studio)),
    }
    fresh = {name for name, value in now.items() if seen.get(name) != value}
    picture = None
    if {"stage", "thumbs"} & fresh:
        picture = gallery.chosen_picture(studio, choice["picture"])
    out = [gr.skip()] * len(tab.live_outputs)
    if "progress" in fresh:
        predicted = predicted_bytes(studio, snapshot.job.request) if snapshot.job else 0
        out[0] = progress_panel(snapshot) + graph(seen.get("use", ()), use, predicted=predicted, told=snapshot.memory)
    if "stage" in fresh:
        out[1] = (
            gallery.preview_stage(Path(preview) if preview else None)
            if making
            else gallery.stage(studio, picture)
        )
        out[2] = "" if making else gallery.receipt(studio, picture)
        for i in range(len(tab.actions)):
            out[7 + i] = gr.update(visible=not making and picture is not None)
    if "thumbs" in fresh:
        out[3] = gallery.thumbs(studio, shown=picture, most=most)
    if "busy" in fresh:
        out[4] = gr.update(value="Generate another" if now["busy"] else "Generate")
        out[5] = gr.update(interactive=now["busy"])
    if "plan" in fresh:
        out[6] = plan_of(studio, whole_request(studio), choice["card"])
    return out, seen | now


def predicted_bytes(studio: Studio, request: GenerationRequest) -> int:
    """The likely peak of a request on this machine, 0 where nothing is known."""
    try:
        return plan_panel.estimate(studio, request.model, request, what_if="").plan.peak_high_bytes
    except Trouble:
        return 0


def plan_of(studio: Studio, request: GenerationRequest, what_if: str) -> str:
    """The estimate for a request; it offers to be made smaller where it does not fit."""
    try:
        found = plan_panel.estimate(studio, request.model, request, what_if=what_if)
    except Trouble as trouble:
        return plan_panel.no_panel(trouble)
    return plan_panel.panel(found, what_if=what_if, fit=found.plan.verdict == "red")
