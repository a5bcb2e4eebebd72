"""Tapes to closed forms: the peak of a stage as the greatest of a few sums, without torch at the time of asking.

The size of each storage is a sum of products of a point's variables (tokens times pictures, tokens times rank, ...),
and the order of events does not depend on them. So a few tapes give every event's coefficients, running sums of those
give what is alive after each event, and the peak is the greatest of them. Only those that are greatest somewhere are
kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy

from backend.engine.tracing import caching_allocator
from backend.engine.tracing.allocation_recorder import Tape, live, peak

TOLERANCE = 0.002
ROUNDING = 2**16  # bytes: each block is rounded up, which shows in tiny models alone


def features(names: list[str], point: dict) -> list[float]:
    """Values of products such as "1", "n", "bn", "nn" at `point`; each letter is a variable, and s is n + t."""
    return [math.prod(letter_of(point, letter) for letter in name if letter != "1") for name in names]


def letter_of(point: dict, letter: str) -> float:
    return point["n"] + point["t"] if letter == "s" else point[letter]


def fit(
    names: list[str],
    points: list[dict],
    tapes: list[Tape],
    span: Mapping[str, tuple[float, float]],
    *,
    section: tuple[str, str] | None = None,
    single: bool = False,
) -> dict:
    """The closed form of the stage whose `tapes` were taken at `points`; exact within `span` (variable -> least,
    greatest).

    `section`: of the events between these two marks alone ("": the beginning). `single`: each storage is a multiple of
    one of `names` rather than a sum, which three points tell. Raises ValueError where the tapes are not the same
    events, or are not sums of `names`.
    """
    events = [_settled(tape.events) for tape in tapes]
    if any(one != events[0] for one in events):
        raise ValueError(f"The order of events depends on the point: {[len(one) for one in events]} events.")
    matrix = numpy.array([features(names, point) for point in points], dtype=float)
    sizes = numpy.array([tape.sizes for tape in tapes], dtype=float)
    coefficients = _multiples(names, matrix, sizes) if single else _sums(matrix, sizes)
    marks = tapes[0].marks | {"": 0}
    inside = slice(marks[section[0]], marks[section[1]]) if section else slice(None)
    pieces = _prune(names, _running_sums(events[0], coefficients.T)[inside], span)
    form = {"features": names, "pieces": [[tidy(value) for value in piece] for piece in pieces]}
    for point, tape in zip(points, tapes, strict=True):
        alive = (
            itertools.accumulate(_signed(tape)) if single else live(tape)
        )  # small storages would be rounded up to blocks
        highest = max(itertools.islice(alive, inside.start, inside.stop), default=0)
        off = abs(evaluate(form, point) - highest)
        if off > max(5 * TOLERANCE * highest, ROUNDING):
            raise ValueError(f"Bytes are not sums of {names}: {off / highest:.2%} off at a traced point.")
    return form


def _sums(matrix: numpy.ndarray, sizes: numpy.ndarray) -> numpy.ndarray:
    """Coefficients (features, storages) of `sizes` (points, storages), given the features of the points (points,
    features)."""
    coefficients, *_ = numpy.linalg.lstsq(matrix / matrix.max(0), sizes, rcond=None)
    return coefficients / matrix.max(0)[:, None]


def _multiples(names: list[str], matrix: numpy.ndarray, sizes: numpy.ndarray) -> numpy.ndarray:
    """The same where each storage is a multiple of the first feature that it is proportional to. Small ones, such as
    angles of a picture's rows, may be none: they are taken as always the largest."""
    sizes = numpy.where(
        sizes.max(0) <= ROUNDING / 4, numpy.where(_proportional(matrix, sizes).any(0), sizes, sizes.max(0)), sizes
    )
    ratios, fits = sizes[:, None, :] / matrix[:, :, None], _proportional(matrix, sizes)
    unknown = numpy.flatnonzero(~fits.any(0))
    if len(unknown):
        raise ValueError(f"Storages of {sizes[:, unknown[0]].tolist()} bytes are no multiple of one of {names}.")
    chosen = fits.argmax(0)
    coefficients = numpy.zeros((len(names), sizes.shape[1]))
    coefficients[chosen, numpy.arange(sizes.shape[1])] = ratios[0, chosen, numpy.arange(sizes.shape[1])]
    return coefficients


def _proportional(matrix: numpy.ndarray, sizes: numpy.ndarray) -> numpy.ndarray:
    """Whether each storage is a multiple of each feature, (features, storages)."""
    ratios = sizes[:, None, :] / matrix[:, :, None]
    return numpy.ptp(ratios, axis=0) <= 1e-9 * ratios.max(0)


def evaluate(form: dict, point: dict) -> float:
    """Bytes at `point`."""
    values = features(form["features"], point)
    return max(sum(map(float.__mul__, map(float, piece), map(float, values))) for piece in form["pieces"])


def with_rank(form: dict, nbytes: float, traced: int) -> dict:
    """`form`, traced with adapters of one rank, for any: `nbytes` for each token and rank lie between their two
    matrices."""
    at = form["features"].index("n")
    pieces = [
        [*(value - nbytes * traced if i == at else value for i, value in enumerate(piece)), nbytes]
        for piece in form["pieces"]
    ]
    return {
        **form,
        "features": [*form["features"], "nr"],
        "pieces": [[tidy(value) for value in piece] for piece in pieces],
    }


def fit_peaks(names: list[str], points: list[dict], tapes: list[Tape]) -> dict:
    """A single sum through the peaks, lifted so that none lies above it: for stages whose events depend on the
    point."""
    matrix = numpy.array([features(names, point) for point in points], dtype=float)
    peaks = numpy.array([peak(tape) for tape in tapes], dtype=float)
    scaled, *_ = numpy.linalg.lstsq(matrix / matrix.max(0), peaks, rcond=None)
    sums = scaled / matrix.max(0)
    sums *= max(1.0, float((peaks / (matrix @ sums)).max()))
    return {"features": names, "pieces": [[tidy(value) for value in sums]]}


def fit_operations(names: list[str], points: list[dict], counts: list[int]) -> dict:
    """Operation counts as one sum."""
    matrix = numpy.array([features(names, point) for point in points], dtype=float)
    scaled, *_ = numpy.linalg.lstsq(matrix / matrix.max(0), numpy.array(counts, dtype=float), rcond=None)
    return {"features": names, "pieces": [[tidy(value) for value in scaled / matrix.max(0)]]}


def pools(tapes: list[Tape]) -> dict[str, float]:
    """How much more than the live bytes a device must hold: `least` that still runs, `native` and `expandable` as
    reserved."""
    found = {"least": [], "native": [], "expandable": []}
    for tape in tapes:
        highest = peak(tape)
        expandable = caching_allocator.replay(tape, expandable=True)
        found["native"].append(caching_allocator.replay(tape) / highest)
        found["expandable"].append(expandable / highest)
        found["least"].append(min(caching_allocator.least(tape, highest), expandable) / highest)
    return {name: round(max(values), 3) for name, values in found.items()}


def _signed(tape: Tape) -> Iterator[int]:
    return (tape.sizes[event] if event >= 0 else -tape.sizes[~event] for event in tape.events)


def _settled(events: list[int]) -> list[int]:
    """`events` with what ends at one moment in a fixed order: autocast drops its copies of weights in an order of
    chance."""
    moments = itertools.groupby(events, key=lambda event: event < 0)
    return [event for ends, some in moments for event in (sorted(some) if ends else some)]


def _running_sums(events: list[int], coefficients: numpy.ndarray) -> numpy.ndarray:
    rows = [coefficients[event] if event >= 0 else -coefficients[~event] for event in events]
    return numpy.cumsum(numpy.array(rows), axis=0)


def _prune(names: list[str], alive: numpy.ndarray, span: Mapping[str, tuple[float, float]]) -> list[numpy.ndarray]:
    """The fewest rows of `alive` that come within the tolerance of its maximum all over `span`."""
    grid = numpy.array([features(names, point) for point in _grid(span)], dtype=float)
    alive = numpy.unique(numpy.round(alive, 3), axis=0)
    values = alive @ grid.T
    top = values.max(0)
    covered = values >= top * (1 - TOLERANCE)
    left, chosen = numpy.ones(grid.shape[0], dtype=bool), []
    while left.any():
        best = int((covered & left).sum(1).argmax())
        chosen.append(alive[best])
        left &= ~covered[best]
    return chosen


def _grid(span: Mapping[str, tuple[float, float]]) -> list[dict]:
    steps = {
        name: numpy.unique(numpy.geomspace(low, high, 7)) if high > low else [low] for name, (low, high) in span.items()
    }
    return [dict(zip(steps, values, strict=True)) for values in itertools.product(*steps.values())]


def tidy(value: float, *, digits: int = 7) -> float | int:
    """`value` in few digits, which say it as well."""
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short
