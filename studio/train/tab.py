"""The Train tab: what is trained on the left, the run that is watched on the right, all runs below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gradio as gr

from backend.dataset.check_inputs import named_troubles
from backend.host.runs import runs
from backend.planner.rules.check_training import troubles_of
from backend.schema.messages import Trouble
from backend.schema.settings import knobs_of, to_values
from backend.schema.training.config import TrainingConfig
from backend.schema.untrusted import is_file
from backend.system import gpu_probe
from studio.panels import memory_estimate, run_status
from studio.panels.memory_graph import Use, graph, watched
from studio.state.context import Studio, live
from studio.state.saved_forms import read_config, settled, training_file, with_known
from studio.train import dataset_captions, presets
from studio.train.caption_editor import SCRIPT, editor
from studio.widgets import form, svg
from studio.widgets.field_sync import Keeping, keeping
from studio.widgets.form import Form
from studio.widgets.formatting import faults_style, trouble_notice

ESSENTIAL = ("name", "trigger_word", "lora_rank", "learning_rate", "num_epochs", "max_steps", "sample_prompts")
RUN_BUTTONS = {
    "stop": "Stop and save",
    "kill": "Stop now",
    "resume": "Resume",
    "use": "Use this LoRA",
    "discard": "Move to trash",
}


@dataclass(frozen=True)
class Train:
    """The tab's components that others touch."""

    form: Form
    preset: gr.Dropdown
    dataset_said: gr.HTML
    upload: gr.File
    upload_name: gr.Textbox
    editor: gr.HTML
    page: gr.State
    command: gr.Code
    start: gr.Button
    said: gr.HTML
    plan: gr.HTML
    head: gr.HTML
    buttons: dict[str, gr.Button]
    curve: gr.HTML
    samples: gr.HTML
    results: gr.HTML
    log: gr.HTML
    log_fold: gr.Accordion
    runs: gr.HTML
    run_said: gr.HTML
    faults: gr.HTML
    keeping: Keeping

    @property
    def others(self) -> list:
        """What `fill_remembered` has updates for besides the form's controls."""
        return [self.command, self.editor, self.page, self.preset, self.faults]

    @property
    def live_outputs(self) -> list:
        return [
            self.head,
            self.curve,
            self.samples,
            self.results,
            self.log,
            self.log_fold,
            self.runs,
            self.plan,
            *self.buttons.values(),
        ]


def remembered(studio: Studio) -> TrainingConfig:
    """The last training form; the first time, the first preset on the first set that comes with Loft."""
    file = training_file(studio.places)
    if is_file(file):
        return read_config(file, TrainingConfig)
    config = TrainingConfig()
    found = presets.presets()
    if found:
        config = presets.apply(found[0], config)
    sets = dataset_captions.shipped()
    return with_dataset(config, str(sets[0])) if sets else config


def with_dataset(config: TrainingConfig, folder: str) -> TrainingConfig:
    """`config` on another dataset: its metadata file where it has one, and the hints that come with a shipped set."""
    return with_known(config, set_values(folder, to_values(config)))


def set_values(folder: str, values: dict[str, object]) -> dict[str, object]:
    """The settings that follow from choosing the set in `folder`, where the form has `values` now.

    What another shipped set had brought goes with it; what the user wrote stays where the new set brings nothing.
    """
    table = dataset_captions.metadata_file(Path(folder)) if folder.strip() else None
    brought = dataset_captions.hints(Path(folder)) if folder.strip() else {}
    defaults = to_values(TrainingConfig())
    left = {
        name: defaults[name]
        for other in dataset_captions.shipped()
        for name, value in dataset_captions.hints(other).items()
        if values.get(name) == value
    }
    return {"dataset_base_path": folder, "dataset_metadata_path": str(table) if table else None} | left | brought


def build(studio: Studio) -> Train:
    """Lays the tab out: what is trained and how on the left, the run that is watched and all others on the right."""
    config = remembered(studio)
    with gr.Row(elem_classes="columns"):
        with gr.Column(scale=6, min_width=330, elem_classes="left"):
            source, dataset = _dataset_block(studio, config)
            made, asked = _settings_block(studio, config, {"dataset_base_path": source})
            command = _command_block()
        with gr.Column(scale=6, min_width=330, elem_classes="right"):
            watched_run = _run_block()
    ordered = {item.name: made[item.name] for item in knobs_of(TrainingConfig) if item.name in made}
    return Train(
        form=Form(TrainingConfig, ordered), **dataset, **asked, command=command, **watched_run, keeping=keeping()
    )


def _dataset_block(studio: Studio, config: TrainingConfig) -> tuple[gr.Dropdown, dict]:
    """The set of pictures, its captions, and the way to bring in others."""
    with gr.Column(elem_classes="plain-group"):
        source = gr.Dropdown(
            choices=dataset_captions.choices(studio.places),
            value=config.dataset.dataset_base_path or None,
            allow_custom_value=True,
            label="Pictures",
            info="A set that comes with Loft, one of your own, or the path of any folder.",
            elem_id="set-dataset_base_path",
        )
        said = gr.HTML("", elem_id="dataset-said")
        with gr.Accordion("Pictures and captions", open=False, elem_id="captions-fold", elem_classes="fold"):
            shown = live(name="editor", script=SCRIPT)
            page = gr.State(0)
        with gr.Accordion("Upload pictures", open=False, elem_id="upload-fold", elem_classes="fold"):
            name = gr.Textbox(label="Name of the new set", placeholder="my-cat", elem_id="upload-name")
            upload = gr.File(
                label="Pictures, and text files of the same names for captions",
                file_count="multiple",
                type="filepath",
                height=120,
                elem_id="upload-files",
            )
    return source, {"dataset_said": said, "editor": shown, "page": page, "upload": upload, "upload_name": name}


def _settings_block(studio: Studio, config: TrainingConfig, made: dict) -> tuple[dict, dict]:
    """How to train: preset, the settings that matter most, Start with its estimate, and all other settings in folds."""
    knobs = {item.name: item for item in knobs_of(TrainingConfig)}
    preset = gr.Dropdown(
        choices=presets.choices(studio.places),
        value=presets.OWN,
        label="Preset",
        info="Fills in how to train; pictures, name and prompts stay.",
        elem_id="preset",
    )
    made = made | form.rows([knobs[name] for name in ESSENTIAL], to_values(config))
    with gr.Row(elem_classes="go-row"):
        start = gr.Button("Start training", variant="primary", elem_id="train-start")
    said = gr.HTML("", elem_id="train-said")
    faults = gr.HTML("", elem_id="train-faults", elem_classes="faults")
    plan = live(name="train-plan", script=memory_estimate.TYPED)
    alone = () if len(gpu_probe.probe()) > 1 else ("devices",)
    made |= form.folds(TrainingConfig, config, skip=(*made, *alone, "output_path", "resume_from_checkpoint"))
    return made, {"preset": preset, "start": start, "said": said, "faults": faults, "plan": plan}


def _command_block() -> gr.Code:
    with gr.Accordion("The same as a command", open=False, elem_id="command-fold", elem_classes="fold"):
        return gr.Code(
            language="shell",
            interactive=False,
            wrap_lines=True,
            show_line_numbers=False,
            show_label=False,
            buttons=["copy"],
            lines=2,
            max_lines=14,
            elem_id="command",
        )


def _run_block() -> dict:
    """The run that is watched, with its buttons, and the list of all runs."""
    said = gr.HTML("", elem_id="run-said")
    head = live(name="run-head")
    with gr.Row(elem_classes="actions"):
        buttons = {
            name: gr.Button(
                words,
                size="sm",
                min_width=110,
                visible=False,
                elem_id=f"run-{name}",
                variant="stop" if name == "kill" else "secondary",
            )
            for name, words in RUN_BUTTONS.items()
        }
    curve, samples, results = (live(name=f"run-{name}") for name in ("curve", "samples", "results"))
    with gr.Accordion("Log", open=False, visible=False, elem_id="log-fold", elem_classes="fold") as fold:
        log = live(name="run-log")
    return {
        "run_said": said,
        "head": head,
        "buttons": buttons,
        "curve": curve,
        "samples": samples,
        "results": results,
        "log": log,
        "log_fold": fold,
        "runs": live(name="runs"),
    }


def fill_remembered(studio: Studio, tab: Train) -> tuple[list, list]:
    """Updates for the form's controls, and for `tab.others`."""
    config = remembered(studio)
    values = form.fill(tab.form, config)
    at = list(tab.form.controls).index("dataset_base_path")
    values[at] = gr.update(
        choices=dataset_captions.choices(studio.places), value=config.dataset.dataset_base_path or None
    )
    now = presets.matching(config, presets.presets(studio.places))
    choice = gr.update(choices=presets.choices(studio.places), value=now)
    faults = faults_of(tab, troubles_of_run(studio, config))
    return values, [command_of(config), shown_editor(config, 0), 0, choice, faults]


def shown_editor(config: TrainingConfig, page: int) -> str:
    return drawn_editor(config.dataset.dataset_base_path, page)


def drawn_editor(folder: str, page: int, *, was: str = "", undone: Sequence[str] = ()) -> str:
    return editor(Path(folder), page=page, was=was, undone=undone) if folder.strip() else ""


def command_of(config: TrainingConfig) -> str:
    """The command that trains the same, as one line to paste."""
    return runs.command_text(runs.command_of(config))


def view(studio: Studio, tab: Train, choice: dict, seen: dict, use: Use | None = None) -> tuple[list, dict]:
    """Updates for `tab.live_outputs`, and what was seen; skips what has not changed since."""
    now = run_status.clock()
    found = runs.list_runs(studio.places)
    run = run_status.choose(found, choice["run"])
    one = run_status.signature(run)
    use = use if run and run.live else None
    watching = watched(seen, run.name if run else "", use)
    if use and watching.get("predicted", ("",))[0] != run.name:
        watching |= {"predicted": (run.name, predicted_bytes(studio, run))}
    every = (run.name if run else "", tuple((r.name, r.status, r.step) for r in found), int(now // 60))
    out = [gr.skip()] * len(tab.live_outputs)
    if seen.get("run") != one or seen.get("runs") != every or use:  # every minute too: it says how long ago
        out[0] = run_status.head(run, now=now) + _use_graph(watching, run, use)
    if seen.get("run") != one:
        out[1] = run_status.loss_curve(
            run, runs.loss_series(run.folder, points=svg.MOST_POINTS) if run else runs.LossSeries()
        )
        out[2] = run_status.samples(studio, run)
        out[3] = run_status.results(studio, run)
        out[4] = run_status.log_html(runs.log(run.folder) if run else "")
        can = run_status.buttons(run)
        out[5] = gr.update(visible=run is not None)
        out[8:] = [gr.update(visible=can[name]) for name in tab.buttons]
    if seen.get("runs") != every:
        out[6] = run_status.runs_list(found, shown=run, now=now)
    config = remembered(studio)
    asked = config if "plan" not in seen or settled(training_file(studio.places)) else seen["plan"][0]
    plan = (asked, choice["card"], choice.get("asked", ""), memory_estimate.answers(studio))
    if seen.get("plan") != plan:
        out[7] = plan_of(studio, config, choice["card"], choice.get("asked", ""))
    return out, watching | {"run": one, "runs": every, "plan": plan}


def _use_graph(watching: dict, run: runs.Run | None, use: Use | None) -> str:
    if use is None:
        return ""
    return graph(watching.get("use", ()), use, predicted=watching["predicted"][1], told=run.memory)


def predicted_bytes(studio: Studio, run: runs.Run) -> int:
    """The likely peak of a run with its settings on this machine, 0 where nothing is known."""
    try:
        config = runs.config_of(run.folder)
        return memory_estimate.estimate(studio, config.model, config, what_if="").plan.peak_high_bytes
    except Trouble:
        return 0


def plan_of(
    studio: Studio, config: TrainingConfig, what_if: str, asked: str = "", *, wrong: Sequence[Trouble] | None = None
) -> str:
    """The estimate for a run; it offers to set what the plan wants otherwise than the form has it. `asked`: what of it
    was asked besides. `wrong`: of `troubles_of_run`, where that was asked already."""
    try:
        found = memory_estimate.estimate(studio, config.model, config, what_if=what_if)
        told = memory_estimate.told(studio, config.model, config, what_if=what_if, asked=asked)
    except Trouble as trouble:
        return memory_estimate.no_panel(trouble)
    now, wrong = to_values(config), troubles_of_run(studio, config) if wrong is None else wrong
    refused = trouble_notice(wrong[0]) if wrong else ""
    helps = found.plan.remedy
    settings = found.plan.settings | (helps.settings if helps is not None else {})
    fit = any(now.get(name) != value for name, value in settings.items())
    return memory_estimate.panel(found, what_if=what_if, fit=fit, refused=refused, refused_as="Not so", answers=told)


def troubles_of_run(studio: Studio, config: TrainingConfig) -> list[Trouble]:
    """All that the trainer would refuse of `config` for its settings and the headers of its files, as far as its model
    is known here."""
    found = named_troubles(config)
    try:
        sizes, spec, _ = memory_estimate.sizes_of_model(studio, config.model)
    except Trouble:
        return found  # nothing is known of the model (yet): the run itself tells
    family = next((one for one in studio.families if sizes.family == one.NAME), None)
    if family is None:
        return found
    device = memory_estimate.this_card(studio).device
    return [*found, *troubles_of(config, sizes, family, spec=spec, device=device)]


def check_run(studio: Studio, config: TrainingConfig) -> None:
    """Raises the first of `troubles_of_run`."""
    for trouble in troubles_of_run(studio, config):
        raise trouble


def faults_of(tab: Train, wrong: Sequence[Trouble]) -> str:
    """The sentences of `wrong` at the fields whose settings are to be changed."""
    return faults_style(form.at_fields(tab.form, wrong), prefix="set-")
