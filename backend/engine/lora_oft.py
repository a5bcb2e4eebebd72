"""OFT as PEFT writes it (`oft_R.weight`): orthogonal blocks that turn a layer's input before it meets the weight.

Qiu et al. 2023 with Cayley's map: of each block's numbers above the diagonal a skew-symmetric Q is made, and R = (1 - Q)(1 + Q)^-1. A layer
with R computes W (R^T x), so its change of the weight is W (R - 1)^T. PEFT may have trained with a short series in place of the inverse, which
is the same up to Q^5; the file does not say. Kohya's blocks (`oft_blocks`) are constrained otherwise and are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.catalog.adapter import plain
from backend.engine.lora_body import Change
from backend.engine.lora_module import Module, mismatch
from backend.schema.messages import Trouble


@dataclass(frozen=True)
class Rotation:
    """W (R - 1)^T. `turns` (b, k, k) float32 are the blocks of R less 1, for b * k inputs; `weight()` gives W (o, i), unchanged."""

    turns: torch.Tensor
    shape: tuple[int, ...]
    weight: Callable[[], torch.Tensor]
    scale: float = 1.0

    def dense(self) -> torch.Tensor:
        blocks = self.weight().float().cpu().unflatten(1, self.turns.shape[:2])
        return torch.einsum("obc,bkc->obk", blocks, self.turns.cpu()).flatten(1)


def is_rotation(module: Module) -> bool:
    """Whether a module of a file is an OFT of PEFT's and nothing else."""
    key = module.roles.get("oft", "")
    return set(module.roles) == {"oft"} and ".oft_R" in key and len(module.source.shapes[key]) == 2


def rotation_changes(module: Module) -> list[Change]:
    """The change of the one linear layer that `module` is. Raises Trouble for blocks that do not fit it, and for a fused or other layer."""
    slot, name = module.slots[0], plain(module.stem)
    shape = module.shape_of(f"{slot.module}.weight")
    if len(module.slots) > 1 or slot.share != (0, 1, 1) or slot.place != (0, 1, 1) or shape is None or len(shape) != 2:
        raise Trouble(
            "not_supported",
            f"{module.source.name} turns the inputs of {name}, which is no linear layer of its own in this model.",
            hint="Convert it with the tool that made it; nothing was changed.",
        )
    numbers = module.read("oft").float()
    blocks, size = numbers.shape[0], (1 + math.isqrt(1 + 8 * numbers.shape[1])) // 2
    if size * (size - 1) // 2 != numbers.shape[1] or shape[1] % size or blocks not in (1, shape[1] // size):
        raise mismatch(module, "rotation", numbers.shape, f"blocks for {shape[1]} inputs")
    turns = cayley(numbers, size).expand(shape[1] // size, size, size)
    return [Change(slot.module, "weight", Rotation(turns, shape, lambda: module.weight_of(f"{slot.module}.weight")))]


def cayley(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """R - 1 (b, size, size) of the skew-symmetric matrices with `numbers` (b, size * (size - 1) / 2) above the diagonal."""
    skew = numbers.new_zeros(len(numbers), size, size)
    rows, columns = torch.triu_indices(size, size, 1)
    skew[:, rows, columns] = numbers
    skew = skew - skew.transpose(1, 2)
    one = torch.eye(size)
    return torch.linalg.solve(one + skew, one - skew, left=False) - one


def turned(x: torch.Tensor, rotations: list[torch.Tensor]) -> torch.Tensor:
    """x (..., i) with what each of `rotations` (b, k, k), b * k = i, adds to it."""
    return x + sum(
        torch.einsum("...bk,bkc->...bc", x.unflatten(-1, turns.shape[:2]), turns).flatten(-2) for turns in rotations
    )
