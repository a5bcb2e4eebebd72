"""What a plan did and what would help, in sentences."""

from __future__ import annotations

import itertools

from backend.catalog.family import PART_LABELS
from backend.catalog.quantization.methods import METHODS, read_storage
from backend.planner.candidates import LOSSY
from backend.planner.costs.layout import FP8
from backend.schema.memory_plan import GIB, PlanStep

NAMES = {**PART_LABELS, "text": "text encoder"}  # "text": all encoders, as one
ORDER = (
    "park",
    "quantize",
    "fp8",
    "stream",
    "halves",
    "tile",
    "checkpoint",
    "checkpoint_ram",
    "optimizer_8bit",
    "optimizer_ram",
    "disk",
)


def steps(chosen, terms, groups) -> tuple[PlanStep, ...]:
    """One entry per rung, in the ladder's order, each with how many times longer the job takes than with the rungs
    before it alone: the product of all is how many times longer it takes than without any."""
    rungs: dict[str, list] = {}
    for option in chosen:
        for rung in option.rungs:
            rungs.setdefault(rung, []).append(option)
    order = sorted(rungs, key=lambda one: (ORDER.index(one.partition(":")[0]), one))
    layouts = {name: layout for option in chosen for name, layout in option.layout.parts.items()}
    return tuple(
        PlanStep(
            rung,
            _sentence(rung.partition(":")[0], rung.partition(":")[2], rungs[rung][0], layouts, terms),
            round(price, 3),
            rung.partition(":")[0] in LOSSY,
        )
        for rung, price in zip(order, _prices(chosen, order, groups), strict=True)
    )


def _prices(chosen, order: list[str], groups) -> list[float]:
    """Of each rung in turn."""
    pools = [
        next((each for group in groups for each in group if any(one is option for one in each)), (option,))
        for option in chosen
    ]
    totals = [
        sum(_least_seconds(option, pool, set(order[:count])) for option, pool in zip(chosen, pools, strict=True))
        for count in range(len(order))
    ]
    totals.append(sum(option.seconds for option in chosen))
    there = [one.seconds for one in groups[0][0] if len(groups[0]) == 1 and not one.rungs]
    if totals and there and "park" in order:
        totals[0] = min(totals[0], *there)  # every part on the card at once
    return [after / before if before > 0 else 1.0 for before, after in itertools.pairwise(totals)]


def _least_seconds(option, pool, taken: set[str]) -> float:
    """Of the option's phase, with those of its rungs that are `taken`, and as few of its others as there is a way."""
    own = set(option.rungs)
    return min(one.seconds for one in pool if own & taken <= set(one.rungs) <= own)


def _sentence(kind: str, part: str, option, layouts: dict, terms) -> str:
    on_cpu, name = terms.fixed.on_cpu, NAMES.get(part, part)
    here = "in memory" if on_cpu else "on the card"
    if kind == "park":
        who = "The other parts" if terms.work.quantized else "The parts"
        return f"{who} take turns {here}; {_waiting(layouts, on_cpu=on_cpu)}"
    if kind == "quantize":
        storage = dict(terms.work.quantized).get(part) or next(how for key, how in terms.work.quantized if key != "dit")
        titles = ", ".join(dict.fromkeys(METHODS[rule.method].title for rule in read_storage(storage)))
        return f"The {name} is quantized ({titles}) and stays {here}."
    if kind == "fp8":
        many = sum(one.storage == FP8 for one in option.layout.parts.values()) > 1
        return f"The {name}{'s are' if many else ' is'} stored in FP8: half the memory, pictures differ slightly."
    if kind == "stream":
        many = (
            sum(
                one.mode == "streamed" and bool(terms.sizes.parts[key].blocks)
                for key, one in option.layout.parts.items()
            )
            > 1
        )
        return f"The {name}{'s are' if many else ' is'} streamed: {_streaming(option, terms, here)}"
    if kind == "disk":
        many = sum(layout.home == "disk" for layout in option.layout.parts.values()) > 1
        words = ("s wait", "them") if many else (" waits", "it")
        return f"The {name}{words[0]} on disk, because RAM has no room for {words[1]}."
    return {
        "halves": "The two halves of guidance are computed one after the other.",
        "tile": "Pictures are decoded in tiles; seams are blended.",
        "checkpoint": "Gradient checkpointing: activations are computed again in the backward pass.",
        "checkpoint_ram": "What gradient checkpointing keeps goes to RAM.",
        "optimizer_8bit": "AdamW keeps its moments in 8 bits.",
        "optimizer_ram": "The optimizer's states and its update move to the CPU.",
    }[kind]


def _waiting(layouts: dict, *, on_cpu: bool) -> str:
    """Where each part is until its phase."""
    if on_cpu:
        return "each is read from disk for its phase."
    places: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        if layout.mode != "resident":
            places.setdefault("on disk" if layout.home == "disk" else "in RAM", []).append(NAMES.get(name) or name)
    if len(places) == 1:
        return f"each waits {next(iter(places))} until its phase."
    words = []
    for where, names in sorted(places.items()):
        listed = " and the ".join((", the ".join(names[:-1]), names[-1]) if len(names) > 1 else names)
        words.append(f"the {listed} {'wait' if len(names) > 1 else 'waits'} {where}")
    return f"{', and '.join(words)} until {'their' if len(layouts) > 1 else 'its'} phase."


def _streaming(option, terms, here: str) -> str:
    """How many blocks stay, and what becomes of the others."""
    streamed = [(name, one) for name, one in option.layout.parts.items() if one.mode == "streamed"]
    count = sum(len(terms.sizes.parts[name].blocks) for name, _ in streamed)
    stay = sum(min(one.on_card, len(terms.sizes.parts[name].blocks)) for name, one in streamed)
    if not stay:
        return f"all {count} blocks are fetched while their neighbours compute, none stays {here}."
    rest = "the others are fetched while their neighbours compute" if stay < count else "so none is fetched"
    return f"{stay} of {count} blocks stay {here}, {rest}."


def missing(chosen, terms, card) -> tuple[int, str]:
    """(bytes that the phase which needs most has too little, the same as the beginning of a sentence)."""
    worst = max((phase for option in chosen for phase in option.phases), key=lambda phase: phase.peak_high_bytes)
    nbytes = worst.peak_high_bytes - terms.budget_bytes
    size = f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 10 else f"{max(nbytes / 2**20, 1):.0f} MiB"
    return nbytes, f"{size}{' of RAM' if card.device == 'cpu' else ''} are missing in the phase “{worst.name}”"
