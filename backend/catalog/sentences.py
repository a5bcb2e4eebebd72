"""What a plan did and what would help, in sentences."""

from __future__ import annotations

from backend.catalog.options import LOSSY
from backend.schema.vram import GIB, PlanStep

NAMES = {"dit": "transformer", "dit2": "second transformer", "text": "text encoder", "vae": "VAE"}
ORDER = (
    "park",
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
    """One entry per rung, in the ladder's order, each with how much slower its phases are than the quickest way."""
    rungs: dict[str, list] = {}
    for option in chosen:
        for rung in option.rungs:
            rungs.setdefault(rung, []).append(option)
    found = []
    for rung in sorted(rungs, key=lambda one: (ORDER.index(one.partition(":")[0]), one)):
        kind, _, part = rung.partition(":")
        price = max(_price(option, groups, rung) for option in rungs[rung])
        found.append(PlanStep(rung, _sentence(kind, part, rungs[rung][0], terms), round(price, 2), kind in LOSSY))
    return tuple(found)


def _price(option, groups, rung: str) -> float:
    """Seconds of the option over those of the quickest in its group that goes without the rung."""
    for group in groups:
        for each in group:
            if any(other is option for other in each):
                without = [other.seconds for other in each if rung not in other.rungs and other.seconds > 0]
                if without and option.seconds > 0:
                    return max(1.0, option.seconds / min(without))
    return 1.0


def _sentence(kind: str, part: str, option, terms) -> str:
    name = NAMES.get(part, part)
    if kind == "park":
        where = "on disk" if terms.homes[0] != "ram" else "in RAM"
        return f"The parts take turns on the card; each waits {where} until its phase."
    if kind == "fp8":
        return f"The {name} is stored in FP8: half the memory, pictures differ slightly."
    if kind == "stream":
        layout = next(layout for layout in option.layout.parts.values() if layout.mode == "streamed")
        count = next(
            len(terms.sizes.parts[key].blocks) for key, one in option.layout.parts.items() if one.mode == "streamed"
        )
        stay = (
            f"{min(layout.on_card, count)} of {count} blocks stay on the card"
            if layout.on_card
            else "No block stays on the card"
        )
        return f"The {name} is streamed: {stay}, the others are fetched while their neighbours compute."
    if kind == "disk":
        return f"The {name} waits on disk, because RAM has no room for it."
    return {
        "halves": "The two halves of guidance are computed one after the other.",
        "tile": "Pictures are decoded in tiles; seams are blended.",
        "checkpoint": "Gradient checkpointing: activations are computed again in the backward pass.",
        "checkpoint_ram": "What gradient checkpointing keeps goes to RAM.",
        "optimizer_8bit": "AdamW keeps its moments in 8 bits.",
        "optimizer_ram": "The optimizer's states and its update move to the CPU.",
    }[kind]


def missing(chosen, terms, card) -> tuple[int, str]:
    """(bytes that the phase which needs most has too little, the same as the beginning of a sentence)."""
    worst = max((phase for option in chosen for phase in option.phases), key=lambda phase: phase.peak_high_bytes)
    nbytes = worst.peak_high_bytes - terms.budget_bytes
    size = f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 10 else f"{max(nbytes / 2**20, 1):.0f} MiB"
    return nbytes, f"{size}{' of RAM' if card.device == 'cpu' else ''} are missing in the phase “{worst.name}”"
