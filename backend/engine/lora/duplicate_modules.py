"""Duplicate modules in a LoRA file, under whatever spellings: equal ones count once, different ones are an error.

What a description does is compared, not how it is stored: `lora_A`/`lora_B` beside `lora_down`/`lora_up` and an alpha,
a fused module beside its parts, a named adapter beside the plain name. Every reader of LoRA files, for use or for the
tools, asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch

from backend.catalog.lora.keys import plain
from backend.engine.loading.tensor_source import Source
from backend.engine.lora.algorithms.scale import alpha_value
from backend.schema.messages import Trouble

TOLERANCE = 1e-6  # of a change's largest number: float32 products of equal factors in another order of summing


def lend_alphas(
    grouped: Mapping[str, Mapping[str, str]], owners: Mapping[str, Hashable], source: Source
) -> dict[str, Mapping[str, str]]:
    """`grouped` with every alpha that stands alone under one spelling of a module given to that module's factors under
    another.

    `owners`: stem -> what it stands for; stems without one are left as they are. Raises Trouble("repeated") for an
    alpha beside another one, and for magnitudes under two names, that differ.
    """
    _check_pairs_of_names(grouped, owners, source)
    alone = {owners[stem]: stem for stem, roles in grouped.items() if set(roles) == {"alpha"} and stem in owners}
    found, lent = dict(grouped), set()
    for stem, roles in grouped.items():
        giver = alone.get(owners.get(stem)) if "alpha" not in roles and stem in owners else None
        if giver is not None:
            found[stem] = {**roles, "alpha": grouped[giver]["alpha"]}
            lent.add(giver)
    return {stem: roles for stem, roles in found.items() if stem not in lent}


def _check_pairs_of_names(
    grouped: Mapping[str, Mapping[str, str]], owners: Mapping[str, Hashable], source: Source
) -> None:
    for stem, roles in grouped.items():
        if {"magnitude", "magnitude_out"} <= roles.keys():
            one, two = (source.read(roles[role]).float().flatten() for role in ("magnitude", "magnitude_out"))
            if one.shape != two.shape or not torch.equal(one, two):
                raise _repeated(
                    source.name, f"the magnitudes of {plain(stem)}", roles["magnitude"], roles["magnitude_out"]
                )
    alone = [stem for stem, roles in grouped.items() if set(roles) == {"alpha"} and stem in owners]
    for stem in alone:
        for other, roles in grouped.items():
            if other != stem and owners.get(other) == owners[stem] and "alpha" in roles:
                keys = grouped[stem]["alpha"], roles["alpha"]
                if alpha_value(source, keys[0]) != alpha_value(source, keys[1]):
                    raise _repeated(source.name, f"the alpha of {plain(other)}", *keys)


def _repeated(source: str, what: str, one: str, two: str) -> Trouble:
    return Trouble(
        "repeated",
        f"{source} gives {what} twice and differently: {one} and {two}.",
        hint="Only one of them can be meant. Take one out of the file, or ask who made it; nothing was changed.",
    )


@dataclass(frozen=True)
class Claim:
    """What one description does to one parameter, or to the rows `place` (start, stop, of how many) of it."""

    stem: str
    key: str  # one of its tensors, for sentences
    place: tuple[int, int, int]
    change: Callable[[], torch.Tensor]  # of the whole parameter, zero outside of `place`
    extra: torch.Tensor | None = None  # what the change at strength 1 does not show: a DoRA's magnitudes


@dataclass
class Claims:
    """What has been claimed of a file so far."""

    source: str
    taken: dict[str, list[Claim]] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)  # stems that say again what another has said

    def is_new(self, parameter: str, claim: Claim) -> bool:
        """Whether nothing else in the file does this to `parameter` already. Raises Trouble("repeated") where something
        does another thing."""
        here = self.taken.setdefault(parameter, [])
        for other in here:
            if other.stem == claim.stem or not _overlap(other.place, claim.place):
                continue
            if not _equal(other, claim):
                raise _repeated(self.source, f"the change of {parameter}", other.key, claim.key)
            self.repeated.add(claim.stem)
            return False
        here.append(claim)
        return True

    def note(self) -> str:
        """A sentence for the receipt; "" where nothing was said twice."""
        num = len(self.repeated)
        if not num:
            return ""
        first = plain(sorted(self.repeated)[0])
        modules = f"{num} modules are" if num > 1 else "1 module is"
        return f"{modules} in the file twice with equal values and applied once ({first})"


def _overlap(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return one[0] * other[2] < other[1] * one[2] and other[0] * one[2] < one[1] * other[2]


def _equal(one: Claim, other: Claim) -> bool:
    """Whether the smaller of two claims is what the larger does to the same rows."""
    a, b = one.change().float(), other.change().float()
    if a.numel() != b.numel():
        return False
    b = b.view(a.shape)
    start, _, whole = max((one.place, other.place), key=lambda place: place[0] / place[2])
    if one.place != other.place:
        end = min(one.place[1] / one.place[2], other.place[1] / other.place[2])
        rows = slice(round(a.shape[0] * start / whole), round(a.shape[0] * end))
        if (other.place[1] - other.place[0]) / other.place[2] > (one.place[1] - one.place[0]) / one.place[2]:
            return False  # the later one does more than what was there: it is no repetition
        a, b = a[rows], b[rows]
    largest = float(torch.maximum(a.abs().max(), b.abs().max())) if a.numel() else 0.0
    if float((a - b).abs().max() if a.numel() else 0.0) > TOLERANCE * largest:
        return False
    if one.extra is None or other.extra is None:
        return one.extra is other.extra
    return one.extra.numel() == other.extra.numel() and torch.equal(one.extra.flatten(), other.extra.flatten())
