"""What the Train tab's buttons do: choose and caption pictures, start, stop, resume, use the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gradio as gr

from backend.host.runs import runs
from backend.schema.json_values import parse_json, printable
from backend.schema.messages import Trouble
from backend.schema.settings import to_values
from backend.schema.training.config import TrainingConfig
from backend.system.atomic_files import not_written
from studio.panels import memory_estimate, run_status
from studio.state.context import Studio
from studio.state.saved_forms import training_file, with_known, write_config
from studio.train import applied_plan, dataset_captions, presets
from studio.train.tab import (
    Train,
    check_run,
    command_of,
    drawn_editor,
    faults_of,
    plan_of,
    remembered,
    set_values,
    troubles_of_run,
)
from studio.widgets import form
from studio.widgets.field_sync import QUIET, ask, edited, unchanged
from studio.widgets.formatting import faults_style, notice, trouble_notice

# On a narrow window the run lies below the form.
SHOW_RUN = "(said) => { if (!said && innerWidth <= 820) document.querySelector('#run-head').scrollIntoView({behavior: 'smooth'}); }"


def wire(studio: Studio, tab: Train, ui: gr.BrowserState, redraw: Callable, use_lora: Callable) -> None:
    """Binds everything. `use_lora(event)` leads to Generate with the LoRA that the browser's choices name."""
    _wire_form(studio, tab, ui, redraw)
    _wire_dataset(studio, tab)
    _wire_start(studio, tab, ui, redraw)
    _wire_run(studio, tab, ui, redraw, use_lora)


def read_form(studio: Studio, tab: Train, values: tuple) -> TrainingConfig:
    """The config that the form shows. Raises Trouble for a value that cannot be."""
    return form.read(tab.form, values, base=remembered(studio))


def _wire_form(studio: Studio, tab: Train, ui: gr.BrowserState, redraw: Callable) -> None:
    fields = tab.form.components

    def changed(choice: dict, *values):
        config = form.read_or_none(tab.form, values, base=remembered(studio))
        if config is None:
            wrong = form.faults(tab.form, values)
            return gr.skip(), gr.skip(), gr.skip(), faults_style(wrong, prefix="set-")
        try:
            write_config(training_file(studio.places), config)
        except OSError as error:
            said = str(not_written("The form", error))
            return command_of(config), gr.skip(), gr.skip(), faults_style({"name": said}, prefix="set-")
        preset = presets.matching(config, presets.presets(studio.places))
        wrong = troubles_of_run(studio, config)
        plan = plan_of(studio, config, choice["card"], wrong=wrong)
        return command_of(config), plan, preset, faults_of(tab, wrong)

    typed = [part for name, part in tab.form.controls.items() if name != "dataset_base_path"]
    tab.keeping.keep(changed, typed, [ui], fields, [tab.command, tab.plan, tab.preset, tab.faults])

    def act_on_plan(event: gr.EventData, choice: dict, *values):
        if event.do == "card":
            return unchanged(fields), choice | {"card": event.what}
        asked = memory_estimate.asked_again(event.do, event.what, remembered(studio), choice["card"])
        if asked is not None:
            return unchanged(fields), choice | {"asked": asked}
        config = _shown_or_kept(studio, tab, values)
        try:
            found = memory_estimate.estimate(studio, config.model, config, what_if=choice["card"])
        except Trouble:
            return unchanged(fields), choice
        settings = memory_estimate.settings_that_fit(studio, config, found, what_if=choice["card"])
        config = with_known(config, settings)
        wanted = {name: value for name, value in to_values(config).items() if name in settings}
        note = applied_plan.noted(tab.form, wanted, values, config.model.model, choice["fitted"])
        return form.changes(tab.form, wanted), choice | {"fitted": note}

    redraw(ask(tab.plan.act, act_on_plan, [ui], fields, [ui], tab.keeping))

    def take_back(model: str, choice: dict, *values):
        wanted = applied_plan.taken_back(tab.form, values, model, choice["fitted"])
        return form.changes(tab.form, wanted), choice | {"fitted": ""} if wanted else gr.skip()

    model = tab.form.controls["model"]
    ask(edited(model), take_back, [model, ui], fields, [ui], tab.keeping, trigger_mode="always_last")

    def choose_preset(name: str, *values):
        preset = next((item for item in presets.presets(studio.places) if item.name == name), None)
        if preset is None:
            return unchanged(fields), ""
        try:
            config = presets.apply(preset, _shown_or_kept(studio, tab, values))
        except Trouble as trouble:
            return unchanged(fields), trouble_notice(trouble)
        wanted = form.differing(tab.form, config, values)
        wanted = {name: value for name, value in wanted.items() if name not in presets.KEPT}
        return form.changes(tab.form, wanted), notice(preset.about)

    ask(tab.preset.input, choose_preset, [tab.preset], fields, [tab.said], tab.keeping, trigger_mode="always_last")


def _shown_or_kept(studio: Studio, tab: Train, values: tuple) -> TrainingConfig:
    """What the form shows, or what it showed last while it could be read."""
    kept = remembered(studio)
    return form.read_or_none(tab.form, values, base=kept) or kept


def _wire_dataset(studio: Studio, tab: Train) -> None:
    fields = tab.form.components
    outputs = [tab.editor, tab.page, tab.dataset_said]

    def at_once(values: tuple) -> dict[str, object]:
        """The form's values by name, as far as the browser tells them: those that hints touch are plain texts."""
        return dict(zip(tab.form.controls, values, strict=True))

    def taken(folder: str, values: tuple, words: str, *, new: bool = False):
        wanted = set_values(folder, at_once(values))
        if new:
            wanted["dataset_base_path"] = gr.update(choices=dataset_captions.choices(studio.places), value=folder)
        return form.changes(tab.form, wanted), drawn_editor(folder, 0), 0, words

    def choose(folder: str | None, *values):
        return taken((folder or "").strip(), values, "")

    source = tab.form.controls["dataset_base_path"]
    ask(source.input, choose, [source], fields, outputs, tab.keeping, trigger_mode="always_last")

    def upload(files: list[str] | None, name: str, *values):
        try:
            folder, words = dataset_captions.take_upload(files or [], name or "", studio.places)
        except Trouble as trouble:
            return unchanged(fields), *unchanged(outputs[:-1]), trouble_notice(trouble), gr.skip(), gr.skip()
        except OSError as error:
            words = notice(f"The pictures could not be copied: {error.strerror}.", kind="bad")
            return unchanged(fields), *unchanged(outputs[:-1]), words, gr.skip(), gr.skip()
        return *taken(str(folder), values, notice(words, kind="good"), new=True), None, ""

    both = [tab.upload, tab.upload_name]
    ask(tab.upload.upload, upload, both, fields, [*outputs, *both], tab.keeping, trigger_mode="always_last")

    def edit(event: gr.EventData, page: int, *values):
        folder = str(at_once(values)["dataset_base_path"] or "")
        if event.do == "page":
            wanted = int(event.what) if str(event.what).isdecimal() and len(str(event.what)) < 9 else 0
            return unchanged(fields), drawn_editor(folder, wanted), wanted, ""
        try:
            meant = _meant(event.what)
            shown = str(meant.get("set") or folder)
            if event.do == "undo":
                names, words = dataset_captions.undo(Path(shown))
                drawn = drawn_editor(shown, page, undone=names) if shown == folder else gr.skip()
                return unchanged(fields), drawn, page, notice(words, kind="good")
            target, words = dataset_captions.save(Path(shown), meant.get("edits") or {}, studio.places)
        except Trouble as trouble:
            return unchanged(fields), gr.skip(), page, trouble_notice(trouble)
        except OSError as error:
            words = notice(f"The captions could not be saved: {error.strerror}.", kind="bad")
            return unchanged(fields), gr.skip(), page, words
        if str(target) == shown or shown != folder:
            return unchanged(fields), gr.skip(), page, notice(words, kind="good")
        moved = {"dataset_base_path": gr.update(choices=dataset_captions.choices(studio.places), value=str(target))}
        drawn = drawn_editor(str(target), page, was=shown)
        return form.changes(tab.form, moved), drawn, page, notice(words, kind="good")

    ask(tab.editor.act, edit, [tab.page], fields, outputs, tab.keeping, trigger_mode="always_last")


def _meant(what: str | None) -> dict:
    """What a browser says was typed. Raises Trouble for what is none of it."""
    try:
        meant = parse_json(what or "{}")
    except (ValueError, TypeError):
        meant = None
    if not isinstance(meant, dict):
        raise Trouble("bad_value", "What the browser sent cannot be read.", hint="Load the page again.")
    return meant


def _wire_start(studio: Studio, tab: Train, ui: gr.BrowserState, redraw: Callable) -> None:
    def start(choice: dict, *values):
        try:
            config = read_form(studio, tab, values)
            write_config(training_file(studio.places), config)
            if not config.dataset.dataset_base_path.strip():
                raise Trouble("no_dataset", "No pictures are chosen.", hint="Choose a set or write a folder's path.")
            dataset_captions.pictures_in(Path(config.dataset.dataset_base_path))
            check_run(studio, config)
            running = runs.live_runs(studio.places)
            if running:
                name = run_status.title_of(running[0])
                raise Trouble("already_running", f"The run {name} is still computing.", hint="Stop it first, or wait.")
            folder = runs.create(config, studio.places)
            runs.start(folder, places=studio.places, engine=studio.engine)
        except Trouble as trouble:
            return choice, trouble_notice(trouble), ""
        except OSError as error:
            return choice, notice(f"The run could not be started: {error.strerror or error}.", kind="bad"), ""
        return choice | {"run": folder.name}, "", ""

    outputs = [ui, tab.said, tab.run_said]
    started = redraw(tab.start.click(start, [ui, *tab.form.components], outputs, **QUIET))
    started.then(None, tab.said, None, js=SHOW_RUN)


def _chosen(studio: Studio, choice: dict) -> runs.Run:
    run = run_status.choose(runs.list_runs(studio.places), choice.get("run", ""))
    if run is None:
        raise Trouble("missing_run", "There is no run yet.", hint="Start one.")
    return run


def _wire_run(studio: Studio, tab: Train, ui: gr.BrowserState, redraw: Callable, use_lora: Callable) -> None:
    def guarded(act: Callable) -> Callable:
        def handler(choice: dict):
            try:
                return choice, act(_chosen(studio, choice)) or ""
            except Trouble as trouble:
                return choice, trouble_notice(trouble)
            except OSError as error:
                return choice, notice(f"That did not work: {error.strerror or error}.", kind="bad")

        return handler

    def resume(run: runs.Run) -> None:
        runs.resume(run.folder, places=studio.places, engine=studio.engine)

    def discard(run: runs.Run) -> str:
        return notice(f"Moved to {runs.discard(run.folder, places=studio.places)}.", kind="good")

    def stop(run: runs.Run) -> None:
        runs.stop(run.folder)

    def kill(run: runs.Run) -> str:
        gone = runs.kill(run.folder)
        return "" if gone else notice("Some of its processes could not be ended.", kind="bad")

    for name, act in (("stop", stop), ("kill", kill), ("resume", resume), ("discard", discard)):
        redraw(tab.buttons[name].click(guarded(act), ui, [ui, tab.run_said], **QUIET))

    def use(choice: dict):
        run = _chosen(studio, choice)
        return choice | {"lora": printable(run.saved[-1])} if run.saved else choice

    use_lora(tab.buttons["use"].click(use, ui, ui, **QUIET))

    def pick(event: gr.EventData, choice: dict):
        return choice | {"run": event.what}, ""

    redraw(tab.runs.act(pick, ui, [ui, tab.run_said], **QUIET))
