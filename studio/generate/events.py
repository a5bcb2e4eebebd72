"""What the Generate tab's buttons do: submit, cancel, keep the form, bring settings back from a picture."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gradio as gr

from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest
from backend.system.atomic_files import not_written
from studio.generate import gallery, reference_images
from studio.generate.restore_settings import restore
from studio.generate.tab import (
    Generate,
    drawn_edits,
    fault_of_edits,
    fill,
    for_its_model,
    keep,
    plan_of,
    read_inputs,
    whole_request,
)
from studio.panels import memory_estimate
from studio.state import library
from studio.state.context import Studio
from studio.state.output_files import check_picture, is_inside, read_settings, to_trash
from studio.widgets import form
from studio.widgets.field_sync import QUIET, ask, edited, unchanged
from studio.widgets.formatting import faults_style, notice, trouble_notice

GUESS_SEEDS = 2**32
# On a narrow window the picture lies below the form.
SHOW_STAGE = (
    "(said) => { if (!said && innerWidth <= 820) document.querySelector('#stage').scrollIntoView({behavior: "
    "'smooth'}); }"
)

# What was wrong with a form is no longer so once the form is another; what it merely says stays.
WITHOUT_FAULT = "(said) => (said?.includes('notice bad') ? '' : said)"


def wire(studio: Studio, tab: Generate, ui: gr.BrowserState, most: gr.State, redraw: Callable) -> None:
    """Binds what the buttons do. `redraw(event)` has the page drawn again after an event."""
    _wire_form(studio, tab, ui, redraw)
    _wire_go(studio, tab, ui, redraw)
    _wire_edits(studio, tab)
    _wire_seed(studio, tab)
    _wire_restore(studio, tab, ui)
    _wire_pictures(studio, tab, ui, most, redraw)


def _changes(tab: Generate, wanted: dict[str, object], *, fresh: object = None) -> list:
    """Updates for `tab.fields` that change only the settings of `wanted`, and `fresh`."""
    skip = gr.skip()
    return [*form.changes(tab.form, wanted), skip if fresh is None else fresh, *[skip] * len(tab.rows.inputs)]


def _wire_form(studio: Studio, tab: Generate, ui: gr.BrowserState, redraw: Callable) -> None:
    """The form is kept as it is typed; the model's usual settings and "Make it fit" change it."""

    def changed(choice: dict, *values):
        try:
            request = read_inputs(tab, values, studio)
        except Trouble:
            wrong = form.faults(tab.form, values[: len(tab.form.controls)])
            return gr.skip(), faults_style(wrong, prefix="set-")
        except OSError:
            return gr.skip(), ""  # the picture it starts from is being replaced; the next change comes soon
        try:
            keep(studio, tab, request, values)
        except OSError as error:
            return gr.skip(), faults_style({"prompt": str(not_written("The form", error))}, prefix="set-")
        wrong = fault_of_edits(studio, for_its_model(studio, request))
        return plan_of(studio, request, choice["card"]), faults_style(
            {"edit_images": wrong} if wrong else {}, prefix="set-"
        )

    also = (tab.start_picture.change, tab.rows.count.change)
    tab.keeping.keep(changed, tab.fields, [ui], tab.inputs, [tab.plan, tab.faults], *also)

    def fit_model(model: str | None, *values):
        model = model or ""
        paths = reference_images.paths_of(_value(tab, "edit_images", values))
        wanted = library.request_defaults(library.models(studio), model, studio)
        return _changes(tab, wanted), drawn_edits(studio, model, paths)

    model = tab.form.controls["model"]
    ask(model.input, fit_model, [model], tab.fields, [tab.edited], tab.keeping, trigger_mode="always_last")

    def fit_loras(model: str | None):
        choices = library.lora_choices(library.loras(studio), studio, model or "")
        return [gr.update(choices=choices)] * len(tab.rows.files)

    model.input(fit_loras, model, tab.rows.files, trigger_mode="always_last", **QUIET)

    def act_on_plan(event: gr.EventData, choice: dict, picture: str | None, *values):
        if event.do == "card":
            return unchanged(tab.fields), choice | {"card": event.what}
        job = for_its_model(studio, whole_request(studio))
        asked = memory_estimate.asked_again(event.do, event.what, job, choice["card"])
        if asked is not None:
            return unchanged(tab.fields), choice | {"asked": asked}
        try:
            request = smaller_until_it_fits(studio, read_inputs(tab, (*values, picture), studio), choice["card"])
        except Trouble:
            return unchanged(tab.fields), choice
        names = ("width", "height", "step_cache", "compile")
        return _changes(tab, {name: getattr(request, name) for name in names}), choice

    redraw(ask(tab.plan.act, act_on_plan, [ui, tab.start_picture], tab.fields, [ui], tab.keeping))


def _value(tab: Generate, name: str, values: tuple) -> object:
    """The value of one setting among those of `tab.fields`."""
    return values[list(tab.form.controls).index(name)]


def _wire_edits(studio: Studio, tab: Generate) -> None:
    """The row of pictures to edit: what is done in it changes the form at once."""

    def act(event: gr.EventData, *values):
        before = reference_images.paths_of(_value(tab, "edit_images", values))
        model = str(_value(tab, "model", values) or "")
        try:
            paths = reference_images.changed(before, event.do, event.what, studio.places)
        except Trouble as trouble:
            said = faults_style({"edit_images": str(trouble)}, prefix="set-")
            return unchanged(tab.fields), drawn_edits(studio, model, before), said
        return _changes(tab, {"edit_images": tuple(paths)}), drawn_edits(studio, model, tuple(paths)), ""

    ask(tab.edited.act, act, [], tab.fields, [tab.edited, tab.faults], tab.keeping)


def _wire_go(studio: Studio, tab: Generate, ui: gr.BrowserState, redraw: Callable) -> None:
    def submit(choice: dict, picture: str | None, *values):
        try:
            request = read_inputs(tab, (*values, picture), studio)
            if values[len(tab.form.controls)]:
                request = replace(request, seed=secrets.randbelow(GUESS_SEEDS))
            if not request.prompt.strip() and not request.input_image:
                raise Trouble("bad_value", "The prompt is empty.", hint="Write what the picture shows.")
            wrong = fault_of_edits(studio, for_its_model(studio, request), must=True)
            if wrong:
                faults = faults_style({"edit_images": wrong}, prefix="set-")
                return unchanged(tab.fields), notice(wrong, kind="bad"), gr.skip(), faults
            library.check_size(library.models(studio), request, studio)
            library.check_loras(library.models(studio), request, studio)
            studio.engine.submit(for_its_model(studio, request))
        except Trouble as trouble:
            return unchanged(tab.fields), trouble_notice(trouble), gr.skip(), gr.skip()
        except OSError as error:
            said = f"The request could not be made: {error.strerror or error}."
            return unchanged(tab.fields), notice(said, kind="bad"), gr.skip(), gr.skip()
        said = ""
        try:  # it waits or is at work already: what fails now is no answer to it
            keep(studio, tab, request, values)
        except OSError as error:
            said = notice(f"It is being drawn. {not_written('The form', error)}", kind="warn")
        return _changes(tab, {"seed": request.seed}), said, choice | {"picture": ""}, ""

    for event in (tab.go.click, tab.form.controls["prompt"].submit):
        submitted = ask(event, submit, [ui, tab.start_picture], tab.fields, [tab.said, ui, tab.faults], tab.keeping)
        redraw(submitted).then(None, tab.said, None, js=SHOW_STAGE)
    typed = [edited(tab.form.controls[name]) for name in ("prompt", "width", "height")]
    for event in (*typed, tab.edited.act):
        event(None, tab.said, tab.said, js=WITHOUT_FAULT, **QUIET)
    tab.form.controls["model"].input(
        None, None, tab.said, js="() => ''", **QUIET
    )  # what was said was said of another model
    redraw(tab.cancel.click(lambda: studio.engine.cancel(), None, None, **QUIET))


def _wire_seed(studio: Studio, tab: Generate) -> None:
    def roll(*values):
        return [_changes(tab, {"seed": secrets.randbelow(GUESS_SEEDS)}, fresh=False)]

    ask(tab.dice.click, roll, [], tab.fields, [], tab.keeping)

    def last_seed(*values):
        picture = gallery.chosen_picture(studio, "")
        try:
            found = read_settings(picture).seed if picture else None
        except Trouble:
            found = None
        return [unchanged(tab.fields) if found is None else _changes(tab, {"seed": found}, fresh=False)]

    ask(tab.again.click, last_seed, [], tab.fields, [], tab.keeping)


def _wire_restore(studio: Studio, tab: Generate, ui: gr.BrowserState) -> None:
    """Settings come back from a picture, be it one that was made here or one that was dropped."""

    def from_path(path: Path | None):
        if path is None:
            return unchanged(tab.fields), *unchanged(tab.others), notice("There is no picture yet.")
        try:
            settings = read_settings(path)
        except Trouble as trouble:
            return unchanged(tab.fields), *unchanged(tab.others), trouble_notice(trouble)
        models = [value for _, value in library.model_choices(library.models(studio), studio)]
        found = library.loras(studio)
        files = [Path(value) for _, value in library.lora_choices(found, studio)]
        back = restore(settings, models=models, loras=files, places=studio.places)
        choices = library.lora_choices(found, studio, back.request.model)
        words = " ".join(back.missing)
        said = notice(words, kind="warn") if words else notice(f"These are the settings of {path.name}.", kind="good")
        fields, others = fill(tab, back.request, back.loras, choices, fresh=False)
        return fields, *others, said

    use = tab.actions[0]
    outputs = [*tab.others, tab.said]

    def from_shown(choice: dict, *values):
        return from_path(gallery.chosen_picture(studio, choice["picture"]))

    def from_dropped(path: str | None, *values):
        return from_path(Path(path) if path else None)

    ask(use.click, from_shown, [ui], tab.fields, outputs, tab.keeping)
    ask(tab.drop.upload, from_dropped, [tab.drop], tab.fields, outputs, tab.keeping, trigger_mode="always_last")


def _wire_pictures(studio: Studio, tab: Generate, ui: gr.BrowserState, most: gr.State, redraw: Callable) -> None:
    def act(event: gr.EventData, choice: dict, number: int):
        if event.do == "more":
            return choice, number + gallery.PAGE_PICTURES
        return choice | {"picture": event.what}, number

    on = [ui, most]
    redraw(tab.thumbs.act(act, on, on, **QUIET))
    _, start, trash = tab.actions

    def start_from(choice: dict):
        picture = gallery.chosen_picture(studio, choice["picture"])
        if picture is None:
            return gr.skip(), gr.skip(), notice("There is no picture to start from.")
        try:
            check_picture(picture)
        except Trouble as trouble:
            return gr.skip(), gr.skip(), trouble_notice(trouble)
        said = notice(f"What is made next starts from {picture.name}, under “Start from a picture”.")
        return str(picture), gr.update(open=True), said

    start.click(start_from, ui, [tab.start_picture, tab.start_fold, tab.said], **QUIET)

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
            studio.engine.dismiss(event.what or None)
        elif event.do == "again":
            studio.engine.try_again(event.what)

    redraw(tab.progress.act(act_on_progress, None, None, **QUIET))


def smaller_until_it_fits(studio: Studio, request: GenerationRequest, what_if: str) -> GenerationRequest:
    """The request as the plan's advice changes it; where that is not about the request, with both sides shortened in
    equal proportion, in steps of 16 pixels, as little as the plan needs."""
    helps = memory_estimate.estimate(studio, request.model, request, what_if=what_if).plan.remedy
    if helps is not None and not (helps.preferences or helps.freed_bytes or helps.card_gib):
        return replace(request, **helps.settings)
    long = max(request.width, request.height)

    def with_side(steps: int) -> GenerationRequest:
        width, height = (max(16, round(edge * steps * 16 / long / 16) * 16) for edge in (request.width, request.height))
        return replace(request, width=width, height=height)

    def fits(steps: int) -> bool:
        found = memory_estimate.estimate(studio, request.model, with_side(steps), what_if=what_if)
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
