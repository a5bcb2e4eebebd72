"""A plan as text: the table that `python -m backend plan` prints."""

from __future__ import annotations

from collections.abc import Sequence

from backend.schema.memory_plan import GIB, Card, VramPlan


def table(
    found: VramPlan,
    card: Card,
    *,
    title: str = "",
    taken: str = "",
    speed: str = "",
    answers: Sequence[str] = (),
    words: Sequence[str] = (),
    guessed: bool = False,
    scripts: bool = True,
) -> str:
    """Phases as rows, then what was done and why.

    `taken`: the advice as flags. `speed`: where the seconds are from. `answers`: to what one asks next. `words`: what
    the figures rest on; `guessed`: they are a guess; `scripts`: what a script or a run is told is printed too.
    """
    rows = [("phase", "weights", "staging", "working", "adapter", "peak low", "peak high", "RAM", "seconds")]
    for phase in found.phases:
        rows.append(
            (
                phase.name,
                _gib(sum(phase.weights_bytes.values())),
                _gib(phase.staging_bytes),
                _gib(phase.working_bytes),
                _gib(phase.adapter_bytes),
                _gib(phase.peak_low_bytes),
                _gib(phase.peak_high_bytes),
                _gib(phase.ram_bytes),
                _range(phase.seconds),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    ]
    said = (
        f"{title} on {card.name} ({card.total_bytes / GIB:.0f} GiB, {card.reserve_bytes / GIB:.1f} GiB kept free), GiB:"
    )
    verdict = {"green": "It fits.", "amber": "It may just fit.", "red": "It does not fit."}[found.verdict]
    end = [
        f"{verdict.rstrip('.')}{', by a guess' if guessed else ''}. {found.advice}".strip(),
        *words,
        *filter(None, [taken]),
        *(f"- {_priced(step)}" for step in found.steps),
        *filter(None, [found.disk_words, speed]),
        *answers,
    ]
    return "\n".join([said, *lines, *end, *(_for_scripts(found) if scripts else ())])


def _priced(step) -> str:
    price = f" (x{step.slowdown:.2g})" if step.slowdown >= 1.05 else ""
    return f"{step.sentence}{price}"


def _for_scripts(found: VramPlan) -> list[str]:
    lines = []
    for name, config in found.configs.items():
        said = {key: value for key, value in config.to_values().items() if value is not None}
        if said:
            lines.append(f"{name}: {', '.join(f'{key}={value}' for key, value in said.items())}")
    if found.vram_limit_gib is not None:
        lines.append(f"vram_limit={found.vram_limit_gib}")
    if found.tiled_vae:
        lines.append("tiled=True")
    lines += [
        f"--{name} {value}" if value is not True else f"--{name}"
        for name, value in found.settings.items()
        if value not in (False, None)
    ]
    return lines


def line(found: VramPlan, *, guessed: bool = False) -> str:
    """The plan in one cell of a comparison."""
    rungs = "+".join(dict.fromkeys(_short(step.rung, found) for step in found.steps)) or "all resident"
    mark = {"green": "", "amber": "? ", "red": "no: "}[found.verdict]
    return (
        f"{mark}{found.peak_low_bytes / GIB:.1f}-{found.peak_high_bytes / GIB:.1f}{' (a guess)' if guessed else ''} "
        f"{rungs}, "
        f"{_range(found.seconds)} s"
    )


def _short(rung: str, found: VramPlan) -> str:
    if rung == "stream:dit" and "dit" in found.streamed_blocks:
        streamed, resident = len(found.streamed_blocks["dit"]), len(found.resident_blocks["dit"])
        return f"stream {streamed}/{streamed + resident}"
    return rung.replace(":", " ")


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}"


def _range(seconds: tuple[float, float]) -> str:
    if seconds[1] < 0.05:
        return "-"
    low, high = (f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in seconds)
    return low if low == high else f"{low}-{high}"
