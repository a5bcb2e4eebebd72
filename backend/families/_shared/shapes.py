"""What parameter names and shapes show of a network."""

from __future__ import annotations

from collections.abc import Iterable


def count_blocks(names: Iterable[str], beginning: str) -> int:
    """How many different numbers follow `beginning` ("transformer_blocks.") in parameter names."""
    return len({name[len(beginning) :].partition(".")[0] for name in names if name.startswith(beginning)})
