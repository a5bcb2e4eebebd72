"""The estimate beside the buttons: what a job will need on a card, phase by phase, before anything is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from dataclasses import replace

from backend.catalog.hub import remote_headers
from backend.catalog.hub.download import is_id
from backend.catalog.hub.find_files import find_spec, names_files
from backend.catalog.spec import ModelSpec
from backend.dataset.look_ahead import Ahead, dataset_changes, look_ahead
from backend.host import background_estimates
from backend.planner.costs.model_sizes import ModelSizes, sizes_of
from backend.planner.page_estimate import WHAT_IF_GIB, Bar, PageEstimate, card_for, estimate_for_page
from backend.planner.plan import answers_here
from backend.planner.what_fits import free_of
from backend.schema.json_values import parse_json, printable
from backend.schema.memory_plan import GIB, Card
from backend.schema.messages import Trouble
from backend.schema.settings import from_values
from backend.schema.training.config import ModelSection, TrainingConfig
from backend.schema.untrusted import exists
from backend.system import gpu_probe
from studio.state import library
from studio.state.context import Studio
from studio.widgets import handler_errors
from studio.widgets.formatting import notice, part_words, safe, size_words, time_words

# What is typed into the field of more free memory, for the event of its button.
TYPED = 'element.loftTyped = () => element.querySelector(".plan-free")?.value || "";'
LOOK_SECONDS = 0.02  # that a keystroke waits for a dataset that is being read
VERDICTS = {"green": ("good", "Fits"), "amber": ("warn", "May just fit"), "red": ("bad", "Does not fit")}
# Colour of a segment by its label; parts that are not named here take turns in the three of the first line.
COLOURS = {
    "staging": "--staging",
    "working memory": "--work",
    "LoRA and optimizer": "--adapter",
    "libraries and fragments": "--libraries",
    "used by others": "--others",
    "reserve": "--reserve",
}
PARTS = {
    "dit": "--part-1",
    "text_encoder": "--part-2",
    "vae": "--part-3",
    "dit2": "--part-4",
    "text_encoder_2": "--part-4",
    "vision": "--part-5",
}
# mixed from the theme's own colours, so that they follow it
MIXED = {
    "--libraries": "color-mix(in srgb, var(--others) 55%, var(--reserve))",
    "--part-4": "color-mix(in srgb, var(--part-2) 45%, var(--part-3))",
    "--part-5": "color-mix(in srgb, var(--part-2) 60%, var(--staging))",
}
PHASE_WORDS = {
    "text": "Read the prompt",
    "encode": "Encode the picture",
    "denoise": "Denoise",
    "decode": "Decode",
    "cache text": "Encode captions",
    "cache pictures": "Encode pictures",
    "step": "Train a step",
    "sample": "Draw samples",
    "save": "Save",
}


def this_card(studio: Studio) -> Card:
    """The card that the preferences mean, with what others use now."""
    wish = studio.preferences()
    pid = studio.engine.snapshot().pid
    cards = gpu_probe.probe(reserve_bytes=int(wish.reserve_gib * GIB), own_pids=[pid] if pid else [])
    return gpu_probe.choose(cards, wish.device)


def sizes_of_model(studio: Studio, model: str | ModelSection) -> tuple[ModelSizes, ModelSpec | None, bool]:
    """Sizes of the model that a form means, the model where its headers are known, and whether somebody is finding out
    more: from its files' headers, here or far away, else as published. `model`: its name, or the section of a training
    form, which may name files one by one. Raises Trouble for a model of which nothing is known (yet)."""
    if isinstance(model, ModelSection):
        if names_files(model):
            spec, _ = find_spec(model, offline=True)
            return sizes_of(spec, folder=background_estimates.folder(studio.places)), spec, False
        model = model.model
    spec = library.model_of(library.models(studio), model, studio)
    far = remote_headers.known(model, studio.families, here=studio.places) if spec is None and is_id(model) else None
    spec = far if isinstance(far, ModelSpec) else spec
    if spec is not None:
        sizes = sizes_of(spec, folder=background_estimates.folder(studio.places))
        return sizes, spec, False  # what it lacks depends on the job
    asks = far is None and background_estimates.ask_name(model, studio.places)
    try:
        return sizes_of(model), None, asks
    except Trouble:
        if asks:
            raise Trouble("estimating", f"the sizes of {model} are being read from where it is.") from None
        raise far or Trouble("not_recognised", f"nothing is known of {model}.") from None


def answers(studio: Studio) -> tuple[int, ...]:
    """Changes when more is known of a model than before, of what jobs on this machine took, or how fast it is."""
    files = (studio.places.user / name for name in ("measured.json", "calibration.json"))
    changed = (file.stat().st_mtime_ns if exists(file) else 0 for file in files)
    return (*background_estimates.stamp(studio.places), *changed, dataset_changes())


def estimate(studio: Studio, model: str | ModelSection, job: object, *, what_if: str) -> PageEstimate:
    """Raises Trouble for a model of which nothing is known, and where no estimate can be made of what the files say."""
    try:
        return _estimate(studio, model, job, what_if=what_if)
    except Trouble:
        raise
    except (
        Exception
    ) as error:  # an estimate is never worth the page: files of models and of measurements may hold anything
        handler_errors.log_fault(error)
        raise Trouble(
            "no_estimate", f"no estimate can be made ({type(error).__name__}: {printable(error)[:200]})."
        ) from None


def _estimate(studio: Studio, model: str | ModelSection, job: object, *, what_if: str) -> PageEstimate:
    sizes, spec, asks = sizes_of_model(studio, model)
    seen = _ahead(studio, job, sizes)
    found = estimate_for_page(
        sizes,
        this_card(studio),
        job,
        studio.preferences(),
        user=studio.places.user,
        what_if_card=what_if,
        known=seen.known,
    )
    if spec is not None and found.missing:
        asks = bool(background_estimates.ask(spec, studio.places, found.missing))
    return replace(found, estimating=asks or seen.looking)


def asked_of(job: object, what_if: str, more: str = "") -> str:
    """The mark that what would fit was asked of this job on this card; `more`: GiB that would be free besides, as it
    was typed."""
    return f"{hashlib.sha256(repr((job, what_if)).encode()).hexdigest()[:12]}|{more}"


def asked_again(act: str, what: str, job: object, what_if: str) -> str | None:
    """The mark after a click on "What would fit?", its closing or its field; None for a click on anything else."""
    if act == "ask":
        return asked_of(job, what_if)
    if act == "more":
        with contextlib.suppress(ValueError):  # a text that is no JSON is what was typed
            what = parse_json(what) if what.startswith('"') else what
        return asked_of(job, what_if, what.strip()[:12])
    return "" if act == "unask" else None


def told(studio: Studio, model: str | ModelSection, job: object, *, what_if: str, asked: str) -> str:
    """The answers as HTML, where they were asked of this very job; else the button that asks."""
    more = asked.partition("|")[2]
    if asked != asked_of(job, what_if, more):
        return '<div class="plan-ask"><button type="button" class="quiet" data-do="ask">What would fit?</button></div>'
    gib, wrong = _typed_gib(more)
    sizes, _, _ = sizes_of_model(studio, model)
    wish, card_ = studio.preferences(), this_card(studio)
    found = answers_here(
        sizes,
        card_for(card_, what_if, wish),
        job,
        wish,
        user=studio.places.user,
        known=_ahead(studio, job, sizes).known,
        more_gib=gib,
        disk_free=free_of(studio.places.models),
    )
    lines = "".join(f"<li>{safe(_page_units(one.words))}</li>" for one in found)
    field = (
        '<label>What if more memory were free? <input type="number" class="plan-free" min="0.1" step="0.1" '
        f'value="{safe(more)}" aria-label="GB that would be free besides"> GB</label>'
        '<button type="button" class="quiet" data-do="more" data-collect>Tell</button>'
        '<button type="button" class="quiet" data-do="unask">Close</button>'
    )
    return f'<div class="plan-answers"><ul>{lines}</ul>{safe(wrong)}<div class="plan-ask">{field}</div></div>'


def _typed_gib(text: str) -> tuple[float | None, str]:
    """(GiB, what is wrong with the text)."""
    if not text:
        return None, ""
    try:
        gib = float(text.replace(",", "."))
    except ValueError:
        gib = math.nan
    if not 0 < gib <= 65536:
        return None, f"{text!r} is no amount of memory; type a number above 0, such as 1.2."
    return gib, ""


def _ahead(studio: Studio, job: object, sizes: ModelSizes) -> Ahead:
    """What a run will be given to do, as far as its dataset has been read by now."""
    if not isinstance(job, TrainingConfig):
        return Ahead()
    family = next((one for one in studio.families if sizes.family == one.NAME), None)
    return look_ahead(job, sizes, family, wait=LOOK_SECONDS)


def settings_that_fit(studio: Studio, config, found: PageEstimate, *, what_if: str) -> dict[str, object]:
    """Settings of a run with which it fits: the plan's, and before them those of its advice, where settings alone are
    advised."""
    helps = found.plan.remedy
    if helps is None or not helps.settings or helps.preferences or helps.freed_bytes or helps.ram_gib or helps.card_gib:
        return found.plan.settings
    changed = from_values(type(config), helps.settings, base=config)
    return helps.settings | estimate(studio, changed.model, changed, what_if=what_if).plan.settings


def no_panel(trouble: Trouble) -> str:
    return f'<div class="plan">{notice(f"No estimate: {trouble.message}")}</div>'


def panel(
    found: PageEstimate,
    *,
    what_if: str,
    fit: bool = False,
    refused: str = "",
    refused_as: str = "Not this size",
    answers: str = "",
) -> str:
    """The whole panel as HTML. `answers`: of `told`. `fit`: offer to change the form as the plan wants it. `refused`: a
    notice why the model would not do this job, however well it fits; `refused_as`: in a word or two."""
    look, words = ("bad", refused_as) if refused else VERDICTS[found.plan.verdict]
    seconds = _seconds_words(found.plan.seconds)
    low, high = size_words(found.plan.peak_low_bytes), size_words(found.plan.peak_high_bytes)
    need = high if low == high else f"{low} to {high}"
    head = (
        f'<div class="plan-head"><span class="pill {look}">{words}</span>{_estimating(found)}'
        f"<span><b>{need}</b> of {size_words(found.card.total_bytes)} on "
        f"{safe(_card_words(found.card))}{seconds}</span>"
        f"{_fit_button(found, fit)}</div>"
    )
    scale = max([found.card.total_bytes, *(bar.high_bytes + _outside(bar) for bar in found.bars)])
    ends = "Memory ends here" if found.card.device == "cpu" else "The card ends here"
    bars = "".join(_bar(bar, scale, found.card.total_bytes, ends) for bar in found.bars)
    return (
        f'<div class="plan">{head}{refused}<div '
        f'class="plan-bars">{bars}</div>{_legend(found)}{_more(found)}{answers}{_cards(what_if)}</div>'
    )


def _estimating(found: PageEstimate) -> str:
    words = [word for word, yes in (("estimating", found.estimating), ("guess", found.guessed)) if yes]
    return "".join(f'<span class="pill">{word}</span>' for word in words)


def _seconds_words(seconds: tuple[float, float]) -> str:
    low, high = seconds
    if high <= 0:
        return ""
    if time_words(low) == time_words(high):
        return f", about {time_words(high)}" if high >= 1 else ", under a second"
    if low < 0.5:
        return f", up to {time_words(high)}"
    return f", {time_words(low)} to {time_words(high)}"


def _card_words(found: Card) -> str:
    """A card that is not here goes by its size, in the page's own unit."""
    if found.measured:
        return "this machine" if found.device == "cpu" else found.name
    name = _page_units(found.name)
    return f"{'an' if name.startswith('8') else 'a'} {name}" if name[:1].isdigit() else name


def _page_units(text: str) -> str:
    """The plan's sentences say GiB; the page says GB for the same (`size_words`)."""
    return re.sub(r"\b([KMGT])iB\b", r"\1B", text)


def _fit_button(found: PageEstimate, fit: bool) -> str:
    if not fit:
        return ""
    words = "Use the plan's settings" if found.plan.verdict == "green" else "Make it fit"
    return f'<button type="button" class="quiet" data-do="fit">{words}</button>'


def _outside(bar: Bar) -> int:
    return sum(nbytes for name, nbytes in bar.segments if name in ("reserve", "used by others"))


def _bar(bar: Bar, scale: int, total: int, ends: str) -> str:
    """One phase: segments from the left, the end of the memory as a line, the peak's band as a bracket."""
    pieces = "".join(
        f'<i style="width:{nbytes / scale * 100:.2f}%;background:{_colour(name)}" '
        f'title="{safe(part_words(name))}: {size_words(nbytes)}"></i>'
        for name, nbytes in bar.segments
    )
    low, high = bar.low_bytes / scale * 100, bar.high_bytes / scale * 100
    band = (
        f'<u style="left:{low:.2f}%;width:{max(high - low, 0.4):.2f}%" title="Peak: {size_words(bar.low_bytes)} to '
        f'{size_words(bar.high_bytes)}"></u>'
    )
    end = f'<s style="left:{min(total / scale * 100, 100):.2f}%" title="{ends}"></s>'
    return (
        f'<span class="plan-phase">{safe(PHASE_WORDS.get(bar.phase, bar.phase))}</span>'
        f'<span class="plan-bar">{pieces}{band}{end}</span><span class="plan-peak">{size_words(bar.high_bytes)}</span>'
    )


def _colour(name: str) -> str:
    """A CSS colour."""
    found = COLOURS.get(name) or PARTS.get(name, "--part-2")
    return MIXED.get(found, f"var({found})")


def _legend(found: PageEstimate) -> str:
    """Parts of the model first, then the rest as in `COLOURS`, whichever phase they first appear in."""
    seen = dict.fromkeys(name for bar in found.bars for name, _ in bar.segments)
    names = [*(name for name in seen if name not in COLOURS), *(name for name in COLOURS if name in seen)]
    items = "".join(
        f'<span><i style="background:{_colour(name)}"></i>{safe(part_words(name))}</span>' for name in names
    )
    return f'<div class="plan-legend">{items}</div>'


def _more(found: PageEstimate) -> str:
    """The plan's sentences behind a fold, and how the last run of this kind compared."""
    alive = max(
        (bar.high_bytes - dict(bar.segments).get("libraries and fragments", 0) for bar in found.bars), default=0
    )
    lines = [
        *found.sentences,
        (
            f"Tensors are {size_words(alive)} of it, what is told as predicted once it has run; libraries and "
            "fragments "
            "come on top."
        ),
    ]
    lines.append(f"{size_words(found.plan.ram_bytes)} of RAM are needed.")
    if found.plan.disk_bytes:
        lines.append(f"The model's files are {size_words(found.plan.disk_bytes)}.")
    if found.estimating:
        lines.append("Estimating: what this model needs is being found out; the figure will get sharper.")
    elif found.guessed:
        lines.append("The working memory of this model could not be traced; that share of the figure is a rough guess.")
    items = "".join(f"<li>{safe(_page_units(line))}</li>" for line in lines)
    advice = f'<p class="caption">{safe(_page_units(found.plan.advice))}</p>' if found.plan.advice else ""
    last = f'<p class="caption">{safe(_page_units(found.last_time))}</p>' if found.last_time else ""
    return (
        f'{advice}{last}<details class="plan-more" data-keep="how"><summary>How it is '
        f"done</summary><ul>{items}</ul></details>"
    )


def _cards(what_if: str) -> str:
    """The what-if selector: this machine, then the usual sizes."""
    choices = [("", "This machine"), *((f"{gib}GiB", f"{gib} GB") for gib in WHAT_IF_GIB)]
    buttons = "".join(
        f'<button type="button" class="chip{" on" if value == what_if else ""}" data-do="card" data-what="{value}"'
        f' aria-pressed="{str(value == what_if).lower()}">{words}</button>'
        for value, words in choices
    )
    return f'<div class="plan-cards" role="group" aria-label="Memory to plan for">{buttons}</div>'
