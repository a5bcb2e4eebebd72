"""The plan: model, card and job -> the fastest arrangement that fits, phase by phase, with its price in seconds and in
exactness.

`plan` is a pure function. The measures are those of the ladder: park what a phase does not need; store in FP8; stream
blocks, as few as needed; tile the VAE; for training also checkpointing, checkpoints in RAM, an 8-bit optimizer; disk at
the bottom. Every combination is arithmetic on a few numbers, so all are compared: of those whose likely peak fits, the
fastest wins, an exact one before a lossy one of the same speed. With more memory more combinations fit, so a larger
card is never slower.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from dataclasses import replace
from pathlib import Path

from backend.catalog.quantization.methods import is_quantized
from backend.catalog.spec import ModelSpec
from backend.planner import candidates, explain, history, suggestions, training_candidates, what_fits
from backend.planner.candidates import FP8, Option, Terms
from backend.planner.costs import disk_usage
from backend.planner.costs.device_speed import ASSUMED, Speed, in_float32, speed_of
from backend.planner.costs.layout import CPU_FIXED, DENOISERS, Fixed, Layout, PartLayout, Work
from backend.planner.costs.model_sizes import ModelSizes, compute_dtypes, sizes_of, spread
from backend.planner.costs.phase_costs import point_of
from backend.planner.costs.weight_bytes import on_card
from backend.planner.workload import work_of_request, work_of_training
from backend.schema.memory_plan import DISK, GIB, Card, VramConfig, VramPlan
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest
from backend.schema.settings import to_values

ORDER = ("cache text", "cache pictures", "text", "encode", "denoise", "decode", "step", "sample", "save")
RAM_SHARE = 0.9  # of the free RAM may hold weights
WORTH = 0.05  # of the time: what a lossy rung has to save


def plan(
    spec: ModelSpec | ModelSizes | str,
    card: Card,
    job: GenerationRequest | Work | object,
    preferences: Preferences | None = None,
    *,
    speed: Speed | None = None,
    fixed: Fixed | None = None,
    folder: Path | None = None,
    known: dict | None = None,
) -> VramPlan:
    """How `job` (a request, a `TrainingConfig`, or a `Work`) is best done with this model on this card.

    `spec` may be the name of a published model. `speed` and `fixed` are what is known of the machine (`speed_of`,
    `learnt.corrected`); `folder`: tables traced here; `known`: of `Work`, found by a run. Never refuses: where nothing
    surely fits, `advice` says what does, and `remedy` is the same to be taken.
    """
    sizes = spec if isinstance(spec, ModelSizes) else sizes_of(spec, folder=folder)
    preferences = preferences or Preferences()
    work, own = work_of(job, sizes, card, known)
    fixed = fixed or fixed_of(card)
    terms = _terms(sizes, work, card, preferences, speed or speed_of(card), fixed)
    groups = training_candidates.groups(terms, own) if work.targets else generation_groups(terms)
    best, fits, verdict = _choose(groups, terms)
    found = _emit(best, terms, card, fits, verdict, groups, own)
    if verdict == "green":
        return found
    missing_bytes, missing = explain.missing(best, terms, card)
    helps = suggestions.find(
        sizes,
        suggestions.State(job, preferences, card),
        lambda state: surely_fits(sizes, state, fixed=fixed, known=known_of_changed(known, job, state.job)),
        missing_bytes=missing_bytes,
    )
    return replace(found, advice=f"{missing}; {suggestions.sentence(helps, card)}.", remedy=helps)


def surely_fits(sizes: ModelSizes, state: suggestions.State, *, fixed: Fixed, known: dict | None = None) -> bool:
    """Whether the plan of a job on a machine is green: some way through each phase fits, and RAM holds what waits
    there."""
    work, own = work_of(state.job, sizes, state.card, known)
    terms = _terms(sizes, work, state.card, state.preferences, ASSUMED, fixed)

    def least_of(terms: Terms) -> tuple[float, float]:
        """(the most bytes over the phases of the group that needs least, bytes in RAM of what fits the card)."""
        high, ram = math.inf, math.inf
        for group in training_candidates.groups(terms, own) if work.targets else generation_groups(terms):
            high = min(high, max(min((one.high for one in found), default=math.inf) for found in group))
            fitting = ([one.off_card_bytes for one in found if one.high <= terms.budget_bytes] for found in group)
            ram = min(ram, sum(min(each, default=math.inf) for each in fitting))
        return high, ram

    high, ram = least_of(replace(terms, least=True))
    return high <= terms.budget_bytes and (ram <= terms.ram_bytes or least_of(terms)[1] <= terms.ram_bytes)


def known_of_changed(known: dict | None, job, changed) -> dict | None:
    """What of a job's `known` holds of a changed one: sides shrink as the settings do; what follows from other settings
    is left out."""
    if not known or changed is job or isinstance(job, Work | GenerationRequest):
        return known
    before, after = to_values(job), to_values(changed)
    differing = {name for name in before if before[name] != after[name]}
    kept = dict(known)
    if differing & {"max_pixels", "width", "height"}:
        area = math.sqrt(after["max_pixels"] / before["max_pixels"])
        for name in ("width", "height"):
            share = after[name] / before[name] if before[name] and after[name] else area
            if name in known:
                kept[name] = math.ceil(known[name] * share / 16) * 16
    for name, causes in FOLLOWS.items():
        if differing & causes:
            kept.pop(name, None)
    return kept


# fields of `Work` that are found out -> settings that they follow from
FOLLOWS = {
    "batch": {"batch_size"},
    "accumulates": {"gradient_accumulation_steps"},
    "samples": {"sample_prompts"},
    "sample_size": {"sample_width", "sample_height", "sample_prompts"},
    "reference_pixels": {"edit_pixels"},
    "reference_tokens": {"edit_pixels"},
    "trained_numel": {"lora_rank", "lora_target_modules", "trainable_models"},
    "rank": {"lora_rank"},
}


def work_of(job, sizes: ModelSizes, card: Card, known: dict | None = None) -> tuple[Work, Layout]:
    """What `job` (a request, a `TrainingConfig`, or a `Work`) asks on `card`, and the arrangement that it names
    itself."""
    if isinstance(job, GenerationRequest):
        work, own = work_of_request(job, sizes, computing=computing_of(card, sizes.family)), Layout()
    elif isinstance(job, Work):
        work, own = job, Layout()
    else:
        work, own = work_of_training(job, sizes)
    return replace(work, **(known or {})), own


def fixed_of(card: Card) -> Fixed:
    """What this process assumes of the device: nothing on a CPU; growing segments, and cuDNN's copies, wherever torch
    has them."""
    if card.device == "cpu":
        return CPU_FIXED
    cuda = card.device.startswith("cuda")
    return Fixed(pool="native" if sys.platform == "win32" or not cuda else "expandable", converts=cuda)


def budget_of(card: Card) -> int:
    """Bytes that a job may take on the card."""
    left = card.total_bytes - card.used_by_others_bytes
    return max(0, (min(card.free_bytes, left) if card.device == "cpu" else left) - card.reserve_bytes)


def computing_of(card: Card, family: str) -> str:
    """The data type that networks of `family` compute in on `card`: the best that both bear."""
    return next((dtype for dtype in compute_dtypes(family) if dtype in card.dtypes), "float32")


def _terms(sizes, work: Work, card: Card, preferences: Preferences, speed: Speed, fixed: Fixed) -> Terms:
    allowed = preferences.allow_fp8 and FP8 in card.dtypes and work.targets != "full"
    plain = work.computing
    if plain == "float32" and card.device != "cpu" and not work.targets:
        plain = "bfloat16"  # as files are: each layer is cast where it computes, and the card holds half the bytes
    storages = (plain, FP8) if allowed else (plain,)
    homes = (DISK,) if card.device == "cpu" else ("ram", DISK)
    ram = card.ram_free_bytes * RAM_SHARE - fixed.ram_bytes if card.ram_free_bytes else math.inf
    speed = speed if fixed.on_cpu or work.computing != "float32" else in_float32(speed)
    return Terms(
        sizes,
        work,
        point_of(sizes, work),
        speed,
        fixed,
        budget_of(card),
        homes,
        storages,
        max(ram, 0),
        preferences.allow_tiles,
        preferences.allow_8bit_optimizer,
    )


def generation_groups(terms: Terms) -> list[list[tuple[Option, ...]]]:
    """Lists of options to combine: once with every part always on the card, once with parts taking turns."""
    in_turn = [candidates.text_options(terms), candidates.denoise_options(terms), candidates.decode_options(terms)]
    if terms.work.quantized:  # what stays is there in the phases of the others too
        return [[tuple(_together(terms, *each) for each in itertools.product(*in_turn))]]
    if terms.least:
        return [list(map(tuple, in_turn))]
    all_there = tuple(
        _together(terms, *each)
        for each in itertools.product(
            candidates.text_options(terms, ("resident",)),
            candidates.denoise_options(terms, ("resident",)),
            candidates.decode_options(terms, ("resident",)),
        )
        if not any(option.lossy for option in each)  # to save a load is no reason to lose exactness
    )
    return [[all_there], list(map(tuple, in_turn))]


def _together(terms: Terms, *each: Option) -> Option:
    """Options whose parts are all on the card at once: each phase also holds the others' weights."""
    parts = {name: layout for option in each for name, layout in option.layout.parts.items()}
    phases = []
    for option in each:
        for phase in option.phases:
            others = {
                name: on_card(terms.sizes.parts[name], layout, False, terms.work.computing)[0]
                for name, layout in parts.items()
                if name not in phase.weights_bytes
            }
            more = sum(others.values())
            phases.append(
                replace(
                    phase,
                    weights_bytes=phase.weights_bytes | others,
                    live_bytes=phase.live_bytes + more,
                    peak_low_bytes=phase.peak_low_bytes + more,
                    peak_high_bytes=phase.peak_high_bytes + more,
                )
            )
    rungs = tuple(dict.fromkeys(rung for option in each for rung in option.rungs))
    layout = merged(each)
    return Option(layout, tuple(phases), rungs, sum(option.lossy for option in each))


def _choose(groups, terms: Terms) -> tuple[tuple[Option, ...], bool, str]:
    """(options, fits, verdict): the fastest combination whose likely peak fits, else the one that needs least.

    What is lossy has to be worth it: each such rung saves WORTH of the time beside the best plan without it, or nothing
    fits without it."""
    fastest: dict[frozenset[str], tuple] = {}  # lossy rungs -> the best with these
    least = None
    for group in groups:
        for chosen in itertools.product(*map(_worth_having, group)):
            if sum(option.off_card_bytes for option in chosen) > terms.ram_bytes:
                continue
            high = max(option.high for option in chosen)
            key = (
                sum(option.seconds for option in chosen),
                sum(option.lossy for option in chosen),
                sum(len(option.rungs) for option in chosen),
                high,
            )
            if high <= terms.budget_bytes:
                given_up = frozenset().union(*(option.lossy_rungs for option in chosen))
                if given_up not in fastest or key < fastest[given_up][0]:
                    fastest[given_up] = key, chosen
            if least is None or (high, *key) < least[0]:
                least = (high, *key), chosen
    if fastest:
        return min(_worth_it(fastest), key=lambda one: one[0])[1], True, "green"
    assert least is not None, "disk needs no RAM, so some combination is always left"
    possible = max(option.low for option in least[1]) <= terms.budget_bytes
    return least[1], possible, "amber" if possible else "red"


def _worth_it(fastest: dict[frozenset[str], tuple]) -> list[tuple]:
    """Of the best plans for each set of lossy rungs, those that no plan with fewer of them comes close to in time."""
    return [
        (key, chosen)
        for given_up, (key, chosen) in fastest.items()
        if all(key[0] <= (1 - WORTH) * other[0] for fewer, (other, _) in fastest.items() if fewer < given_up)
    ]


def _worth_having(found: list[Option]) -> list[Option]:
    """Without options that another one beats in everything."""
    keys = [(one.high, one.seconds, one.lossy, len(one.rungs), one.off_card_bytes) for one in found]
    left: list[int] = []
    for index in sorted(range(len(found)), key=keys.__getitem__):  # what beats an option comes before it
        if not any(all(map(operator.le, keys[other], keys[index])) for other in left):
            left.append(index)
    return [found[index] for index in sorted(left)]


def _emit(
    chosen: tuple[Option, ...], terms: Terms, card: Card, fits: bool, verdict: str, groups, own: Layout
) -> VramPlan:
    layout = merged(chosen)
    phases = sorted((phase for option in chosen for phase in option.phases), key=lambda phase: ORDER.index(phase.name))
    ram = sum(option.off_card_bytes for option in chosen) + terms.fixed.ram_bytes
    phases = tuple(replace(phase, ram_bytes=max(phase.ram_bytes, ram)) for phase in phases)
    resident, streamed = {}, {}
    disk = disk_usage.on_disk(terms.sizes, terms.point, terms.work, layout)
    for name, part in layout.parts.items():
        blocks = len(terms.sizes.parts[name].blocks)
        stay = spread(blocks, part.on_card) if part.mode == "streamed" else tuple(range(blocks))
        resident[name] = stay
        streamed[name] = tuple(index for index in range(blocks) if index not in set(stay))
    return VramPlan(
        fits=fits,
        verdict=verdict,
        phases=phases,
        layout=layout.parts,
        configs=_configs(layout, terms, card),
        vram_limit_gib=_limit(layout, terms),
        resident_blocks=resident,
        streamed_blocks=streamed,
        tiled_vae=layout.tiled,
        halves_apart=layout.halves_apart,
        steps=explain.steps(chosen, terms, groups),
        settings=training_candidates.settings(layout, terms, own) if terms.work.targets else {},
        peak_live_bytes=max((phase.live_bytes for phase in phases), default=0),
        peak_low_bytes=max((phase.peak_low_bytes for phase in phases), default=0),
        peak_high_bytes=max((phase.peak_high_bytes for phase in phases), default=0),
        ram_bytes=ram,
        disk_bytes=terms.sizes.file_bytes,
        disk=disk,
        disk_words=disk_usage.sentence(disk, terms.work.keeps_states),
        seconds=(sum(phase.seconds[0] for phase in phases), sum(phase.seconds[1] for phase in phases)),
    )


def merged(chosen: tuple[Option, ...]) -> Layout:
    """One layout of all options."""
    parts = {name: part for option in chosen for name, part in option.layout.parts.items()}
    trained = next((one.layout for one in chosen if any(phase.name == "step" for phase in one.phases)), Layout())
    apart = any(option.layout.halves_apart for option in chosen)
    return replace(trained, parts=parts, tiled=any(option.layout.tiled for option in chosen), halves_apart=apart)


def _configs(layout: Layout, terms: Terms, card: Card) -> dict[str, VramConfig]:
    """A trainer loads and drops parts by itself; it is told only of those that it must store or move otherwise."""
    return {
        name: config_of(part, card.device, _dtype_of(name, terms))
        for name, part in layout.parts.items()
        if not is_quantized(part.storage) and (not terms.work.targets or part.mode == "streamed" or part.storage == FP8)
    }


def _dtype_of(name: str, terms: Terms) -> str:
    return terms.work.decoder_dtype if name == "vae" else terms.work.computing


def config_of(part: PartLayout, device: str, computing: str) -> VramConfig:
    """The four states that make the engine do what `part` says."""
    narrow = part.storage == "bfloat16" and computing == "float32" and device != "cpu"
    storage = part.storage if narrow or part.storage.startswith("float8") else computing
    if part.mode == "resident":
        if storage == computing:
            return VramConfig()
        return VramConfig(storage, device, storage, device, storage, device, computing, device)
    waits = (None, DISK) if part.home == DISK else (storage, "cpu")
    if part.mode == "parked":
        return VramConfig(*waits, storage, device, storage, device, computing, device)
    return VramConfig(*waits, *waits, storage, device, computing, device)


def _limit(layout: Layout, terms: Terms) -> float | None:
    """What blocks of a streamed part may take on the card, GiB: as many as planned, and half a block, so that it is
    those wherever it is counted."""
    names = [*(name for name in DENOISERS if name in layout.parts), *layout.parts]
    for name in names:
        part, kept = terms.sizes.parts[name], layout.parts[name]
        if kept.mode == "streamed":
            held = sum(on_card(part, kept, True, terms.work.computing)) - part.table.get(
                "tables", 0
            )  # which come later
            spare = part.largest_block(kept.storage, terms.work.computing) // 2
            return math.ceil((held + spare) / GIB * 1e4) / 1e4
    return None


def plan_here(
    spec, card: Card, job, preferences: Preferences | None, *, user: Path, known: dict | None = None
) -> VramPlan:
    """`plan` with what was measured on this machine: calibration and peaks in the folder `user`, traced tables beside
    them. `known`: of `Work`, found by looking ahead."""
    sizes, file = (
        spec if isinstance(spec, ModelSizes) else sizes_of(spec, folder=user / "memory"),
        user / "measured.json",
    )
    fixed = history.corrected(fixed_of(card), card, sizes.family, file, kind=history.kind_of(job))
    speed = speed_of(card, user / "calibration.json")
    known = known or history.known_of(file, card, sizes.family, job)
    found = plan(sizes, card, job, preferences, speed=speed, fixed=fixed, known=known)
    return replace(found, seconds=history.seconds_of(file, card, sizes.family, history.kind_of(job)) or found.seconds)


def answers_here(
    spec,
    card: Card,
    job,
    preferences: Preferences | None,
    *,
    user: Path,
    known: dict | None = None,
    more_gib: float | None = None,
    disk_free: tuple[int, str] | None = None,
) -> tuple[what_fits.Answer, ...]:
    """What is worth asking about `plan_here`, with answers (`questions.answers`)."""
    sizes = spec if isinstance(spec, ModelSizes) else sizes_of(spec, folder=user / "memory")
    preferences, file = preferences or Preferences(), user / "measured.json"
    fixed = history.corrected(fixed_of(card), card, sizes.family, file, kind=history.kind_of(job))
    known = known or history.known_of(file, card, sizes.family, job)
    return what_fits.answers(
        sizes,
        suggestions.State(job, preferences, card),
        plan_here(sizes, card, job, preferences, user=user, known=known),
        lambda state: surely_fits(sizes, state, fixed=fixed, known=known_of_changed(known, job, state.job)),
        plan_of=lambda state: plan_here(sizes, state.card, job, preferences, user=user, known=known),
        more_gib=more_gib,
        disk_free=disk_free,
        num_steps=known.get("total_steps"),
    )
