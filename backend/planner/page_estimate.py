"""What the page asks per keystroke: one call, no torch, well under a millisecond beside the plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from backend.catalog.spec import ModelSpec
from backend.planner import history
from backend.planner.costs import required_traces
from backend.planner.costs.device_speed import source_of, speed_of, what_if
from backend.planner.costs.model_sizes import ModelSizes, sizes_of
from backend.planner.costs.phase_costs import point_of
from backend.planner.plan import budget_of, plan_here, work_of
from backend.schema.memory_plan import GIB, Card, VramPlan
from backend.schema.preferences import Preferences

WHAT_IF_GIB = (4, 6, 8, 10, 12, 16, 24, 32, 48, 80)


@dataclass(frozen=True)
class Bar:
    """One phase as a stacked bar: (label, bytes) from the left, and where its peak lies between."""

    phase: str
    segments: tuple[tuple[str, int], ...]
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True)
class PageEstimate:
    """Everything that the page shows beside its button."""

    plan: VramPlan
    card: Card
    budget_bytes: int
    bars: tuple[Bar, ...]
    headline: str  # "Needs 7.9-8.4 of 12.0 GiB: fits, streaming the transformer."
    sentences: tuple[str, ...]  # of the plan, for behind the fold
    last_time: str = ""  # "Last time: predicted 9.8 GiB, measured 9.6 GiB."
    estimating: bool = False  # somebody is finding out more
    guessed: bool = False  # the figure rests on something that no table knows
    missing: dict[str, list[str]] = field(default_factory=dict)  # part -> forms that would make it sharper


def estimate_for_page(
    model: ModelSpec | ModelSizes | str,
    card: Card,
    job,
    preferences: Preferences | None = None,
    *,
    user: Path,
    what_if_card: str = "",
    known: dict | None = None,
) -> PageEstimate:
    """`job`: a GenerationRequest or a TrainingConfig. `user`: the folder of what was measured here (`places().user`).

    `known`: what looking ahead found of the job. `what_if_card`: "" for `card` itself, or "8GiB", "rtx3060", ... Raises
    Trouble for a model of unknown size, ValueError for an unknown card.
    """
    preferences = preferences or Preferences()
    card = card_for(card, what_if_card, preferences)
    sizes = model if isinstance(model, ModelSizes) else sizes_of(model, folder=user / "memory")
    found = plan_here(sizes, card, job, preferences, user=user, known=known)
    guessed = is_guess(found, sizes, card, job, known)
    return PageEstimate(
        plan=found,
        card=card,
        budget_bytes=budget_of(card),
        bars=tuple(_bar(phase, card) for phase in found.phases),
        headline=_headline(found, card),
        sentences=tuple(
            filter(
                None,
                (
                    *words_of(sizes, guessed=guessed),
                    *map(_priced, found.steps),
                    found.disk_words,
                    _speed_words(user, card, sizes, job),
                ),
            )
        ),
        last_time=_last_time(user, card, sizes, job),
        estimating=bool(sizes.estimating),
        guessed=guessed,
        missing=missing_of(found, sizes, card, job, known),
    )


def card_for(card: Card, what_if_card: str, preferences: Preferences) -> Card:
    """`card`, or where another is named, that one in its machine. Raises ValueError for an unknown one."""
    if not what_if_card:
        return card
    ram = card.ram_total_bytes / GIB or 64.0
    return what_if(what_if_card, ram_gib=ram, reserve_gib=preferences.reserve_gib)[0]


def words_of(sizes: ModelSizes, *, guessed: bool, can: bool = True) -> tuple[str, ...]:
    """Sentences about what a figure for the model of `sizes` rests on: what is guessed, counted as published, or not
    counted. `can`: whether pictures are made with it here."""
    found = []
    if not can:
        found.append(f"{sizes.title} cannot be drawn with here; this is what it would take.")
    if guessed:
        found.append("This is a guess: the working memory of this model, or of this job, was not traced yet.")
    if sizes.presumed:
        found.append(f"Counted as published, not read from files: {', '.join(sizes.presumed)}.")
    if sizes.absent:
        found.append(f"Not counted, because it is not there: {', '.join(sizes.absent)}.")
    return tuple(found)


def missing_of(found: VramPlan, sizes: ModelSizes, card: Card, job, known: dict | None = None) -> dict[str, list[str]]:
    """Part -> forms that the plan `found` of `job` rests on and that no table has."""
    work, layout = work_of(job, sizes, card, known)
    if found.settings.get("use_gradient_checkpointing"):
        layout = replace(layout, checkpointed=True)
    return required_traces.missing(sizes, work, layout, point_of(sizes, work), on_cpu=card.device == "cpu")


def is_guess(found: VramPlan, sizes: ModelSizes, card: Card, job, known: dict | None = None) -> bool:
    """Whether the plan `found` of `job` rests on something that is known of no such network or job."""
    work, layout = work_of(job, sizes, card, known)
    if found.settings.get("use_gradient_checkpointing"):
        layout = replace(layout, checkpointed=True)
    return required_traces.is_guess(sizes, work, layout, point_of(sizes, work), on_cpu=card.device == "cpu")


def _speed_words(user: Path, card: Card, sizes: ModelSizes, job) -> str:
    """Where the seconds are from."""
    if history.seconds_of(user / "measured.json", card, sizes.family, history.kind_of(job)):
        return "Seconds are those that jobs of this kind took here."
    return source_of(speed_of(card, user / "calibration.json"), card.device)


def _bar(phase, card: Card) -> Bar:
    weights = tuple((name, nbytes) for name, nbytes in phase.weights_bytes.items() if nbytes)
    held = sum(nbytes for _, nbytes in weights) + phase.staging_bytes + phase.adapter_bytes + phase.working_bytes
    more = (
        ("staging", phase.staging_bytes),
        ("working memory", phase.working_bytes),
        ("LoRA and optimizer", phase.adapter_bytes),
        ("libraries and fragments", max(0, phase.peak_high_bytes - held)),
        ("reserve", card.reserve_bytes),
        ("used by others", card.used_by_others_bytes),
    )
    return Bar(
        phase.name,
        weights + tuple((name, nbytes) for name, nbytes in more if nbytes),
        phase.peak_low_bytes,
        phase.peak_high_bytes,
    )


def _headline(found: VramPlan, card: Card) -> str:
    low, high = _size(found.peak_low_bytes), _size(found.peak_high_bytes)
    need = high if low == high else f"{low.removesuffix(' GiB')} to {high}"
    words = {
        "green": f"fits{_with(found)}",
        "amber": f"may just fit{_with(found)}",
        "red": "does not fit",
    }[found.verdict]
    return f"Needs {need} of {_size(card.total_bytes)}: {words}. {found.advice}".strip()


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"


def _with(found: VramPlan) -> str:
    words = {
        "park": "parts taking turns",
        "fp8": "FP8 weights",
        "stream": "streaming",
        "tile": "a tiled decode",
        "halves": "guidance in two passes",
        "disk": "weights on disk",
        "checkpoint": "gradient checkpointing",
        "checkpoint_ram": "checkpoints in RAM",
        "optimizer_8bit": "an 8-bit optimizer",
        "optimizer_ram": "the optimizer in RAM",
    }
    kinds = dict.fromkeys(step.rung.partition(":")[0] for step in found.steps)
    return f" with {', '.join(words[kind] for kind in kinds)}" if kinds else ""


def _priced(step) -> str:
    return (
        f"{step.sentence} About {step.slowdown:.2g} times the seconds of the whole job."
        if step.slowdown >= 1.05
        else step.sentence
    )


def _last_time(user: Path, card: Card, sizes: ModelSizes, job) -> str:
    """Of the latest job of this kind on this device, if there was one: the most bytes of tensors alive at once."""
    if not card.measured:
        return ""
    found = history.last(user / "measured.json", card, sizes.family, history.kind_of(job))
    return f"Last time: predicted {_size(found[0])}, measured {_size(found[1])}." if found else ""


def what_if_cards(card: Card, reserve_gib: float = 0.6) -> tuple[Card, ...]:
    """This machine's card, then the usual sizes."""
    ram = card.ram_total_bytes / GIB or 64.0
    return (card, *(replace(what_if(f"{gib}GiB", ram_gib=ram, reserve_gib=reserve_gib)[0]) for gib in WHAT_IF_GIB))
