"""Checks of the LoRA tools' arguments, before any file is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from backend.schema.messages import Trouble
from backend.schema.untrusted import is_folder

SUFFIX = ".safetensors"


def check_strengths(paths: Sequence[str], strengths: Sequence[float | str]) -> list[float]:
    """The strengths as numbers. Raises Trouble unless there are files, a finite strength for each, and one that is not
    0."""
    if len(paths) != len(strengths) or not paths:
        raise Trouble("bad_value", f"There are {len(paths)} files and {len(strengths)} strengths; each file takes one.")
    found = []
    for path, strength in zip(paths, strengths, strict=True):
        try:
            number = float(strength)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise Trouble(
                "bad_value",
                f"The strength of {Path(path).name} is {strength!r}, which is no finite number.",
                hint="For example 0.8.",
            )
        found.append(number)
    if not any(found):
        raise Trouble(
            "bad_value",
            "All strengths are 0, so nothing would be changed.",
            hint="Give at least one file another strength.",
        )
    return found


def check_rank(rank: object, *, needed: bool = False) -> None:
    """Raises Trouble for a rank that is no whole number from 1 up; None is allowed unless it is `needed`."""
    if rank is None and not needed:
        return
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise Trouble("bad_value", f"The rank is {rank!r}; a rank is a whole number, at least 1.")


def check_share(energy: object) -> None:
    """Raises Trouble for an `energy` that is no share."""
    if energy is not None and (isinstance(energy, bool) or not isinstance(energy, int | float) or not 0 < energy <= 1):
        raise Trouble(
            "bad_value", f"The energy is {energy!r}; it is a share above 0, at most 1.", hint="For example 0.95."
        )


def check_out(out: str | None) -> None:
    """Raises Trouble for a name that no LoRA file can have; None is the tool's own choice."""
    if out is None:
        return
    if not str(out).strip() or is_folder(Path(out)):
        raise Trouble("bad_value", f"{str(out)!r} is no name for a file.", hint=f"Give one that ends in {SUFFIX}.")
    if Path(out).suffix.lower() != SUFFIX:
        raise Trouble(
            "bad_value",
            f"{Path(out).name} does not end in {SUFFIX}, so no program would find it.",
            hint=f"Call it {Path(out).stem}{SUFFIX}.",
        )


def check_metadata(
    said: Mapping[str, str], *, set: Mapping[str, str] | None, remove: Sequence[str], strip: bool, out: str | None
) -> None:
    """Raises Trouble for a key without a name, one to be removed that is not there, and a file to be written with
    nothing changed."""
    if any(not str(key).strip() for key in set or {}):
        raise Trouble("bad_value", "A metadata key has no name.", hint="Write KEY=VALUE.")
    for key in () if strip else remove:
        if key not in said:
            raise Trouble(
                "bad_value", f"There is no metadata {key!r} to remove.", hint=f"There are {', '.join(said) or 'none'}."
            )
    if out is not None and not (set or remove or strip):
        raise Trouble(
            "bad_value",
            f"Nothing is to be changed, so {Path(out).name} would be the same file.",
            hint="Set, remove or strip something.",
        )
