"""Two ways to compute the same thing, of which only a measurement on the card at hand says which is quicker.

`python benchmarks/ways.py` measures them.

`LOFT_WAYS="guidance=apart,fp8_scales=rows"` chooses; what is not named stays as it is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import lru_cache

from backend.schema.messages import Trouble

CHOICES = {
    "guidance": ("together", "apart"),
    "fp8_scales": ("outside", "rows"),
    "hooks": ("layers", "casts"),
    "vae": ("contiguous", "channels_last"),
}


@dataclass(frozen=True)
class Ways:
    """`guidance`: both halves as one padded batch, which needs a mask, or where all blocks stay on a card one after the
    other, without one. `fp8_scales`: an FP8 product's scales are applied by passes of their own, or by the product's
    kernel, row by row. `hooks`: in streamed blocks every layer is watched, or only those of which something is cast (a
    layer that is called without its block is then not served). `vae`: convolutions as they come, or pixels side by side
    in memory with kernels prepared once."""

    guidance: str = "together"
    fp8_scales: str = "outside"
    hooks: str = "layers"
    vae: str = "contiguous"


def chosen() -> Ways:
    """What the environment says. Raises Trouble for a way that there is not."""
    return _read(os.environ.get("LOFT_WAYS", ""))


@lru_cache(maxsize=16)
def _read(text: str) -> Ways:
    found = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, way = entry.partition("=")
        if way not in CHOICES.get(name, ()):
            known = "; ".join(f"{one.name}={' or '.join(CHOICES[one.name])}" for one in fields(Ways))
            raise Trouble("bad_value", f"LOFT_WAYS says {entry!r}, which is no way.", hint=f"There are {known}.")
        found[name] = way
    return Ways(**found)
