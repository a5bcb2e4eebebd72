"""What the Generate tab's buttons do: submit, cancel, keep the form, bring settings back from a picture."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gradio as gr

from backend.schema.knobs import to_values
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, request_to_values
from studio import form, gallery, plan_panel, shelf
from studio.generate import Generate, fill, plan_of, read_inputs
from studio.pictures import is_inside, read_settings, to_trash
from studio.restore import restore
from studio.session import read_values, request_file, write_values
from studio.studio import Studio
from studio.words import notice, trouble_notice

QUIET = {"show_progress": "hidden", "queue": False}
GUESS_SEEDS = 2**32
# On a narrow window the picture lies below the form.
SHOW_STAGE = "() => { if (innerWidth <= 820) document.querySelector('#stage').scrollIntoView({behavior: 'smooth'}); }"


def _wire_seed(studio: Studio, tab: Generate) -> None:
    seed = tab.form.controls["seed"]
    tab.dice.click(lambda: (secrets.randbelow(GUESS_SEEDS), False), None, [seed, tab.fresh], **QUIET)

    def last_seed():
        picture = gallery.chosen_picture(studio, "")
        try:
            found = read_settings(picture).seed if picture else None
        except Trouble:
            found = None
        return (gr.skip(), gr.skip()) if found is None else (found, False)

    tab.again.click(last_seed, None, [seed, tab.fresh], **QUIET)


def wire(studio: Studio, tab: Generate, ui: gr.BrowserState, most: gr.State, redraw: Callable) -> None:
    """Binds what the buttons do. `redraw(event)` has the page drawn again after an event."""

    def submit(choice: dict, *values):
        try:
            request = read_inputs(tab, values, studio)
            if values[len(tab.form.controls)]:
                request = replace(request, seed=secrets.randbelow(GUESS_SEEDS))
            if not request.prompt.strip() and not request.input_image:
                raise Trouble("bad_value", "The prompt is empty.", hint="Write what the picture shows.")
            studio.engine.submit(request)
            write_values(request_file(studio.places), request_to_values(request))
        except Trouble as trouble:
            return gr.skip(), trouble_notice(trouble), gr.skip()
        return request.seed, "", choice | {"picture": ""}

    seed = tab.form.controls["seed"]
    tab.go.click(None, None, None, js=SHOW_STAGE)
    for event in (tab.go.click, tab.form.controls["prompt"].submit):
        redraw(event(submit, [ui, *tab.inputs], [seed, tab.said, ui], **QUIET))
    redraw(tab.cancel.click(lambda: studio.engine.cancel(), None, None, **QUIET))

    def changed(choice: dict, *values):
        try:
            request = read_inputs(tab, values, studio)
        except (Trouble, OSError):
            return gr.skip()  # half-typed; the next change comes soon
        write_values(request_file(studio.places), request_to_values(request))
        return plan_of(studio, request, choice["card"])

    changes = [part.input for part in (*tab.form.components, *tab.rows.inputs)]
    changes += [tab.start_picture.change, tab.rows.count.change]
    gr.on(changes, changed, [ui, *tab.inputs], tab.plan, trigger_mode="always_last", **QUIET)

    def fit_model(model: str, *values):
        request = form.read_or_none(tab.form, values)
        if request is None:
            return [gr.skip()] * len(values)
        request = replace(request, **shelf.request_defaults(shelf.models(studio), model, studio))
        write_values(request_file(studio.places), read_values(request_file(studio.places)) | to_values(request))
        return form.fill(tab.form, request)

    model = tab.form.controls["model"]
    model.input(fit_model, [model, *tab.form.components], tab.form.components, **QUIET)

    def act_on_plan(event: gr.EventData, choice: dict, *values):
        if event.do == "card":
            return [*[gr.skip()] * len(tab.form.components), choice | {"card": event.what}]
        try:
            request = smaller_until_it_fits(studio, read_inputs(tab, values, studio), choice["card"])
        except Trouble:
            return [*[gr.skip()] * len(tab.form.components), choice]
        write_values(request_file(studio.places), request_to_values(request))
        return [*form.fill(tab.form, request), choice]

    redraw(tab.plan.act(act_on_plan, [ui, *tab.inputs], [*tab.form.components, ui], **QUIET))
    _wire_seed(studio, tab)
    _wire_pictures(studio, tab, ui, most, redraw)


def _wire_pictures(studio: Studio, tab: Generate, ui: gr.BrowserState, most: gr.State, redraw: Callable) -> None:
    def act(event: gr.EventData, choice: dict, number: int):
        if event.do == "more":
            return choice, number + gallery.PAGE_PICTURES
        return choice | {"picture": event.what}, number

    on = [ui, most]
    redraw(tab.thumbs.act(act, on, on, **QUIET))

    def from_path(path: Path | None):
        if path is None:
            return [gr.skip()] * len(tab.form_outputs) + [notice("There is no picture yet.")]
        try:
            settings = read_settings(path)
        except Trouble as trouble:
            return [gr.skip()] * len(tab.form_outputs) + [trouble_notice(trouble)]
        models = [value for _, value in shelf.model_choices(shelf.models(studio), studio)]
        choices = shelf.lora_choices(shelf.loras(studio), studio)
        files = [Path(value) for _, value in choices]
        back = restore(settings, models=models, loras=files, places=studio.places)
        write_values(request_file(studio.places), request_to_values(replace(back.request, loras=back.loras)))
        words = " ".join(back.missing)
        said = notice(words, kind="warn") if words else notice(f"These are the settings of {path.name}.", kind="good")
        return [*fill(tab, back.request, back.loras, choices, fresh=False), said]

    use, start, trash = tab.actions
    use.click(
        lambda choice: from_path(gallery.chosen_picture(studio, choice["picture"])),
        ui,
        [*tab.form_outputs, tab.said],
        **QUIET,
    )
    tab.drop.upload(lambda path: from_path(Path(path)), tab.drop, [*tab.form_outputs, tab.said], **QUIET)

    def start_from(choice: dict):
        picture = gallery.chosen_picture(studio, choice["picture"])
        if picture is None:
            return gr.skip(), notice("There is no picture to start from.")
        return str(picture), notice(f"What is made next starts from {picture.name}, under “Start from a picture”.")

    start.click(start_from, ui, [tab.start_picture, tab.said], **QUIET)

    def discard(choice: dict):
        picture = gallery.chosen_picture(studio, choice["picture"])
        if picture is None or not is_inside(picture, (studio.places.outputs,)):
            return choice, notice("There is no picture to move.")
        try:
            return choice | {"picture": ""}, notice(f"Moved to {to_trash(picture, studio.places)}.")
        except OSError as error:
            return choice, notice(f"{picture.name} could not be moved: {error.strerror}.", kind="bad")

    redraw(trash.click(discard, ui, [ui, tab.said], **QUIET))

    def act_on_progress(event: gr.EventData):
        if event.do == "release":
            studio.engine.release(event.what or None)
        elif event.do == "drop":
            studio.engine.cancel(event.what)
        elif event.do == "dismiss":
            studio.engine.dismiss()

    redraw(tab.progress.act(act_on_progress, None, None, **QUIET))


def smaller_until_it_fits(studio: Studio, request: GenerationRequest, what_if: str) -> GenerationRequest:
    """The request with both sides shortened in equal proportion, in steps of 16 pixels, as little as the plan needs."""
    long = max(request.width, request.height)

    def with_side(steps: int) -> GenerationRequest:
        width, height = (max(16, round(edge * steps * 16 / long / 16) * 16) for edge in (request.width, request.height))
        return replace(request, width=width, height=height)

    def fits(steps: int) -> bool:
        found = plan_panel.estimate(studio, request.model, with_side(steps), what_if=what_if)
        return found.plan.verdict == "green"

    low, high = 1, long // 16  # a larger picture never needs less, so halving the span finds the largest that fits
    if fits(high) or not fits(low):
        return request
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return with_side(low)


def with_trigger(prompt: str, words: tuple[str, ...]) -> str:
    """The prompt with a LoRA's first trigger word in front, unless one of them is in it already."""
    if not words or any(word.lower() in prompt.lower() for word in words):
        return prompt
    return f"{words[0]}, {prompt}" if prompt.strip() else words[0]
