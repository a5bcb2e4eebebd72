"""Two ways to do the same thing, timed against each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


def winner(seconds: Mapping[str, float]) -> str:
    """Which way won, and by how much, for people."""
    best = min(seconds, key=seconds.get)
    second = min(value for name, value in seconds.items() if name != best)
    return f"faster by {second / max(seconds[best], 1e-9):.2f}x: {best}"


@contextlib.contextmanager
def with_way(name: str, way: str) -> Iterator[None]:
    """`LOFT_WAYS` says this way alone."""
    before = os.environ.get("LOFT_WAYS")
    os.environ["LOFT_WAYS"] = f"{name}={way}"
    try:
        yield
    finally:
        os.environ.pop("LOFT_WAYS") if before is None else os.environ.update(LOFT_WAYS=before)
