"""DoRA: magnitudes of rows or columns, for whole, fused and partly named modules.

W' = m * V / |V| with V = W + delta, after the DoRA paper; the norm runs over everything but the axis that the magnitude
is for.
"""

from __future__ import annotations

import torch

from backend.catalog.state_dict_keys import Slot
from backend.engine.lora.algorithms.delta import Body, Change, Dense, Dora, dora_factor, placed
from backend.engine.lora.algorithms.module_tensors import Module, cut, fitted, mismatch


def with_dora(
    module: Module, whole: Body, bodies: list[tuple[Slot, Body]], magnitude: torch.Tensor, *, only_rows: bool
) -> list[Change]:
    """The changes of a DoRA. `whole`: the change as the file has it; `bodies`: cut and shaped for the parameters.

    The axis is told by the magnitude's shape, [o, 1] or [1, i]; a bare vector is one number a row. Raises Trouble where
    it is neither.
    """
    if module.slots[0].place != (0, 1, 1):
        return [_of_a_part(module, whole, magnitude, only_rows=only_rows)]
    rows = sum(body.shape[0] for _, body in bodies)
    columns = bodies[0][1].shape[1]
    weights = [module.weight_of(f"{slot.module}.{slot.parameter}".lstrip(".")).float() for slot, _ in bodies]
    deltas = [body.dense() for _, body in bodies]
    if not _is_by_row(module, magnitude, rows, columns, only_rows=only_rows):
        factor = dora_factor(torch.cat(weights), torch.cat(deltas), magnitude, 1)
        return [Change(slot.module, slot.parameter, body, Dora(1, factor)) for slot, body in bodies]
    parts = _parts_of_rows(module, magnitude.flatten())
    return [
        Change(slot.module, slot.parameter, body, Dora(0, dora_factor(weight, delta, part, 0)))
        for (slot, body), weight, delta, part in zip(bodies, weights, deltas, parts, strict=True)
    ]


def _is_by_row(module: Module, magnitude: torch.Tensor, rows: int, columns: int, *, only_rows: bool) -> bool:
    """Whether there is one magnitude a row, or else one a column. Raises Trouble if there are too few or too many."""
    by_row = only_rows or magnitude.ndim == 1 or magnitude.shape[0] == rows != 1
    if magnitude.numel() != (rows if by_row else columns):
        expected = f"{rows} numbers, one a row" if by_row else f"{columns} numbers, one a column"
        raise mismatch(module, "DoRA magnitude", magnitude.shape, expected)
    return by_row


def _of_a_part(module: Module, body: Body, magnitude: torch.Tensor, *, only_rows: bool) -> Change:
    """A DoRA of some rows of a module that is fused here: its norms are those of these rows, the others stay as they
    are."""
    slot = module.slots[0]
    weight = module.weight_of(f"{slot.module}.{slot.parameter}").float()
    start, stop, whole = (weight.shape[0] * share // slot.place[2] for share in slot.place)
    own = weight[start:stop]
    delta = cut(body, slot).dense().view(own.shape)
    by_row = _is_by_row(module, magnitude, own.shape[0], own.shape[1], only_rows=only_rows)
    dora = Dora(0 if by_row else 1, dora_factor(own, delta, magnitude, 0 if by_row else 1))
    if by_row:
        dora = Dora(0, torch.cat([torch.ones(start), dora.factor, torch.ones(whole - stop)]))
        return Change(slot.module, slot.parameter, fitted(module, body, slot), dora)
    change = Change(slot.module, slot.parameter, Dense(delta, 1.0), dora).dense(own)
    return Change(slot.module, slot.parameter, placed(Dense(change, 1.0), start, whole))


def _parts_of_rows(module: Module, values: torch.Tensor) -> list[torch.Tensor]:
    """A number a row, cut and swapped as the rows are."""
    return [cut(Dense(values, 1.0), slot).dense() for slot in module.slots]
