"""What the Train tab shows of a run: pure functions from a reading of its folder to HTML."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from backend.host.runs.runs import LossSeries, Run, Sample
from backend.schema.untrusted import known_file
from studio.panels.run_differences import runs_apart
from studio.state.context import Studio
from studio.state.output_files import thumbnail
from studio.widgets.formatting import count_words, pace_words, safe, size_words, time_words, trouble_notice, when_words
from studio.widgets.svg import curve, facts, progress

STATUS_LOOK = {
    "queued": "",
    "starting": "busy",
    "running": "busy",
    "stopping": "busy",
    "complete": "good",
    "stopped": "",
    "died": "bad",
    "failed": "bad",
    "unreadable": "bad",
}
PHASE_WORDS = {
    "loading": "Loading the model",
    "caching": "Encoding pictures and captions",
    "training": "Training",
    "sampling": "Drawing samples",
    "saving": "Saving",
}
MOST_SAMPLE_ROWS = 12
MOST_RUNS = 100
EARLY, FEW_STEPS = (
    5,
    100,
)  # the curve's axis ends at most so many times as far as the run is, and not before so many steps


def choose(runs: Sequence[Run], wish: str) -> Run | None:
    """The run that `wish` (a folder's name) names, else the newest one alive, else the newest."""
    by_name = {run.name: run for run in runs}
    living = [run for run in runs if run.live]
    return by_name.get(wish) or (living or list(runs) or [None])[0]


def pill(status: str) -> str:
    return f'<span class="pill {STATUS_LOOK.get(status, "")}">{safe(status)}</span>'


def title_of(run: Run) -> str:
    """The run's own name without the date in front of it."""
    parts = run.name.split("_", 2)
    return parts[2] if len(parts) == 3 else run.name


def head(run: Run | None, *, now: float) -> str:
    """Status, one sentence, how far, how fast, how long still."""
    if run is None:
        return (
            '<div class="stage empty"><p><b>No runs yet</b></p><p>Choose pictures, press Start, and watch it here. '
            "A run goes on when this page is closed.</p></div>"
        )
    steps = f"{run.step} of {run.total_steps}" if run.total_steps else str(run.step)
    rows = [
        ("Step", steps if run.step or run.total_steps else ""),
        ("Per step", pace_words(run.seconds_per_step) if run.seconds_per_step else ""),
        ("Time left", time_words(run.seconds_left) if run.live and run.seconds_left else ""),
        ("Loss", f"{run.loss:.4g}" if run.loss is not None else ""),
        ("Learning rate", f"{run.learning_rate:.3g}" if run.learning_rate else ""),
        ("Memory", _memory_words(run.memory)),
        ("Started", when_words(run.started_at, now)),
        ("Folder", run.name),
    ]
    say = trouble_notice(run.trouble) if run.trouble else f'<p class="sentence">{safe(_sentence(run))}</p>'
    return (
        f'<div class="run-head"><h2>{safe(title_of(run))}</h2>{pill(run.status)}</div>{say}'
        f"{_bar(run)}{facts(rows, tips={'Loss': loss_words(run)})}{_resumed_words(run)}"
    )


def _sentence(run: Run) -> str:
    """The phase where there is one that is not plain training, else the status."""
    phase = run.phase
    if run.status == "running" and phase and phase.name in PHASE_WORDS and phase.name != "training":
        words = PHASE_WORDS[phase.name]
        return f"{words}, {phase.done} of {phase.total}." if phase.total else f"{words}."
    return run.sentence


def _bar(run: Run) -> str:
    if not run.live and run.status != "complete":
        return progress(run.step, run.total_steps) if run.total_steps else ""
    if run.phase and run.phase.name == "caching":
        return progress(run.phase.done, run.phase.total)
    return progress(run.step, run.total_steps)


def _memory_words(memory: dict) -> str:
    said = [
        (name, memory.get(key))
        for name, key in (("card", "device_bytes"), ("RAM", "ram_bytes"))
        if isinstance(memory.get(key), int | float) and memory.get(key)
    ]
    words = ", ".join(f"{size_words(value)} {name}" for name, value in said)
    measured, predicted = memory.get("measured_bytes"), memory.get("predicted_bytes")
    if not (isinstance(measured, int) and isinstance(predicted, int)):
        return words
    return f"{words}; tensors at most {size_words(measured)}, predicted {size_words(predicted)}".removeprefix("; ")


def _resumed_words(run: Run) -> str:
    lost = run.resumed.get("not_restored") if run.resumed else None
    if not run.resumed:
        return ""
    words = f"Resumed at step {run.resumed.get('step', '?')}."
    if lost:
        words += f" Not restored: {', '.join(map(str, lost)) if isinstance(lost, list | tuple) else lost}."
    return f'<p class="caption">{safe(words)}</p>'


def loss_words(run: Run) -> str:
    """What the number means that is called the run's loss, wherever it stands."""
    last = "first step" if run.loss_steps < 2 else f"last {run.loss_steps} steps"
    return f"Mean of the {last}: single steps jump, for each is at another noise level."


def loss_curve(run: Run | None, series: LossSeries) -> str:
    """The losses as they came, the run's loss as it went, and dots for the pictures held back from training."""
    if run is None or not (series.steps or run.live):
        return ""
    points, mean = (
        list(zip(map(float, series.steps), values, strict=True)) for values in (series.losses, series.means)
    )
    said = (
        f"Loss {run.loss:.4g} at step {run.step}, the mean of the last {run.loss_steps} steps."
        if run.loss is not None
        else ""
    )
    if series.validation:
        step, loss = series.validation[-1]
        said += f" Dots: on pictures that are not trained on, {loss:.4g} at step {step}."
    marks = [(float(step), loss) for step, loss in series.validation]
    drawn = curve(points, mean=mean, marks=marks, name="loss", said=said.strip(), x_end=_axis_end(run))
    return f'<h3 class="section">Loss</h3>{drawn}'


def _axis_end(run: Run) -> int:
    """The last step of the run; early in a long one, less far, so that there is something to see."""
    return min(run.total_steps, max(EARLY * run.step, FEW_STEPS))


def samples(studio: Studio, run: Run | None) -> str:
    """Sample pictures, a row for each step, the newest first; columns are the prompts."""
    if run is None or not run.samples:
        return ""
    steps = sorted({sample.step for sample in run.samples}, reverse=True)
    rows = []
    for step in steps[:MOST_SAMPLE_ROWS]:
        tiles = "".join(
            _sample_tile(studio, s) for s in run.samples if s.step == step and known_file(s.path, (run.folder,))
        )
        rows.append(
            f'<div class="sample-row"><span>{f"step {step}" if step else "before"}</span><div>{tiles}</div></div>'
        )
    prompts = list(dict.fromkeys(sample.prompt for sample in run.samples))
    legend = "".join(f"<li>{safe(prompt)}</li>" for prompt in prompts)
    return f'<h3 class="section">Samples</h3>{"".join(rows)}<ol class="caption prompts">{legend}</ol>'


def _sample_tile(studio: Studio, sample: Sample) -> str:
    small = thumbnail(sample.path, studio.places.cache)
    if small is None:
        return f"<i>{safe(sample.path.name)} cannot be read</i>"
    return (
        f'<a href="{studio.address(sample.path)}" target="_blank" title="{safe(sample.prompt)}">'
        f'<img loading="lazy" src="{studio.address(small)}" alt="{safe(sample.prompt)}"></a>'
    )


def results(studio: Studio, run: Run | None) -> str:
    """The files that the run has saved, the newest first, as links."""
    if run is None or not run.saved:
        return ""
    lines = "".join(f"<li>{_result(studio, path)}</li>" for path in reversed(run.saved[-20:]))
    return f'<h3 class="section">Results</h3><ul class="files">{lines}</ul>'


def _result(studio: Studio, path: Path) -> str:
    try:
        size = size_words(path.stat().st_size)
    except (OSError, ValueError):
        size = ""
    return f'<a href="{studio.address(path)}" download="{safe(path.name)}">{safe(path.name)}</a> <span>{size}</span>'


def runs_list(runs: Sequence[Run], *, shown: Run | None, now: float) -> str:
    """All runs as buttons, the newest first."""
    if not runs:
        return ""
    runs_shown = runs[:MOST_RUNS]
    titles = [title_of(run) for run in runs_shown]
    apart = runs_apart(runs_shown, titles)
    lines = "".join(
        f'<button type="button" class="run-line{" on" if shown and run.name == shown.name else ""}" data-do="run" '
        f'data-what="{safe(run.name)}" '
        f'title="{safe(run.name)}"><b>{safe(title)}{_small(apart.get(run.name, ""))}</b>{pill(run.status)}'
        f"<span>{_line_words(run)}</span><time>{safe(when_words(run.started_at, now))}</time></button>"
        for run, title in zip(runs_shown, titles, strict=True)
    )
    return f'<h3 class="section">{count_words(len(runs), "run")}</h3><div class="run-lines">{lines}</div>'


def _small(words: str) -> str:
    return f"<small>{safe(words)}</small>" if words else ""


def _line_words(run: Run) -> str:
    if run.status == "unreadable":
        return safe(run.sentence)
    if not run.total_steps:
        return ""
    return f"{run.step} / {run.total_steps}"


def buttons(run: Run | None) -> dict[str, bool]:
    """Which of the run's buttons can be pressed."""
    live = run is not None and run.live
    return {
        "stop": live and run.status != "stopping",
        "kill": live,
        "resume": run is not None and run.can_resume,
        "use": run is not None and bool(run.saved),
        "discard": run is not None and not live,
    }


def signature(run: Run | None) -> tuple:
    """Equal signatures mean that nothing of the run needs to be drawn again."""
    return () if run is None else (run.name, *run.revision)


def clock() -> float:
    return time.time()


def log_html(text: str) -> str:
    return (
        f'<pre class="log"><span>{safe(text)}</span></pre>'
        if text
        else '<div class="empty small">Nothing has been written yet.</div>'
    )
