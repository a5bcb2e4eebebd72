"""The delta that one module of a LoRA adds to a weight (LoRA, LoHa, LoKr, OFT, DoRA, whole), and its dense matrix.

Letters: o output rows, i input columns, k kernel (nothing for a linear layer), r rank. Arithmetic is float32
throughout, by the definitions of the LoRA, LoHa and LoKr papers; the scale is applied to the product and never folded
into a stored factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce

import torch


@dataclass(frozen=True)
class LowRank:
    """scale * up @ down. `up` (o, r), `down` (r, i, *k)."""

    up: torch.Tensor
    down: torch.Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.up.shape[0], *self.down.shape[1:])

    def dense(self) -> torch.Tensor:
        """(o, i, *k) float32."""
        return (self.up.float() @ self.down.flatten(1).float()).mul_(self.scale).view(self.shape)

    def rows(self, start: int, stop: int) -> LowRank:
        return replace(self, up=self.up[start:stop])

    def reshaped(self, shape: tuple[int, ...]) -> LowRank:
        return replace(self, down=self.down.reshape(self.down.shape[0], *shape[1:]))


@dataclass(frozen=True)
class Hadamard:
    """scale * (first o second), element by element: LoHa. Both halves are of scale 1."""

    first: LowRank
    second: LowRank
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.first.shape

    @property
    def rank(self) -> int:
        """Rank of the product when written as one low-rank pair."""
        return self.first.up.shape[1] * self.second.up.shape[1]

    def dense(self) -> torch.Tensor:
        """(o, i, *k) float32."""
        return self.first.dense().mul_(self.second.dense()).mul_(self.scale)

    def rows(self, start: int, stop: int) -> Hadamard:
        return replace(self, first=self.first.rows(start, stop), second=self.second.rows(start, stop))

    def reshaped(self, shape: tuple[int, ...]) -> Hadamard:
        return replace(self, first=self.first.reshaped(shape), second=self.second.reshaped(shape))

    def low_rank(self) -> LowRank:
        """The same as one pair: the rank is the product of both, each new column the product of two old ones."""
        up = self.first.up.float()[:, :, None] * self.second.up.float()[:, None, :]
        down = self.first.down.float()[:, None] * self.second.down.float()[None, :]
        return LowRank(up.flatten(1), down.flatten(0, 1), self.scale)


@dataclass(frozen=True)
class Kronecker:
    """scale * kron(left, right): LoKr. `left` (o1, i1), `right` (o2, i2, *k)."""

    left: torch.Tensor
    right: torch.Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        (o1, i1), (o2, i2, *kernel) = self.left.shape, self.right.shape
        return (o1 * o2, i1 * i2, *kernel)

    def dense(self) -> torch.Tensor:
        """(o1 * o2, i1 * i2, *k) float32."""
        left = self.left.float().reshape(*self.left.shape, *[1] * (self.right.ndim - 2))
        return torch.kron(left.contiguous(), self.right.float().contiguous()).mul_(self.scale)

    def rows(self, start: int, stop: int) -> Dense:
        return Dense(self.dense()[start:stop].clone(), 1.0)

    def reshaped(self, shape: tuple[int, ...]) -> Kronecker | Dense:
        return self if self.shape == shape else Dense(self.dense().reshape(shape), 1.0)


@dataclass(frozen=True)
class Dense:
    """scale * values: a change stored whole."""

    values: torch.Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dense(self) -> torch.Tensor:
        """float32, of the shape of `values`."""
        return self.values.float() * self.scale

    def rows(self, start: int, stop: int) -> Dense:
        return replace(self, values=self.values[start:stop])

    def reshaped(self, shape: tuple[int, ...]) -> Dense:
        return replace(self, values=self.values.reshape(shape))


Body = LowRank | Hadamard | Kronecker | Dense


@dataclass(frozen=True)
class Rotation:
    """OFT of a layer's input: W (R - 1)^T. `turns` (b, k, k) float32 are the blocks of R less 1, for b * k inputs;
    `weight()` gives W (o, i), unchanged."""

    turns: torch.Tensor
    shape: tuple[int, ...]
    weight: Callable[[], torch.Tensor]
    scale: float = 1.0

    def dense(self) -> torch.Tensor:
        """(o, i) float32."""
        blocks = self.weight().float().cpu().unflatten(1, self.turns.shape[:2])
        return torch.einsum("obc,bkc->obk", blocks, self.turns.cpu()).flatten(1)


@dataclass(frozen=True)
class OutputRotation:
    """Diag-OFT, of a layer's output: D R^T W - W. `turns` (b, k, k) float32 are the blocks of R less 1, for b * k
    outputs; `rescale` (o,) is D's diagonal, None for 1."""

    turns: torch.Tensor
    rescale: torch.Tensor | None
    shape: tuple[int, ...]
    weight: Callable[[], torch.Tensor]
    scale: float = 1.0

    def dense(self) -> torch.Tensor:
        """float32, of the weight's shape (o, ...)."""
        weight = self.weight().float().cpu().flatten(1)
        change = torch.einsum("bkc,bki->bci", self.turns, weight.unflatten(0, self.turns.shape[:2])).flatten(0, 1)
        if self.rescale is not None:
            change = self.rescale[:, None] * (weight + change) - weight
        return change.view(self.shape)


def sum_of(bodies: Iterable[Body]) -> torch.Tensor:
    """The sum of several changes of one parameter, float32, in the shape of the first."""
    dense = [body.dense() for body in bodies]
    return reduce(torch.add, (one.view(dense[0].shape) for one in dense))


def swapped(body: Body) -> Body:
    """`body` with the two halves of its rows exchanged."""
    half = body.shape[0] // 2
    if isinstance(body, LowRank):
        return replace(body, up=torch.cat([body.up[half:], body.up[:half]]))
    if isinstance(body, Hadamard):
        return replace(body, first=swapped(body.first), second=swapped(body.second))
    values = body.dense()
    return Dense(torch.cat([values[half:], values[:half]]), 1.0)


def placed(body: Body, start: int, num_rows: int) -> Body:
    """`body` as rows `start`... of a taller matrix of `num_rows`, zero elsewhere."""
    stop = start + body.shape[0]

    def tall(values: torch.Tensor) -> torch.Tensor:
        whole = values.new_zeros(num_rows, *values.shape[1:])
        whole[start:stop] = values
        return whole

    if isinstance(body, LowRank):
        return replace(body, up=tall(body.up))
    if isinstance(body, Hadamard):
        first, second = replace(body.first, up=tall(body.first.up)), replace(body.second, up=tall(body.second.up))
        return replace(body, first=first, second=second)
    return Dense(tall(body.dense()), 1.0)


@dataclass(frozen=True)
class Dora:
    """The weight-decomposed part of DoRA: what W + delta is multiplied with, a row (axis 0) or a column (axis 1) at a
    time."""

    axis: int
    factor: torch.Tensor  # (o,) or (i,), float32

    def column(self, ndim: int) -> torch.Tensor:
        """The factor shaped to broadcast against a weight of `ndim` dimensions."""
        shape = [1] * ndim
        shape[self.axis] = -1
        return self.factor.view(shape)


def dora_factor(weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor, axis: int) -> torch.Tensor:
    """magnitude / norm(W + delta), the norm over all dimensions but `axis`; (o,) or (i,) float32. Where the norm is 0:
    1."""
    whole = weight.float() + delta
    norm = whole.square().sum(dim=[dim for dim in range(whole.ndim) if dim != axis]).sqrt()
    return torch.where(norm > 0, magnitude.float().flatten() / norm.clamp_min(1e-30), torch.ones_like(norm))


@dataclass(frozen=True)
class Change:
    """What a LoRA does to one parameter: `body`, or with `dora` (c): (c - 1) * W + c * body."""

    module: str
    parameter: str
    body: Body | Rotation | OutputRotation
    dora: Dora | None = None

    @property
    def name(self) -> str:
        """Of the parameter, dotted."""
        return f"{self.module}.{self.parameter}".lstrip(".")

    def dense(self, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The change at strength 1, float32, in the parameter's shape. `weight` (the base, float32) is needed with
        `dora`."""
        delta = self.body.dense()
        if self.dora is None:
            return delta
        assert weight is not None, "a DoRA needs the base weight"
        factor = self.dora.column(delta.ndim)
        return factor * delta + (factor - 1.0) * weight.float()
