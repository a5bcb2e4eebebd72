"""Limits of torch's caching allocator in this process: expandable segments, and the memory fraction of a card."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EXPANDABLE = "expandable_segments:True"


def expand_segments(environment: MutableMapping[str, str] = os.environ, platform: str = sys.platform) -> None:
    """Turns on `expandable_segments` where torch has that (Linux), unless the user configured the allocator.

    To be called before torch is imported. Torch has two names for the variable; every version knows the older one.
    """
    if platform == "linux" and not any(
        name in environment for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    ):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = EXPANDABLE


def driver_spills(platform: str = sys.platform, version: Path = Path("/proc/version")) -> bool:
    """Whether the driver moves what does not fit into shared system memory instead of raising OOM: Windows and WSL."""
    if platform == "win32":
        return True
    try:
        return platform == "linux" and "microsoft" in version.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def cap(device: torch.device | str, *, most_bytes: int | None = None) -> int | None:
    """Limits the caching allocator on a CUDA `device` (`set_per_process_memory_fraction`), so that torch raises OOM.

    To `most_bytes`, or, where a driver would spill silently into shared memory, to what is free for it now. Returns
    the limit in bytes; None where none was set.
    """
    import torch

    from backend.engine.devices import device_memory

    device = torch.device(device)
    if device.type != "cuda" or (most_bytes is None and not driver_spills()):
        return None
    total, free = device_memory.card_memory(device)
    limit = free + device_memory.reserved(device)
    limit = limit if most_bytes is None else min(most_bytes, limit) if driver_spills() else most_bytes
    torch.cuda.set_per_process_memory_fraction(fraction(limit, total), device)
    return limit


def fraction(limit_bytes: int, total_bytes: int) -> float:
    """`limit_bytes` as a share of the card's `total_bytes`, between 0 and 1."""
    return min(1.0, max(0.0, limit_bytes / max(total_bytes, 1)))
