"""What a plan did and what would help, in sentences."""

from __future__ import annotations

from dataclasses import replace

from backend.catalog import estimate
from backend.catalog.arrangement import Layout
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


def advice(chosen, terms, card) -> str:
    """What would help most where the plan does not surely fit."""
    phases = [phase for option in chosen for phase in option.phases]
    worst = max(phases, key=lambda phase: phase.peak_high_bytes)
    missing = worst.peak_high_bytes - terms.budget_bytes
    help_with = _smaller(terms, worst)
    ends = f"the most that helps: {help_with}" if help_with else "a card with more memory is needed"
    return f"{missing / GIB:.1f} GiB are missing in the phase “{worst.name}”; {ends}."


def _smaller(terms, worst) -> str:
    """The change of the request that saves the phase most."""
    work = terms.work
    ideas = []
    if (
        worst.name in ("step", "sample", "decode", "encode", "denoise", "cache pictures")
        and work.width * work.height > 256 * 256
    ):
        small = replace(work, width=max(64, work.width // 32 * 16), height=max(64, work.height // 32 * 16))
        ideas.append((_working(terms, small, worst), f"half the width and height ({small.width} × {small.height})"))
    if work.frames > 5:
        fewer = replace(work, frames=(work.frames - 1) // 8 * 4 + 1)
        ideas.append((_working(terms, fewer, worst), f"fewer frames ({fewer.frames})"))
    if work.batch > 1:
        ideas.append((_working(terms, replace(work, batch=1), worst), "a batch of 1"))
    if worst.name == "decode" and not terms.tiles:
        in_tiles = estimate.decode(terms.sizes.parts["vae"], terms.point, work.decoder_dtype, terms.fixed, tiled=True)
        enough = (
            worst.peak_high_bytes - worst.working_bytes + in_tiles.live <= terms.budget_bytes
        )  # and the picture may stay as large as it is
        ideas.append((0 if enough else in_tiles.likely, "a decode in tiles, which the preferences do not allow"))
    if terms.budget_bytes and card_is_shared(worst, terms):
        ideas.append((worst.working_bytes // 2, "closing other programs that use the card"))
    return min(ideas)[1] if ideas else ""


def card_is_shared(worst, terms) -> bool:
    return worst.peak_high_bytes - terms.budget_bytes < GIB and not terms.sizes.published


def _working(terms, work, worst) -> int:
    point = estimate.point_of(terms.sizes, work)
    if worst.name in ("decode", "encode", "cache pictures"):
        return estimate.decode(terms.sizes.parts["vae"], point, work.decoder_dtype, terms.fixed).likely
    if worst.name == "step":
        layout = Layout(checkpointed=True)
        return estimate.step(terms.denoisers[0], point, work, layout, terms.fixed)[0].likely
    return estimate.denoise(terms.denoisers[0], point, work, terms.fixed).likely
