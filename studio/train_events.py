"""What the Train tab's buttons do: choose and caption pictures, start, stop, resume, use the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gradio as gr

from backend.host import runs
from backend.schema.messages import Trouble
from backend.schema.training import TrainingConfig
from studio import captions, form, plan_panel, presets, run_view
from studio.session import training_file, with_known, write_config
from studio.studio import Studio
from studio.train import Train, command_of, fill, plan_of, remembered, shown_editor, with_dataset
from studio.words import notice, trouble_notice

QUIET = {"show_progress": "hidden", "queue": False}


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
    def changed(choice: dict, *values):
        config = form.read_or_none(tab.form, values, base=remembered(studio))
        if config is None:
            return gr.skip(), gr.skip(), gr.skip()
        write_config(training_file(studio.places), config)
        preset = presets.matching(config, presets.presets(studio.places))
        return command_of(config), plan_of(studio, config, choice["card"]), preset

    parts = [part.input for name, part in tab.form.controls.items() if name != "dataset_base_path"]
    inputs = [ui, *tab.form.components]
    gr.on(parts, changed, inputs, [tab.command, tab.plan, tab.preset], trigger_mode="always_last", **QUIET)

    def act_on_plan(event: gr.EventData, choice: dict, *values):
        if event.do == "card":
            return [*[gr.skip()] * len(tab.form_outputs), choice | {"card": event.what}]
        config = form.read_or_none(tab.form, values, base=remembered(studio)) or remembered(studio)
        try:
            found = plan_panel.estimate(studio, config.model.model, config, what_if=choice["card"])
        except Trouble:
            return [*[gr.skip()] * len(tab.form_outputs), choice]
        config = with_known(config, found.plan.settings)
        write_config(training_file(studio.places), config)
        return [*fill(studio, tab, config), choice]

    redraw(tab.plan.act(act_on_plan, inputs, [*tab.form_outputs, ui], **QUIET))

    def choose_preset(name: str, *values):
        preset = next((item for item in presets.presets(studio.places) if item.name == name), None)
        if preset is None:
            return [gr.skip()] * len(tab.form_outputs) + [""]
        try:
            config = presets.apply(
                preset, form.read_or_none(tab.form, values, base=remembered(studio)) or remembered(studio)
            )
        except Trouble as trouble:
            return [gr.skip()] * len(tab.form_outputs) + [trouble_notice(trouble)]
        write_config(training_file(studio.places), config)
        return [*fill(studio, tab, config), notice(preset.about)]

    tab.preset.input(choose_preset, [tab.preset, *tab.form.components], [*tab.form_outputs, tab.said], **QUIET)


def _wire_dataset(studio: Studio, tab: Train) -> None:
    outputs = [*tab.form_outputs, tab.dataset_said]
    skip = [gr.skip()] * len(tab.form_outputs)

    def take(folder: str, values: tuple, words: str) -> list:
        config = form.read_or_none(tab.form, values, base=remembered(studio)) or remembered(studio)
        config = with_dataset(config, folder)
        write_config(training_file(studio.places), config)
        return [*fill(studio, tab, config), words]

    def choose(folder: str | None, *values):
        return take((folder or "").strip(), values, "")

    source = tab.form.controls["dataset_base_path"]
    source.input(choose, [source, *tab.form.components], outputs, **QUIET)

    def upload(files: list[str] | None, name: str, *values):
        try:
            folder, words = captions.take_upload(files or [], name or "", studio.places)
        except Trouble as trouble:
            return [*skip, trouble_notice(trouble)]
        except OSError as error:
            return [*skip, notice(f"The pictures could not be copied: {error.strerror}.", kind="bad")]
        return take(str(folder), values, notice(words, kind="good"))

    tab.upload.upload(upload, [tab.upload, tab.upload_name, *tab.form.components], outputs, **QUIET)

    def edit(event: gr.EventData, page: int, *values):
        config = form.read_or_none(tab.form, values, base=remembered(studio)) or remembered(studio)
        folder = config.dataset.dataset_base_path
        if event.do == "page":
            change = list(skip)
            change[-3:-1] = [shown_editor(config, int(event.what)), int(event.what)]
            return [*change, ""]
        try:
            target, words = captions.save(Path(folder), json.loads(event.what or "{}"), studio.places)
        except Trouble as trouble:
            return [*skip, trouble_notice(trouble)]
        except OSError as error:
            return [*skip, notice(f"The captions could not be saved: {error.strerror}.", kind="bad")]
        moved = replace(config, dataset=replace(config.dataset, dataset_base_path=str(target)))
        write_config(training_file(studio.places), moved)
        change = fill(studio, tab, moved)
        change[-3:-1] = [shown_editor(moved, page), page]
        return [*change, notice(words, kind="good")]

    tab.editor.act(edit, [tab.page, *tab.form.components], outputs, **QUIET)


def _wire_start(studio: Studio, tab: Train, ui: gr.BrowserState, redraw: Callable) -> None:
    def start(choice: dict, *values):
        try:
            config = read_form(studio, tab, values)
            write_config(training_file(studio.places), config)
            if not config.dataset.dataset_base_path.strip():
                raise Trouble("no_dataset", "No pictures are chosen.", hint="Choose a set or write a folder's path.")
            captions.pictures_in(Path(config.dataset.dataset_base_path))
            running = runs.live_runs(studio.places)
            if running:
                name = run_view.title_of(running[0])
                raise Trouble("already_running", f"The run {name} is still computing.", hint="Stop it first, or wait.")
            folder = runs.create(config, studio.places)
            runs.start(folder, places=studio.places, engine=studio.engine)
        except Trouble as trouble:
            return choice, trouble_notice(trouble), ""
        except OSError as error:
            return choice, notice(f"The run could not be started: {error.strerror or error}.", kind="bad"), ""
        return choice | {"run": folder.name}, "", ""

    outputs = [ui, tab.said, tab.run_said]
    redraw(tab.start.click(start, [ui, *tab.form.components], outputs, **QUIET))


def _chosen(studio: Studio, choice: dict) -> runs.Run:
    run = run_view.choose(runs.list_runs(studio.places), choice.get("run", ""))
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
        return choice | {"lora": str(run.saved[-1])} if run.saved else choice

    use_lora(tab.buttons["use"].click(use, ui, ui, **QUIET))

    def pick(event: gr.EventData, choice: dict):
        return choice | {"run": event.what}, ""

    redraw(tab.runs.act(pick, ui, [ui, tab.run_said], **QUIET))
