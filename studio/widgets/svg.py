"""Small pictures in SVG and HTML: bars, a curve, a meter. Colours come from the stylesheet, so both themes fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from studio.widgets.formatting import safe

CURVE_WIDTH, CURVE_HEIGHT = 640, 170
MOST_POINTS = 320


def meter(label: str, used: float, total: float, words: str) -> str:
    """A labelled bar that is `used / total` full."""
    share = 0.0 if total <= 0 else min(max(used / total, 0.0), 1.0)
    level = "high" if share > 0.92 else "mid" if share > 0.75 else ""
    return (
        f'<span class="meter" title="{safe(label)}: {safe(words)}"><span class="meter-name">{safe(label)}</span>'
        f'<span class="meter-bar"><i class="{level}" style="width:{share * 100:.0f}%"></i></span>'
        f'<span class="meter-words">{safe(words)}</span></span>'
    )


def progress(done: float, total: float) -> str:
    """A bar for work in progress; a moving one where the end is not known."""
    if total <= 0:
        return '<div class="progress unsure"><i></i></div>'
    share = min(max(done / total, 0.0), 1.0) * 100
    return (
        f'<div class="progress" role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{share:.0f}">'
        f'<i style="width:{share:.1f}%"></i></div>'
    )


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: the means of equal runs of neighbours."""
    if len(points) <= most:
        return list(points)
    out = []
    for i in range(most):
        run = points[i * len(points) // most : (i + 1) * len(points) // most]
        out.append((sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)))
    return out


Points = Sequence[tuple[float, float]]


def curve(points: Points, *, mean: Points, marks: Points = (), name: str, said: str = "", x_end: float = 0) -> str:
    """Measured values over steps as a faint line, their running `mean` as a strong one and single `marks` as dots, over
    an axis that ends at step `x_end`. `said` is the line below."""
    points, mean, marks = (_finite(series) for series in (points, mean, marks))
    if len(points) < 2:
        return f'<div class="empty small">The {safe(name)} curve starts with the second step.</div>'
    low, high = _span(points, [*mean, *marks])
    end = max(x_end, points[-1][0], 1)
    left, right, top, bottom = 62, CURVE_WIDTH - 10, 10, CURVE_HEIGHT - 24

    def at(x: float, y: float) -> tuple[str, str]:
        height = min(max((y - low) / (high - low), 0), 1)
        return f"{left + (right - left) * x / end:.1f}", f"{bottom - (bottom - top) * height:.1f}"

    def line(series: Points) -> str:
        return " ".join(",".join(at(x, y)) for x, y in thin(series))

    grid = "".join(
        f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2g}</text>'
        for value, y in ((low + (high - low) * part, bottom - (bottom - top) * part) for part in (0, 0.5, 1))
    )
    dots = "".join('<circle class="mark" r="3" cx="{}" cy="{}"/>'.format(*at(x, y)) for x, y in thin(marks))
    return (
        f'<svg class="curve" viewBox="0 0 {CURVE_WIDTH} {CURVE_HEIGHT}" role="img" aria-label="{safe(said)}">{grid}'
        f'<text x="{left}" y="{CURVE_HEIGHT - 6}">0</text>'
        f'<text x="{right}" y="{CURVE_HEIGHT - 6}" text-anchor="end">{end:.0f} steps</text>'
        f'<polyline class="raw" points="{line(points)}"/><polyline class="mean" points="{line(mean)}"/>{dots}</svg>'
        f'<p class="caption">{safe(said)}</p>'
    )


def _finite(series: Points) -> Points:
    return [(x, y) for x, y in series if y == y and abs(y) < 1e9]


def _span(points: Points, lines: Points) -> tuple[float, float]:
    """Least and most of the axis: a few outliers among `points` are cut off, `lines` are whole."""
    ordered = sorted(y for _, y in points)
    low = min([ordered[0], *(y for _, y in lines)])
    high = max(ordered[min(int(len(ordered) * 0.98), len(ordered) - 1)], *(y for _, y in lines), low + 1e-9)
    return max(low - (high - low) * 0.08, min(low, 0.0)), high + (high - low) * 0.08


def bars(values: Sequence[tuple[str, float]], *, title: str) -> str:
    """One small bar per name, all to one scale."""
    most = max((value for _, value in values), default=0.0)
    if most <= 0:
        return ""
    columns = "".join(
        f'<i style="height:{max(value / most, 0.01) * 100:.0f}%" title="{safe(name)}: {value:.3g}"></i>'
        for name, value in values
    )
    return (
        f'<figure class="bars"><figcaption>{safe(title)}</figcaption><div class="bars-row">{columns}</div>'
        f'<div class="bars-ends"><span>{safe(values[0][0])}</span><span>{safe(values[-1][0])}</span></div></figure>'
    )


def facts(rows: Sequence[tuple[str, str]], *, tips: Mapping[str, str] = MappingProxyType({})) -> str:
    """Names and values in two columns; rows without a value are left out. Values are plain text. `tips`: what a name
    means, told where the mouse rests on it."""
    body = "".join(
        f"<dt{_tip(tips.get(name, ''))}>{safe(name)}</dt><dd>{safe(value)}</dd>" for name, value in rows if value
    )
    return f'<dl class="facts">{body}</dl>' if body else ""


def _tip(words: str) -> str:
    return f' title="{safe(words)}" class="tip"' if words else ""
