"""Memory in use while a job runs, as a small graph with the prediction as a line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import psutil

from backend.schema.memory_plan import Card
from studio.widgets.formatting import safe, size_words

MOST_POINTS = 120
WIDTH, HEIGHT = 420, 64


@dataclass(frozen=True)
class Use:
    """Bytes at one moment: of our own job, of other programs on the card, and free in RAM.

    `with_libraries`: our own are those of a whole process, so no prediction of weights and working memory compares.
    """

    when: float
    own_bytes: int
    others_bytes: int
    ram_free_bytes: int
    with_libraries: bool = False


def use_of(pid: int, card: Card) -> Use:
    """What process `pid` uses on `card` (probed with it among `own_pids`); on the CPU, its resident memory."""
    own = card.total_bytes - card.free_bytes - card.used_by_others_bytes
    others = card.used_by_others_bytes
    if card.device == "cpu":
        others = 0
        try:
            own = psutil.Process(pid).memory_info().rss if pid else 0
        except psutil.Error:
            own = 0
    return Use(time.time(), max(own, 0), others, card.ram_free_bytes, with_libraries=card.device == "cpu")


def watched(seen: dict, job: str, use: Use | None) -> dict:
    """`seen` with the series of `job` one point longer; another job begins anew, none forgets it."""
    if not job or use is None:
        return {name: value for name, value in seen.items() if name not in ("use", "use_of")}
    points = seen.get("use", ()) if seen.get("use_of") == job else ()
    return seen | {"use_of": job, "use": grown(points, use.when, use.own_bytes)}


def grown(points: Sequence[tuple[float, float]], when: float, value: float) -> list[tuple[float, float]]:
    """The series with one more point; the oldest fall off. A repeated time replaces the last point."""
    kept = [point for point in points if point[0] < when]
    return [*kept, (when, value)][-MOST_POINTS:]


def graph(
    points: Sequence[tuple[float, float]], use: Use | None, *, predicted: float, told: Mapping = MappingProxyType({})
) -> str:
    """Bytes in use over seconds. Empty for fewer than two points. `told`: what the worker last said of its own memory;
    on a CPU its libraries take a share that is no tensor's, and the prediction's line lies that much higher."""
    if use is None or len(points) < 2 or max(value for _, value in points) <= 0:
        return ""
    libraries = told.get("libraries_bytes", 0) if use.with_libraries else 0
    predicted = 0 if use.with_libraries and not libraries else predicted + libraries
    most = max(max(value for _, value in points), predicted, 1.0) * 1.1
    first, last = points[0][0], points[-1][0]

    def x(when: float) -> float:
        return (when - first) / max(last - first, 1e-6) * WIDTH

    def y(value: float) -> float:
        return HEIGHT - value / most * HEIGHT

    line = " ".join(f"{x(when):.1f},{y(value):.1f}" for when, value in points)
    area = f"0,{HEIGHT} {line} {WIDTH},{HEIGHT}"
    mark = (
        f'<line class="predicted" x1="0" x2="{WIDTH}" y1="{y(predicted):.1f}" y2="{y(predicted):.1f}"/>'
        if predicted
        else ""
    )
    words = [f"{size_words(points[-1][1])} in use"]
    words += [f"predicted peak {size_words(predicted)}"] if predicted else []
    words[-1] += (", both with libraries" if predicted else ", with libraries") if use.with_libraries else ""
    if told.get("allocated_bytes"):
        words.append(
            f"allocated {size_words(told['allocated_bytes'])}, reserved {size_words(told.get('used_bytes', 0))}"
        )
    words += [f"others {size_words(use.others_bytes)}"] if use.others_bytes else []
    words += [f"{size_words(use.ram_free_bytes)} of RAM free"]
    said = ", ".join(words)
    return (
        f'<svg class="use-graph" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{safe(said)}">'
        f'<polygon points="{area}"/><polyline points="{line}"/>{mark}</svg><p class="caption">{safe(said)}</p>'
    )
