"""Encoding before the first step, distributed over the processes: each encodes its share and waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backend.training.encoding.encoding_cache import EncodingCache

Parts = Callable[..., dict[str, Any]]  # loads parts by name: modules, and the model's tokenizers and processor


@dataclass(frozen=True)
class EncodingContext:
    """What encoding needs of the run: dtype, rank and number of processes, and where progress and notes go."""

    trains_text: bool
    dtype: torch.dtype
    rank: int
    processes: int
    wait: Callable[[], None]
    gather: Callable[[object], list]
    progress: Callable[[int, int], None]
    note: Callable[[str], None]
    part_key: Callable[
        [str], str
    ]  # part -> a hash of everything of it that what it encodes depends on (`ingredients.encoder_key`)


def encode_distributed(
    wanted: dict, store: EncodingCache, context: EncodingContext, work: Callable[[dict], None]
) -> None:
    """Has `work` make what `store` lacks of `wanted` {key: …}: each process its share, then what it still cannot see.

    The cache of another machine is not this one's; a store without a folder is each process's own.
    """
    for shared in (store.folder is not None, False):
        missing = {key: wanted[key] for key in sorted(wanted) if not store.has(key)}
        if shared:
            missing = {key: missing[key] for key in list(missing)[context.rank :: context.processes]}
        if missing:
            work(missing)
        context.wait()


def report_broken(broken: dict, context: EncodingContext) -> dict:
    """What could not be read by any process {key: why}; it is said, once for each."""
    found = {key: why for some in context.gather(broken) for key, why in some.items()}
    for why in dict.fromkeys(found.values()):
        context.note(f"Left out: {why}")
    return found
