"""The tensors of one module of a LoRA file, and how a change is cut and shaped for a parameter of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from backend.catalog.lora.alpha import AlphaRules
from backend.catalog.lora.keys import plain
from backend.catalog.state_dict_keys import Slot
from backend.engine.loading.tensor_source import INTEGER_CODES, Source
from backend.engine.lora.algorithms.delta import Body, placed, swapped
from backend.engine.lora.algorithms.scale import alpha_value, scale_of
from backend.schema.messages import Trouble

DIMENSIONS = 2  # at least, of factors
FACTORS = ("down", "up", "mid", "embedding_", "hada_", "lokr_")


def _finite(tensor: torch.Tensor) -> bool:
    """A sum of finite numbers is finite unless it overflows, and takes a quarter of the time of looking at each."""
    return math.isfinite(float(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


@dataclass
class Module:
    """One module of a LoRA file on its way into changes: its tensors, whose module it is, what it acts on."""

    source: Source
    stem: str  # as the file spells it
    roles: Mapping[str, str]  # what a tensor is -> its key
    slots: tuple[Slot, ...]
    names: tuple[str, ...]  # that rules for alpha may call it by: as the file has it, then the model's own
    component: str
    rules: AlphaRules
    shape_of: Callable[[str], tuple[int, ...] | None]  # shape of one of the model's parameters by name
    weight_of: Callable[[str], torch.Tensor]  # its base values
    notes: list[str]
    unused: dict[str, str]
    ranks: set[int]
    alphas: set[float]

    def read(self, role: str) -> torch.Tensor:
        """The tensor of a role, of at least two dimensions where it is a factor.

        Raises Trouble: "not_finite" for NaN and Inf, "shape_mismatch", "not_supported" for 8-bit codes without a scale.
        """
        key = self.roles[role]
        tensor = self.source.read(key)
        least = DIMENSIONS if role.startswith(FACTORS) and not role.endswith("_bias") else 1
        if tensor.ndim < least or 0 in tensor.shape or tensor.is_complex():
            what = "a matrix" if least == DIMENSIONS else "a list of numbers"
            raise mismatch(self, role.replace("_", " "), tensor.shape, what + " that is not empty")
        if tensor.dtype in INTEGER_CODES:
            raise Trouble(
                "not_supported",
                f"{self.source.name} stores {key} as {str(tensor.dtype).removeprefix('torch.')}, codes without a scale.",
                hint="Take the LoRA in bf16 or fp16 instead; nothing was changed.",
            )
        if tensor.is_floating_point() and not _finite(tensor):
            raise Trouble(
                "not_finite",
                f"{self.source.name}: {key} holds NaN or infinite numbers.",
                hint="The file is damaged, or its training diverged; nothing was changed.",
            )
        return tensor

    def scale(self, rank: int | None) -> float:
        """The factor of a change of this rank; None: of two whole Kronecker factors."""
        if rank is None:
            return scale_of(self.source, self.roles, None, self.rules, self.names, self.component, self.notes)
        self.ranks.add(rank)
        if "alpha" in self.roles:
            self.alphas.add(alpha_value(self.source, self.roles["alpha"]))
        return scale_of(self.source, self.roles, rank, self.rules, self.names, self.component, self.notes)


def incomplete(module: Module, what: str) -> Trouble:
    return Trouble(
        "incomplete_pair", f"{module.source.name} {what}.", hint="The file is incomplete; nothing was changed."
    )


def cut(body: Body, slot: Slot) -> Body:
    """The rows of a file's change that are the slot's, halves exchanged where its module has them the other way
    round."""
    start, stop, whole = slot.share
    rows = body.shape[0]
    if slot.swap_halves:
        body = swapped(body)
    return body if whole == 1 else body.rows(rows * start // whole, rows * stop // whole)


def at_place(body: Body, slot: Slot, num_rows: int) -> Body:
    start, _, whole = slot.place
    return body if whole == 1 else placed(body, num_rows * start // whole, num_rows)


def fitted(module: Module, body: Body, slot: Slot) -> Body:
    """The rows of `body` that are the slot's, in the shape of its parameter."""
    name = f"{slot.module}.{slot.parameter}".lstrip(".")
    shape = module.shape_of(name)
    if shape is None:
        raise mismatch(module, "change", body.shape, f"no {slot.parameter} in {slot.module}")
    whole = slot.share[2]
    if body.shape[0] % whole:
        raise mismatch(module, "change", body.shape, f"a number of rows that divides by {whole}")
    begin, end, _ = slot.share
    rows = body.shape[0] * (end - begin) // whole
    start, stop, parts = slot.place
    if rows * product(body.shape[1:]) * parts != product(shape) * (stop - start):  # before anything is multiplied out
        raise mismatch(module, "change", (rows, *body.shape[1:]), list(shape))
    share = cut(body, slot)
    if parts != 1 and share.shape[0] * parts != shape[0] * (stop - start):
        raise mismatch(module, "change", share.shape, f"{shape[0] * (stop - start) // parts} rows")
    return in_shape(module, at_place(share, slot, shape[0]), shape)


def in_shape(module: Module, body: Body, shape: tuple[int, ...]) -> Body:
    if body.shape == shape:
        return body
    if _without_ones(body.shape) == _without_ones(shape):
        return body.reshaped(shape)
    if len(shape) == len(body.shape) or body.shape[0] != shape[0]:
        raise mismatch(module, "change", body.shape, list(shape))
    if body.shape[0] == shape[0] and product(body.shape) == product(shape):
        return body.reshaped(shape)
    raise mismatch(module, "change", body.shape, list(shape))


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def mismatch(module: Module, what: str, found: Iterable[int], expected: object) -> Trouble:
    """The error for a tensor whose shape `found` does not fit."""
    return Trouble(
        "shape_mismatch",
        f"{module.source.name}: the {what} for {plain(module.stem)} is {list(found)}, "
        f"but this model expects {expected}.",
        hint="The LoRA is for another size or another model; nothing was changed.",
    )
