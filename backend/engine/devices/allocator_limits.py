"""What torch's allocator of this process may take of a card, and how it grows."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

GROWING = "expandable_segments:True"


def grow_segments(environment: MutableMapping[str, str] = os.environ, platform: str = sys.platform) -> None:
    """Lets the allocator's segments grow where torch has that (Linux), unless something was chosen. To be called before torch is imported.

    Torch has two names for the variable; the older is understood by every version.
    """
    if platform == "linux" and not any(
        name in environment for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    ):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = GROWING


def driver_spills(platform: str = sys.platform, version: Path = Path("/proc/version")) -> bool:
    """Whether the driver moves what does not fit into shared memory, instead of refusing it: on Windows, and inside its Linux (WSL)."""
    if platform == "win32":
        return True
    try:
        return platform == "linux" and "microsoft" in version.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def cap(device, *, most_bytes: int | None = None) -> int | None:
    """Makes torch raise before the allocator of this process takes more of a CUDA `device` than `most_bytes`, or, where a driver would
    spill silently, than is there for it now. Returns the limit; None where none was set."""
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
    """`limit_bytes` as a share of the card, within what torch takes."""
    return min(1.0, max(0.0, limit_bytes / max(total_bytes, 1)))
