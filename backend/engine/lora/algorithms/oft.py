"""OFT: orthogonal fine-tuning by rotating a layer's input (PEFT, OneTrainer, ComfyUI) or output (LyCORIS, kohya).

PEFT, OneTrainer and ComfyUI's OFTv2 (`oft_R.weight`): blocks that rotate a layer's input before it meets the weight.

Qiu et al. 2023. Of each block's numbers above the diagonal a skew-symmetric Q is made, and of Q the rotation R: by
default as the Cayley-Neumann series 1 + 2Q + 2Q^2 + 2Q^3 + Q^4, or as Cayley's map (1 - Q)(1 + Q)^-1, which turns the
other way. A layer with R computes W (R^T x), so its change of the weight is W (R - 1)^T. Which of the two a file means
is not in its tensors: see `backend.catalog.lora.peft_config.turning_of`. OneTrainer's marker `oft_R.scaled_oft` says
that the numbers are divided by the root of how many a block has. On a fused module the same input is turned for all its
rows.

LyCORIS' and kohya's diag-OFT (`oft_blocks`, whole square blocks B) turns a layer's output: Q = B - B^T, R = (1 + Q)(1 -
Q)^-1, and the weight becomes R^T W block by block, its rows times `rescale` where there is one. Their alpha is a bound
on the length of all Q together, which LyCORIS and kohya take times the number of outputs and ComfyUI does not: what is
within both bounds is read, anything else refused.
"""

from __future__ import annotations

import math

import torch

from backend.catalog.lora.keys import plain
from backend.catalog.lora.peft_config import Turning, turning_of
from backend.engine.lora.algorithms.delta import Change, OutputRotation, Rotation
from backend.engine.lora.algorithms.module_tensors import Module, mismatch
from backend.engine.lora.algorithms.scale import alpha_value
from backend.schema.messages import Trouble


def is_output_rotation(module: Module) -> bool:
    """Whether a module of a file is a diag-OFT and nothing else."""
    key = module.roles.get("oft", "")
    alone = {"oft", "alpha"} <= set(module.roles) <= {"oft", "oft_rescale", "alpha"}
    return alone and key.endswith(".oft_blocks") and len(module.source.shapes[key]) == 3


def output_rotation_changes(module: Module) -> list[Change]:
    """The change of the one layer that `module` is. Raises Trouble for blocks that do not fit it, and where their bound
    may act."""
    slot, name = module.slots[0], plain(module.stem)
    shape = module.shape_of(f"{slot.module}.weight")
    whole = len(module.slots) == 1 and (slot.share, slot.place, slot.parameter) == ((0, 1, 1), (0, 1, 1), "weight")
    if not whole or slot.swap_halves or shape is None or len(shape) < 2:
        raise Trouble(
            "not_supported",
            f"{module.source.name} turns the outputs of {name} (OFT), which is no layer of its own in this model.",
            hint="Convert it with the tool that made it; nothing was changed.",
        )
    blocks = module.read("oft").double()
    if blocks.shape[1] != blocks.shape[2] or blocks.shape[0] * blocks.shape[1] != shape[0]:
        raise mismatch(module, "rotation", blocks.shape, f"square blocks for {shape[0]} outputs")
    skew = blocks - blocks.transpose(1, 2)
    bound, length = alpha_value(module.source, module.roles["alpha"]), float(skew.norm())
    if not (bound == 0.0 and not module.stem.startswith("oft_unet_")) and not length <= bound:
        raise Trouble(
            "unknown_algorithm",
            f"{module.source.name} uses OFT on {name} with a bound of {bound:g} that its blocks, "
            f"of length {length:.3g}, exceed: LyCORIS and ComfyUI take it in two ways.",
            hint="Convert it with the tool that made it to LoRA, LoHa or LoKr; nothing was changed.",
        )
    one = torch.eye(skew.shape[1], dtype=skew.dtype)
    turns = (torch.linalg.solve(one - skew, one + skew, left=False) - one).float()
    rescale = module.read("oft_rescale").float().flatten() if "oft_rescale" in module.roles else None
    if rescale is not None and rescale.shape[0] != shape[0]:
        raise mismatch(module, "rescale", rescale.shape, f"{shape[0]} numbers")
    weight = f"{slot.module}.weight"
    return [Change(slot.module, "weight", OutputRotation(turns, rescale, shape, lambda: module.weight_of(weight)))]


def is_rotation(module: Module) -> bool:
    """Whether a module of a file is an OFT of PEFT's kind and nothing else."""
    key = module.roles.get("oft", "")
    alone = {"oft"} <= set(module.roles) <= {"oft", "oft_marker", "alpha"}
    return alone and ".oft_R" in key and len(module.source.shapes[key]) == 2


def rotation_changes(module: Module) -> list[Change]:
    """The changes of the linear layers that `module` is. Raises Trouble for blocks that do not fit, and for what is no
    linear layer."""
    name, changes = plain(module.stem), []
    turning = turning_of(module.source.metadata, module.source.config, module.component, module.source.name)
    for note in (turning.note, f"alpha of {name} means nothing for OFT" if "alpha" in module.roles else ""):
        if note and note not in module.notes:
            module.notes.append(note)
    numbers = module.read("oft").float()
    if "oft_marker" in module.roles:
        numbers = numbers / math.sqrt(numbers.shape[1])
    for slot in module.slots:
        shape = module.shape_of(f"{slot.module}.weight")
        if slot.place != (0, 1, 1) or slot.parameter != "weight" or shape is None or len(shape) != 2:
            raise Trouble(
                "not_supported",
                f"{module.source.name} turns the inputs of {name}, which is no linear layer of its own in this model.",
                hint="Convert it with the tool that made it; nothing was changed.",
            )
        blocks, size = numbers.shape[0], (1 + math.isqrt(1 + 8 * numbers.shape[1])) // 2
        if size * (size - 1) // 2 != numbers.shape[1] or shape[1] % size or blocks not in (1, shape[1] // size):
            raise mismatch(module, "rotation", numbers.shape, f"blocks for {shape[1]} inputs")
        turns = turns_of(numbers, size, turning).expand(shape[1] // size, size, size)
        weight = f"{slot.module}.weight"
        changes.append(
            Change(slot.module, "weight", Rotation(turns, shape, lambda weight=weight: module.weight_of(weight)))
        )
    return changes


def turns_of(numbers: torch.Tensor, size: int, turning: Turning) -> torch.Tensor:
    """R - 1 (b, size, size) float32 of the skew-symmetric matrices with `numbers` (b, size * (size - 1) / 2) above the
    diagonal.

    Computed in float64: a series of many terms of large numbers would lose what it is the difference of.
    """
    skew = numbers.double().new_zeros(len(numbers), size, size)
    rows, columns = torch.triu_indices(size, size, 1)
    skew[:, rows, columns] = numbers.double()
    skew = skew - skew.transpose(1, 2)
    if turning.projected:
        length, most = skew.flatten(1).norm(dim=1)[:, None, None], turning.eps / math.sqrt(len(skew))
        skew = torch.where(length <= most, skew, skew * (most / length.clamp_min(1e-300)))
    if turning.exact:
        one = torch.eye(size, dtype=skew.dtype)
        return (torch.linalg.solve(one + skew, one - skew, left=False) - one).float()
    return _series(skew, turning.terms).float()


def _series(skew: torch.Tensor, terms: int) -> torch.Tensor:
    """PEFT's Cayley-Neumann series without its first term, the 1."""
    if terms < 3:
        return 2.0 * skew if terms == 2 else torch.zeros_like(skew)
    highest = max(terms - 1, 3)
    total, power = 2.0 * skew, skew
    for order in range(2, highest + 1):
        power = power @ skew
        total = total + (power if order == highest else 2.0 * power)
    return total


def turned(x: torch.Tensor, rotations: list[torch.Tensor]) -> torch.Tensor:
    """x (..., i) with what each of `rotations` (b, k, k), b * k = i, adds to it."""
    return x + sum(
        torch.einsum("...bk,bkc->...bc", x.unflatten(-1, turns.shape[:2]), turns).flatten(-2) for turns in rotations
    )
