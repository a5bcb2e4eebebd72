"""What is encoded before the first step is made in shares, one for each process, and waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.training.encoding.encoding_cache import Store

Parts = Callable[..., dict[str, torch.nn.Module]]


@dataclass(frozen=True)
class Wishes:
    """What the filling of a cache needs to know: what trains, and how its progress and what is unusual are said."""

    trains_text: bool
    dtype: torch.dtype
    rank: int
    processes: int
    wait: Callable[[], None]
    gather: Callable[[object], list]
    progress: Callable[[int, int], None]
    note: Callable[[str], None]
    made_by: Callable[
        [str], str
    ]  # part -> a hash of everything of it that what it encodes depends on (`ingredients.encoder_key`)


def in_shares(wanted: dict, store: Store, wishes: Wishes, work: Callable[[dict], None]) -> None:
    """Has `work` make what `store` lacks of `wanted` {key: …}: each process its share, then what it still cannot see.

    The cache of another machine is not this one's; a store without a folder is each process's own.
    """
    for shared in (store.folder is not None, False):
        missing = {key: wanted[key] for key in sorted(wanted) if not store.has(key)}
        if shared:
            missing = {key: missing[key] for key in list(missing)[wishes.rank :: wishes.processes]}
        if missing:
            work(missing)
        wishes.wait()


def left_out(broken: dict, wishes: Wishes) -> dict:
    """What could not be read by any process {key: why}; it is said, once for each."""
    found = {key: why for some in wishes.gather(broken) for key, why in some.items()}
    for why in dict.fromkeys(found.values()):
        wishes.note(f"Left out: {why}")
    return found
