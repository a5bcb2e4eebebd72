"""What the engine does, in words and bars: the strip at the top and the panel beside the picture."""

from __future__ import annotations

import time
from collections.abc import Sequence

from backend.host.engine.client import EngineSnapshot, Job
from backend.host.engine.snapshot import STALLED_SECONDS, silent_seconds
from backend.host.runs.status import Run
from backend.schema.memory_plan import Card
from studio.panels.run_differences import told_apart
from studio.panels.run_status import title_of
from studio.widgets.formatting import (
    clock_words,
    count_words,
    notice,
    part_words,
    safe,
    size_words,
    time_words,
    trouble_notice,
)
from studio.widgets.svg import meter, progress

MOST_WAITING = 6
MOST_FAILED = 3


def busy(snapshot: EngineSnapshot) -> bool:
    return snapshot.job is not None


def activity(snapshot: EngineSnapshot, live_runs: Sequence[Run]) -> tuple[str, str]:
    """(look, words) of what has the card now; look is "busy", "bad" or ""."""
    if live_runs:
        run = live_runs[0]
        steps = f", step {run.step} of {run.total_steps}" if run.total_steps else ""
        return "busy", f"Training {title_of(run)}{steps}"
    job = snapshot.job
    if job is not None and silent_seconds(snapshot, time.monotonic()):
        return "bad", "Engine stalled"
    if job is not None:
        return "busy", _job_words(job)
    if snapshot.trouble is not None:
        return "bad", "Engine: the last request failed"
    if snapshot.state == "starting":
        return "busy", "Engine starting"
    return "", "Engine ready" if snapshot.state == "idle" else "Engine asleep, starts when needed"


def _job_words(job: Job) -> str:
    if job.phase == "starting":
        return "Starting the engine"
    if job.phase == "loading":
        return f"Loading {_part(job.part)}" if job.part else "Loading the model"
    if job.phase == "cancelling":
        return "Cancelling"
    return f"Generating, step {job.step} of {job.steps}"


def _part(name: str) -> str:
    return f"the {part_words(name)}"


def strip(snapshot: EngineSnapshot, cards: Sequence[Card], live_runs: Sequence[Run]) -> str:
    """The line at the top: device, memory of card and RAM, what is going on."""
    look, words = activity(snapshot, live_runs)
    meters = []
    name = cards[0].name if cards else ""
    if snapshot.device and snapshot.device not in [card.device for card in cards]:
        name = snapshot.device_name
    for card in cards:
        if card.device != "cpu":
            used = card.total_bytes - card.free_bytes
            say = f"{size_words(used)} used, {size_words(card.free_bytes)} free"
            meters.append(meter("Card" if len(cards) == 1 else card.device, used, card.total_bytes, say))
    if cards:
        total = cards[0].ram_total_bytes or cards[0].total_bytes
        free = cards[0].ram_free_bytes or cards[0].free_bytes
        meters.append(meter("RAM", total - free, total, f"{size_words(total - free)} used, {size_words(free)} free"))
    return (
        f'<div class="strip"><span class="brand">Loft</span><span class="device" title="Device">{safe(name)}</span>'
        f'{"".join(meters)}<span class="now {look}"><i></i>{safe(words)}</span></div>'
    )


def progress_panel(snapshot: EngineSnapshot) -> str:
    """What failed and was not dismissed yet, the request at work, and those that wait."""
    return _troubles(snapshot) + _work(snapshot) + _waiting(snapshot)


def _troubles(snapshot: EngineSnapshot) -> str:
    """What is wrong with the worker itself, then each request that failed, the newest first."""
    failed = snapshot.failed[::-1]
    own = snapshot.trouble
    boxes = []
    if own is not None and not any(answer.trouble is own for answer in failed):
        boxes.append(f'<div class="with-button">{trouble_notice(own)}{_button("Dismiss", "dismiss")}</div>')
    for answer in failed[:MOST_FAILED]:
        about = f"{answer.request.prompt[:80] or '(no prompt)'} · {clock_words(answer.ended_at)}"
        buttons = _button("Try again", "again", answer.id) + _button("Dismiss", "dismiss", answer.id)
        boxes.append(
            f'<div class="with-button failed">{trouble_notice(answer.trouble, about=about)}'
            f'<span class="stacked">{buttons}</span></div>'
        )
    if len(failed) > 1:
        more = f"{len(failed) - MOST_FAILED} more failed. " if len(failed) > MOST_FAILED else ""
        boxes.append(f'<p class="caption all-failed">{more}{_button("Dismiss all", "dismiss")}</p>')
    return "".join(boxes)


def _button(words: str, do: str, what: str = "") -> str:
    return f'<button type="button" class="quiet" data-do="{do}" data-what="{safe(what)}">{words}</button>'


def _work(snapshot: EngineSnapshot) -> str:
    job = snapshot.job
    if job is None:
        return ""
    done, total = (job.done_bytes, job.total_bytes) if job.phase == "loading" else (job.step, job.steps)
    many = f"picture {job.picture + 1} of {job.request.count}" if job.request.count > 1 else ""
    left = f"{time_words(job.seconds_left)} left" if job.seconds_left is not None and job.phase == "generating" else ""
    size = f"{size_words(done)} of {size_words(total)}" if job.phase == "loading" and total else ""
    words = ", ".join(word for word in (_job_words(job), many, size, left) if word)
    bar = progress(done, total if job.phase in ("loading", "generating") else 0)
    stalled = stalled_words(snapshot, time.monotonic())
    told = notice(stalled, kind="warn") if stalled else ""
    return f'<div class="work"><p class="sentence">{safe(words)}</p>{bar}{told}</div>'


def stalled_words(snapshot: EngineSnapshot, now: float) -> str:
    """What to say where the worker stands still, by the monotonic time `now`; "" where it does not."""
    silent = silent_seconds(snapshot, now)
    if not silent:
        return ""
    whole = time_words(silent // STALLED_SECONDS * STALLED_SECONDS)  # so that it is not drawn anew at every tick
    return (
        f"The engine has stalled: it has said nothing for {whole}. It may be suspended, or the machine is out of "
        "memory and swaps. "
        "Wait, or press Cancel twice: that ends the engine, and the next request starts a new one."
    )


def _waiting(snapshot: EngineSnapshot) -> str:
    if not snapshot.queue:
        return ""
    held = any(item.held for item in snapshot.queue)
    shown = snapshot.queue[:MOST_WAITING]
    apart = told_apart([item.request for item in snapshot.queue], skip=("prompt",))
    lines = "".join(
        f'<li><b>{number}</b><span class="what"><span>{safe(item.request.prompt[:80] or "(no prompt)")}</span>'
        f"<small>{safe(', '.join(filter(None, (clock_words(item.submitted_at), said))))}</small></span>{_button('Remove', 'drop', item.id)}</li>"
        for number, (item, said) in enumerate(zip(shown, apart, strict=False), 1)
    )
    if len(snapshot.queue) > MOST_WAITING:
        lines += f'<li><span class="what">and {len(snapshot.queue) - MOST_WAITING} more</span></li>'
    head = f"{count_words(len(snapshot.queue), 'request')} waiting"
    if held:
        head += " since the studio was last open"
    go = _button("Go on with them", "release") if held else ""
    why = f"<p class='caption'>{safe(snapshot.waits_for)}</p>" if snapshot.waits_for else ""
    return f'<div class="queue"><p class="sentence">{head} {go}</p>{why}<ul>{lines}</ul></div>'
