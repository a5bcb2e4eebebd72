"""How the Generate tab is laid out, block by block as the eye meets them."""

from __future__ import annotations

import gradio as gr

from backend.schema.request import GenerationRequest
from backend.schema.settings import knobs_of, to_values
from studio.generate import lora_rows, reference_images, tab
from studio.generate.tab import Generate
from studio.panels import memory_estimate
from studio.state.context import Studio, live
from studio.widgets import form
from studio.widgets.field_sync import keeping
from studio.widgets.form import Form

# Those that have a place of their own; whatever else a request can hold comes under "More settings".
FIELDS = (
    "model", "prompt", "negative_prompt", "edit_images", "width", "height", "num_inference_steps", "guidance", "seed", "count",
    "denoising_strength",
)  # fmt: skip
NO_FIELD = ("input_image",)
ACTIONS = ("Use these settings", "Start from this picture", "Move to trash")


def build(studio: Studio) -> Generate:
    """The request's form on the left, the picture with its receipt and earlier pictures on the right."""
    request, loras = tab.remembered(studio)
    with gr.Row(elem_classes="columns"):
        with gr.Column(scale=5, min_width=330, elem_classes="left"):
            made, edited = _what(request)
            pressed = _go()
            size, seeds = _numbers(request, fresh=tab.wants_fresh_seed(studio))
            made |= size
            with gr.Column(elem_classes="plain-group"):
                gr.HTML('<h3 class="section">LoRAs</h3>')
                rows = lora_rows.build([], loras)
            strength, start = _start_from(request)
            made |= strength
            made |= form.folds(GenerationRequest, request, skip=(*FIELDS, *NO_FIELD), title="More settings")
            drop = _settings_from()
        with gr.Column(scale=7, min_width=330, elem_classes="right"):
            shown = _shown()
    return Generate(
        form=Form(GenerationRequest, made),
        edited=edited,
        rows=rows,
        drop=drop,
        keeping=keeping(),
        **pressed,
        **seeds,
        **start,
        **shown,
    )


def _control(request: GenerationRequest, name: str, **look) -> gr.components.Component:
    knobs = {item.name: item for item in knobs_of(GenerationRequest)}
    return form.control(knobs[name], to_values(request)[name], **({"info": None} | look))


def _what(request: GenerationRequest) -> tuple[dict, gr.HTML]:
    """Model and words, and the pictures that an editing model works from."""
    made = {"model": gr.Dropdown(label="Model", value=request.model, allow_custom_value=True, elem_id="set-model")}
    made["prompt"] = _control(request, "prompt", placeholder="a red apple on a blue background", max_lines=8)
    made["negative_prompt"] = _control(request, "negative_prompt", lines=1, max_lines=4)
    made["edit_images"], edited = reference_images.build(request)
    return made, edited


def _go() -> dict:
    """The buttons, what they have to say, and the estimate."""
    with gr.Row(elem_classes="go-row"):
        go = gr.Button("Generate", variant="primary", scale=3, min_width=140, elem_id="generate")
        cancel = gr.Button("Cancel", variant="stop", scale=1, min_width=90, elem_id="cancel", interactive=False)
    said = gr.HTML("", elem_id="said")
    faults = gr.HTML("", elem_id="faults", elem_classes="faults")
    return {
        "go": go,
        "cancel": cancel,
        "said": said,
        "faults": faults,
        "plan": live(name="plan", script=memory_estimate.TYPED),
    }


def _numbers(request: GenerationRequest, *, fresh: bool) -> tuple[dict, dict]:
    """Size, steps, guidance and seed: three rows of numbers."""
    with gr.Row(equal_height=True, elem_classes="fields"):
        made = {name: _control(request, name, label=name.capitalize(), min_width=90) for name in ("width", "height")}
        made["count"] = gr.Number(
            label="Pictures", value=request.count, precision=0, step=1, min_width=90, elem_id="set-count"
        )
    with gr.Row(equal_height=True, elem_classes="fields"):
        made |= {name: _control(request, name, min_width=150) for name in ("num_inference_steps", "guidance")}
    with gr.Row(equal_height=True, elem_classes="fields seed-row"):
        made["seed"] = _control(request, "seed", min_width=110)
        dice = gr.Button("Roll", size="sm", min_width=60, scale=0, elem_id="seed-dice")
        again = gr.Button("Last one", size="sm", min_width=80, scale=0, elem_id="seed-last")
    box = gr.Checkbox(label="New seed each time", value=fresh, container=False, elem_id="fresh-seed")
    return made, {"dice": dice, "again": again, "fresh": box}


def _start_from(request: GenerationRequest) -> tuple[dict, dict]:
    """The picture that denoising starts from, and how far to go from it."""
    with gr.Accordion("Start from a picture", open=request.input_image is not None, elem_id="start-from") as fold:
        picture = gr.Image(
            value=request.input_image,
            type="filepath",
            image_mode=None,
            sources=["upload", "clipboard"],
            height=180,
            show_label=False,
            buttons=[],
            elem_id="start-picture",
        )
        knobs = {item.name: item for item in knobs_of(GenerationRequest)}
        help = knobs["denoising_strength"].help
        made = {"denoising_strength": _control(request, "denoising_strength", label="Strength", info=help)}
    return made, {"start_picture": picture, "start_fold": fold}


def _settings_from() -> gr.File:
    with gr.Accordion("Settings from a picture", open=False, elem_id="settings-from"):
        return gr.File(
            label="Drop a PNG that was made here", file_types=[".png"], type="filepath", height=140, elem_id="drop-png"
        )


def _shown() -> dict:
    """The picture and what can be done with it, how far the next one is, the receipt of the one shown, and earlier
    ones."""
    stage = live(name="stage")
    with gr.Row(elem_classes="actions"):
        actions = tuple(
            gr.Button(label, size="sm", min_width=90, visible=False, elem_id=f"picture-{i}")
            for i, label in enumerate(ACTIONS)
        )
    progress, receipt, thumbs = (live(name=name) for name in ("progress", "receipt", "thumbs"))
    return {"stage": stage, "progress": progress, "actions": actions, "receipt": receipt, "thumbs": thumbs}
