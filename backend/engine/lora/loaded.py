"""The record of a loaded LoRA: receipt, changed parameters, fused (cold) or side branch (hot); look-ups by name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from backend.catalog.family import Family
from backend.catalog.models import match_parts
from backend.engine.loading.tensor_source import Source
from backend.engine.lora.algorithms.delta import Change, OutputRotation, Rotation
from backend.engine.lora.read import ReadLora
from backend.schema.messages import Trouble
from backend.schema.request import LoraReceipt

FileOrTensors = str | os.PathLike | Mapping[str, torch.Tensor]


@dataclass
class Loaded:
    """One LoRA that acts. `changes`: by part; for a cold one they are dropped and read again from the file when
    needed."""

    source: FileOrTensors
    receipt: LoraReceipt
    names: dict[str, tuple[str, ...]]  # part -> parameters it changes
    changes: dict[str, list[Change]] | None = None
    hot: dict[str, bool] = field(default_factory=dict)  # part -> side branch, or (False) fused into the weights
    order: str = ""  # sorts it among others, whenever it was added: sums in float32 depend on the order

    def changes_of(self, part: str) -> list[Change]:
        """Its changes of `part`, which must be in memory."""
        assert self.changes is not None, f"the changes of {self.receipt.name} were dropped"
        return self.changes[part]


def receipt_of(opened: Source, found: ReadLora, *, strength: float, hot: bool) -> LoraReceipt:
    """What the user is told of a loaded LoRA: file, hash, strength, how many layers matched, unused keys."""
    return LoraReceipt(
        name=opened.name,
        path=str(opened.path or ""),
        hash=opened.hash,
        strength=strength,
        mode="hot" if hot else "cold",
        layers_applied=found.num_applied,
        layers_found=found.num_found,
        dialect=found.dialect,
        unused=found.unused,
        notes=found.notes,
    )


def digest_of(opened: Source) -> str:
    """sha256 of a LoRA's file, or of the tensors that were given."""
    if opened.path is not None:
        return opened.hash
    digest = hashlib.sha256()
    for key in sorted(opened.shapes):
        digest.update(key.encode())
        tensor = opened.read_stored(key).contiguous().flatten()
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def is_multiplicative(change: Change) -> bool:
    """Whether a change multiplies the weight, so that it must meet the model's own and not what others have made of
    it."""
    return change.dora is not None or isinstance(change.body, Rotation | OutputRotation)


def is_called(receipt: LoraReceipt, which: LoraReceipt | str) -> bool:
    """Whether `which`, a path, a name, a hash or another receipt, means this one."""
    if isinstance(which, str):
        return bool(which) and which in (receipt.path, receipt.name, receipt.hash)
    return (which.path, which.hash, which.name) == (receipt.path, receipt.hash, receipt.name)


def find(loaded: Sequence[Loaded], which: LoraReceipt | str) -> Loaded:
    """The one of `loaded` that `which` means. Raises Trouble where there is none."""
    same = [one for one in loaded if one.receipt is which]
    for one in same or [one for one in loaded if is_called(one.receipt, which)]:
        return one
    name = which.name if isinstance(which, LoraReceipt) else which
    names = ", ".join(one.receipt.name for one in loaded)
    raise Trouble("bad_value", f"No LoRA {name!r} is loaded.", hint=f"Loaded: {names or 'none'}.")


def modules_of(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def of_part(kept: Mapping[tuple[str, str], torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    """The tensors (of any shapes) of one part, by parameter name."""
    return {name: tensor for (owner, name), tensor in kept.items() if owner == part}


def check_strength(strength: float) -> None:
    if not isinstance(strength, int | float) or strength != strength or abs(strength) == float("inf"):
        raise Trouble("bad_value", f"A LoRA's strength must be a finite number, not {strength!r}.")


def family_of(modules: Mapping[str, nn.Module], families: Sequence[Family]) -> Family | None:
    """The family whose networks these modules are; of several that share a class, the one whose parameters they
    have."""
    for part, module in modules.items():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        found = [one for one in families if part in one.PARTS and one.PARTS[part].network.rpartition(":")[2] in kinds]
        if len(found) > 1:
            weights = dict(module.named_parameters())
            found = [one for one in found if match_parts.is_like(weights, one, part)] or found
        if found:
            return found[0]
    return None
