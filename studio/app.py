"""Puts the tabs together: one page, one timer, one engine. `python -m studio.app` starts it; `launch.py` does that for
people."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Before Gradio is imported: it reads these once.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import gradio as gr

from backend.families import FAMILIES
from backend.host.access_token import token
from backend.host.engine.client import Engine
from backend.host.process.data_folder_lock import claim, release
from backend.host.process.processes import SUPERVISED
from backend.host.runs import runs
from backend.host.shutdown import Ending, end_all
from backend.schema import login
from backend.schema.messages import Trouble
from backend.schema.paths import places
from backend.system import gpu_probe
from studio import preferences
from studio.generate import events, gallery, layout, lora_rows
from studio.generate import tab as generate
from studio.models import events as models_events
from studio.models import tab as models
from studio.panels import engine_status, memory_graph
from studio.serving import server
from studio.serving.allowed_hosts import Hosts
from studio.serving.credentials import Keys
from studio.serving.sessions import limit_arenas
from studio.state import library, saved_forms
from studio.state.context import Studio, live
from studio.train import events as train_events
from studio.train import tab as train
from studio.widgets import form, handler_errors, theme
from studio.widgets.field_sync import QUIET, ask, ask_at_first
from studio.widgets.formatting import notice

TICK_SECONDS = 0.7
UPLOADS_KEPT = (3600, 24 * 3600)  # looked at every hour, removed after a day


def build(studio: Studio) -> gr.Blocks:
    """The whole page. Nothing runs yet."""
    # Where Gradio keeps what is sent and copies what it shows. Each component takes it when it is made, and only there
    # does the server look.
    os.environ["GRADIO_TEMP_DIR"] = str(studio.uploads)
    form.clamp_sliders()
    form.pass_broken_pictures()
    with gr.Blocks(title="Loft", analytics_enabled=False, fill_width=True, delete_cache=UPLOADS_KEPT) as page:
        ui = saved_forms.browser_choices()
        shown, most, looks = gr.State({}), gr.State(gallery.PAGE_PICTURES), gr.State(0)
        timer = gr.Timer(TICK_SECONDS, active=False)  # until the form is filled
        here = gr.Textbox(visible=False)  # filled in by the page's script with the tab that is looked at
        strip = live(name="strip")
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab("Generate", id="generate", elem_id="tab-generate"):
                generate_tab = layout.build(studio)
            with gr.Tab("LoRAs and models", id="models", elem_id="tab-models"):
                models_tab = models.build(studio)
            with gr.Tab("Train", id="train", elem_id="tab-train"):
                train_tab = train.build(studio)
            with gr.Tab("Preferences", id="preferences", elem_id="tab-preferences"):
                preferences_tab = preferences.build(studio)
        outputs = [strip, *generate_tab.live_outputs, *models_tab.live_outputs, *train_tab.live_outputs, shown]

        # What the regions depend on is never kept in `shown`: only ticks write that, and two may overlap.
        wishes = {"most": most, "looks": looks, "search": models_tab.search, "only": models_tab.only, "tab": here}

        def tick(choice: dict, seen: dict, *wished):
            choice |= dict(zip(wishes, wished, strict=True))
            return _draw(studio, (generate_tab, models_tab, train_tab), choice, seen)

        look = {"inputs": [ui, shown, *wishes.values()], "outputs": outputs, "js": theme.LOOK} | QUIET
        timer.tick(tick, trigger_mode="once", **look)

        def redraw(event):
            return event.then(tick, **look)

        def use_lora(event):
            rows = generate_tab.rows
            head = [ui, generate_tab.form.controls["model"], rows.count, *rows.inputs]
            outputs = [ui, tabs, generate_tab.said, *rows.outputs]
            return redraw(ask(event.then, add_lora, head, [prompt_box], outputs, generate_tab.keeping))

        def add_lora(choice: dict, model: str, count: int, *values):
            *rows, prompt = values
            choices = library.lora_choices(library.loras(studio), studio, model)
            uses = lora_rows.with_lora(lora_rows.pairs(rows)[:count], choice["lora"])
            spec = models.chosen(studio, choice["lora"])
            words = events.with_trigger(prompt, spec.trigger_words if spec else ())
            shown_rows = lora_rows.show(uses, choices)
            said = notice(library.other_base(spec, model, studio), kind="warn")
            return [words], choice | {"picture": ""}, gr.Tabs(selected="generate"), said, *shown_rows

        prompt_box = generate_tab.form.controls["prompt"]
        events.wire(studio, generate_tab, ui, most, redraw)
        models_events.wire(studio, models_tab, ui, looks, redraw, use_lora, train_tab, tabs)
        train_events.wire(studio, train_tab, ui, redraw, use_lora)
        preferences.wire(studio, preferences_tab)
        _wire_tabs(studio, tabs, generate_tab, redraw)
        _wire_load(studio, page, timer, tabs, ui, here, generate_tab, train_tab, preferences_tab, redraw)
        for function in page.fns.values():
            # Nothing shows that it waits. By default the browser would note so for every output that any event ever
            # had, and look each up in the tree of the whole page, twice an event: 0.1 s of its time at each keystroke
            # and each tick.
            function.show_progress_on = [here]
        handler_errors.guard(page)
    return page


def _draw(studio: Studio, parts: tuple, choice: dict, seen: dict) -> list:
    """One tick: the strip, and the regions of the tab that is looked at."""
    generate_tab, models_tab, train_tab = parts
    snapshot = studio.engine.snapshot()
    seen = dict(seen) if isinstance(seen, dict) else {}
    training = runs.live_runs(studio.places)
    pids = [run.process.pid for run in training if run.process] + ([snapshot.pid] if snapshot.pid else [])
    cards = gpu_probe.probe(own_pids=pids)
    use = memory_graph.use_of(pids[0], gpu_probe.choose(cards, studio.preferences().device)) if pids else None
    strip = engine_status.strip(snapshot, cards, training)
    out = [gr.skip() if seen.get("strip") == strip else strip]
    seen["strip"] = strip
    for name, tab, view in (
        ("generate", generate_tab, lambda known: generate.view(studio, generate_tab, choice, known, snapshot, use)),
        ("models", models_tab, lambda known: models.view(studio, models_tab, choice, known)),
        ("train", train_tab, lambda known: train.view(studio, train_tab, choice, known, use)),
    ):
        if choice["tab"] != name:
            out += [gr.skip()] * len(tab.live_outputs)
            continue
        try:
            values, seen[name] = view(seen.get(name, {}))
        except Exception as error:  # the strip, and the tabs that can be drawn, are drawn all the same
            values = [gr.skip()] * len(tab.live_outputs)
            if seen.get("fault") != (fault := handler_errors.why(error)):
                gr.Warning(fault)
                seen["fault"] = fault
        out += values
    return [*out, seen]


def _wire_tabs(studio: Studio, tabs: gr.Tabs, generate_tab, redraw: Callable) -> None:
    def select(event: gr.SelectData):
        if event.index:  # the first tab alone has a choice of LoRAs
            return [gr.skip()] * len(generate_tab.rows.files)
        choices = library.lora_choices(library.loras(studio), studio, generate.remembered(studio)[0].model)
        return [gr.update(choices=choices)] * len(generate_tab.rows.files)

    redraw(tabs.select(select, None, generate_tab.rows.files, **QUIET))


def _wire_load(studio, page, timer, tabs, ui, here, generate_tab, train_tab, preferences_tab, redraw) -> None:
    """Brings the forms back. The page may have been typed into before the answer comes: that stays."""
    parts = (generate_tab, train_tab, preferences_tab)
    groups = [tab.fields if tab is generate_tab else tab.form.components for tab in parts]

    def load(choice: dict, tab: str, *_):
        request, loras = generate.remembered(studio)
        found = library.models(studio)
        choices = library.lora_choices(library.loras(studio), studio, request.model)
        fresh = generate.wants_fresh_seed(studio)
        fields, others = generate.fill(generate_tab, request, loras, choices, fresh=fresh)
        fields[list(generate_tab.form.controls).index("model")] = gr.update(
            choices=library.model_choices(found, studio), value=request.model
        )
        training, rest = train.fill_remembered(studio, train_tab)
        kept = form.fill(preferences_tab.form, studio.preferences())
        return [
            [*fields, *training, *kept],
            choice,
            gr.Timer(active=True),
            gr.Tabs(selected=tab or "generate"),
            *others,
            *rest,
        ]

    outputs = [ui, timer, tabs, *generate_tab.others, *train_tab.others]
    every = [part for group in groups for part in group]
    forms = [tab.keeping for tab in parts]
    event = ask_at_first(page.load, load, [ui, here], every, outputs, forms, js=theme.REMEMBER)
    redraw(event)
    theme_wish = preferences_tab.form.controls["theme"]
    event.then(None, theme_wish, None, js=theme.APPLY_THEME)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m studio.app", description="The studio's page, without installation.", allow_abbrev=False
    )
    login.add_flags(parser)
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--auth-from-stdin", action="store_true", help=argparse.SUPPRESS)  # by launch.py
    parser.add_argument("--data", default="", help="folder for models, LoRAs, runs and pictures")
    parser.add_argument("--fake", action="store_true", help="an engine that paints gradients, to try the page")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves the page until it is interrupted or asked to end; then ends what it started. Returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    limit_arenas()
    try:  # before `Ending`, which reads stdin to its end
        handed = login.logins_from_stdin() if args.auth_from_stdin else None
    except Trouble as trouble:
        print(trouble, file=sys.stderr)
        return 2
    ending = Ending()
    if args.data:
        os.environ["LOFT_DATA"] = str(Path(args.data).resolve())
    here = places()
    try:
        logins = login.check(args, handed)
        proxies = login.networks(args.trusted_proxy)
        claim(here, port=args.port)
        engine = Engine(here, fake=args.fake)
    except (Trouble, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        studio = Studio(here, engine, FAMILIES, args.root_path)
        secret = "" if args.no_token else token(here)
        serve(studio, Keys(secret, logins), Hosts(args.host, tuple(args.allow_host), proxies), port=args.port)
        if not os.environ.get(SUPERVISED):  # the launcher says it
            print(f"Loft is at {login.address(args.host, args.port, '' if logins else secret)}", flush=True)
        ending.wait()
        if end_all(engine, here, ending):
            return 1
    except Trouble as trouble:
        print(trouble, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"The page cannot be served on port {args.port}: {error}", file=sys.stderr)
        return 1
    finally:
        engine.stop()
        release(here)
    return 0


def serve(studio: Studio, keys: Keys, hosts: Hosts, *, port: int) -> gr.Blocks:
    """Starts the server in its own thread and returns once it answers."""
    server.keep_log(studio, "access")  # who was refused and who logged in
    server.keep_log(studio, "faults")  # tracebacks of what nobody foresaw
    page = build(studio)
    server.start(server.application(studio, page, keys=keys, hosts=hosts), hosts.host, port)
    return page


if __name__ == "__main__":
    sys.exit(main())
