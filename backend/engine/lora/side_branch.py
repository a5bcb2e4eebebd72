"""Unmerged ("hot") LoRA: side branches next to layers whose weights stay as they are, offloaded, FP8 or quantized.

A layer with adapters gets a subclass of its own class, so names, parameters and state dict stay the same, and the
base's forward (streamed, 8-bit, compiled) is called as ever. All low-rank changes of a layer are stacked into one pair
of matrices, so eight LoRAs cost about as much as one. What has no low-rank form acts as what it is:

* DoRA by rows: W' = diag(c) (W + d) needs only the layer's own output; by columns: only its input, scaled.
* LoKr: two small products by reshaping the input.
* OFT: the input is turned before the layer has it.
* A norm's, a bias', an embedding's or a whole matrix' change is added to the parameter for the length of the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from backend.engine.lora.algorithms.delta import (
    Change,
    Dense,
    Dora,
    Hadamard,
    Kronecker,
    LowRank,
    OutputRotation,
    Rotation,
)
from backend.engine.lora.algorithms.oft import turned
from backend.engine.quantization.layers import computing_dtype, is_quantized
from backend.schema.messages import Trouble

LONGEST = 0.125  # length of a row of the stacked down-projections, nearly
STATE = "_adapters"  # the attribute that holds a layer's branches


@dataclass
class Branches:
    """The side branches of one layer. Tensors are in the layer's computation dtype and on its device once it was
    called."""

    down: torch.Tensor | None = None  # (R, i) or (R, i, *k): all low-rank changes stacked
    up: torch.Tensor | None = None  # (o, R), scales and strengths folded in
    kroneckers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    row_excess: torch.Tensor | None = None  # sum of strength * (c - 1) over DoRAs by rows
    column_excess: torch.Tensor | None = None  # likewise by columns
    dense: torch.Tensor | None = None  # (o, i): whole changes beside a quantized weight, which nothing can be added to
    added: dict[str, torch.Tensor] = field(default_factory=dict)  # parameter -> what is added to it during a call
    rotations: list[torch.Tensor] = field(default_factory=list)  # (b, k, k): OFT, applied to the layer's input

    def on(self, like: torch.Tensor) -> Branches:
        """Moves all of them to the device and dtype of `like` (any shape), in place; itself."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(like.device, like.dtype)

        for name in ("down", "up", "row_excess", "column_excess", "dense"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, moved(tensor))
        self.kroneckers = [(moved(left), moved(right)) for left, right in self.kroneckers]
        self.added = {name: moved(tensor) for name, tensor in self.added.items()}
        self.rotations = [moved(turns) for turns in self.rotations]
        return self


def attach(layer: nn.Module, uses: Sequence[tuple[Change, float]]) -> None:
    """Makes exactly these changes, each at its strength, the side branches of `layer`; none removes all branches.

    Raises Trouble("not_supported") where the layer's forward was replaced by others.
    """
    kind = type(layer)
    base = getattr(kind, "adapted_class", kind)
    uses = [(change, strength) for change, strength in uses if strength != 0.0]
    if not uses:
        layer.__dict__.pop(STATE, None)
        if base is not kind:
            layer.__class__ = base
        return
    if "forward" in layer.__dict__ and STATE not in layer.__dict__:
        raise Trouble("not_supported", f"A {base.__name__} whose forward was replaced cannot have a LoRA side branch.")
    layer.__dict__[STATE] = stack(layer, uses)
    layer.__class__ = adapted(base)


def stack(layer: nn.Module, uses: Sequence[tuple[Change, float]]) -> Branches:
    """All changes of one layer, in as few tensors as they allow, in its computation dtype and on its device."""
    like, quantized = _like(layer), is_quantized(layer)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    branches, linear = Branches(), isinstance(layer, nn.Linear)
    # What acts on the weight or on its product must not meet a rotated input; low-rank pairs have the plain one.
    alone = all(isinstance(change.body, Rotation | LowRank | Kronecker) and change.dora is None for change, _ in uses)
    side = linear or (isinstance(layer, nn.Conv2d) and layer.groups == 1 and _zeros(layer))
    for change, strength in uses:
        dora = change.dora
        if change.parameter != "weight" or not side or (dora is not None and not linear):
            _add_to_parameter(branches, change, strength)
            continue
        body = _branch_form(change, linear)
        if isinstance(body, Kronecker):
            branches.kroneckers.append(_balanced_kronecker(body, strength))
        elif isinstance(body, Rotation) and alone:
            branches.rotations.append(body.turns * strength)
        elif isinstance(body, LowRank):
            pairs.append(_scaled_pair(body, dora, strength))
        elif quantized:
            dense = (change.dense() if dora is None else dora.column(2) * body.dense()) * strength
            branches.dense = dense if branches.dense is None else branches.dense + dense
        else:
            _add_to_parameter(branches, change, strength)
            continue
        if dora is not None:
            _add_excess(branches, dora, strength)
    if pairs:
        ups, downs = zip(*pairs, strict=True)
        branches.up, branches.down = _balanced(torch.cat(ups, dim=1), torch.cat(downs))
    if like.device.type == "meta":
        return branches
    return branches.on(like if like.is_floating_point() and like.dtype.itemsize > 1 else like.to(torch.bfloat16))


def _like(layer: nn.Module) -> torch.Tensor:
    """A tensor of the layer's device, and of its computation dtype or (8 bits) the stored one."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return next(layer.parameters(recurse=False))
    return torch.empty(0, dtype=computing_dtype(layer), device=weight.device) if is_quantized(layer) else weight


def _scaled_pair(body: LowRank, dora: Dora | None, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(up (o, r), down (r, i, ...)) float32, with scale, strength and DoRA's factor folded in."""
    up, down = body.up.float() * (body.scale * strength), body.down.float()
    if dora is None:
        return up, down
    return (up * dora.factor[:, None], down) if dora.axis == 0 else (up, down * dora.factor[None])


def _balanced_kronecker(body: Kronecker, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors, float32, with scale and strength folded in, and rows of the right one of about length 1."""
    left, right = body.left.float() * (body.scale * strength), body.right.float()
    power = _power_of_two(right.flatten(1).norm(dim=1).max())
    return left * power, right / power


def _add_excess(branches: Branches, dora: Dora, strength: float) -> None:
    name = "row_excess" if dora.axis == 0 else "column_excess"
    excess, before = (dora.factor - 1.0) * strength, getattr(branches, name)
    setattr(branches, name, excess if before is None else before + excess)


def _balanced(up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same product from factors of which neither is large, so that what lies between them does not overflow in
    float16.

    Each rank's row of `down` (R, ...) is brought to the length of its column of `up` (o, R), but to `LONGEST` at most,
    so that even large inputs are not made larger; by powers of two, which costs no precision.
    """
    rows, columns = down.flatten(1).norm(dim=1), up.norm(dim=0)
    wanted = (rows * columns).sqrt().clamp(max=LONGEST)
    some = (rows > 0) & (columns > 0) & rows.isfinite() & columns.isfinite()
    powers = torch.where(some, torch.exp2(torch.round(torch.log2(rows / wanted.clamp_min(1e-30)))), 1.0)
    powers = torch.where(powers.isfinite() & (powers > 0), powers, 1.0)
    return up * powers, down / powers.view(-1, *[1] * (down.ndim - 1))


def _power_of_two(length: torch.Tensor) -> float:
    """The power of two nearest to a length; 1 for none."""
    value = float(length)
    return 2.0 ** round(math.log2(value)) if 0.0 < value < math.inf else 1.0


def _zeros(layer: nn.Conv2d) -> bool:
    return layer.padding_mode == "zeros"


def _branch_form(change: Change, linear: bool) -> LowRank | Kronecker | Dense | Rotation | OutputRotation:
    """The body in the form that is cheapest as a side branch: a pair of matrices if the rank is small, else whole."""
    body = change.body
    if isinstance(body, Hadamard):
        small = body.rank <= min(body.shape[0], body.shape[1]) // 2
        return body.low_rank() if small else Dense(body.dense(), 1.0)
    if isinstance(body, Kronecker) and (not linear or change.dora is not None):
        return Dense(body.dense(), 1.0)
    return body


def _add_to_parameter(branches: Branches, change: Change, strength: float) -> None:
    """The change as a tensor that is added to the parameter during a call."""
    if change.dora is None:
        delta = change.dense() * strength
        before = branches.added.get(change.parameter)
        branches.added[change.parameter] = delta if before is None else before + delta
        return
    factor = change.dora.column(len(change.body.shape))
    delta = factor * change.body.dense() * strength
    excess = (factor - 1.0) * strength
    for key, value in ((change.parameter, delta), (change.parameter + "*", excess)):
        before = branches.added.get(key)
        branches.added[key] = value if before is None else before + value


@lru_cache(maxsize=256)
def adapted(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `kind` that calls its forward and adds the branches."""
    forward = (
        _forward_linear(kind)
        if issubclass(kind, nn.Linear)
        else _forward_conv(kind)
        if issubclass(kind, nn.Conv2d)
        else _forward_any(kind)
    )
    name = f"Adapted{kind.__name__}"
    made = type(
        name, (kind,), {"forward": forward, "adapted_class": kind, "__module__": kind.__module__, "__qualname__": name}
    )
    return cast(type[nn.Module], made)


def _near(layer: nn.Module, x: torch.Tensor) -> Branches:
    """The branches of `layer`, their matrices on the device and in the dtype of its input."""
    branches: Branches = getattr(layer, STATE)
    up = branches.up
    if up is not None and (up.dtype != x.dtype or up.device != x.device):
        branches.on(x)
    return branches


def _forward_linear(kind: type[nn.Module]) -> Callable:
    base = kind.forward

    def forward(self, x, *args, **kwargs):
        branches = _near(self, x)
        if branches.added:
            with _with_added(self, branches):
                y = base(self, x, *args, **kwargs)
            y = _scaled_beside(self, x, y, base, branches)
        elif branches.row_excess is not None or branches.column_excess is not None:
            y = _scaled(self, x, base, branches)
        else:
            y = base(self, turned(x, branches.rotations) if branches.rotations else x, *args, **kwargs)
        if branches.up is not None and branches.down is not None:
            y = _plus(y, F.linear(x, branches.down), branches.up)
        if branches.dense is not None:
            y = y + F.linear(x, branches.dense.to(x.device, x.dtype))
        for left, right in branches.kroneckers:
            y = y + _kronecker(x, left.to(x.dtype), right.to(x.dtype))
        return y

    return forward


def _scaled(layer: nn.Linear, x: torch.Tensor, base: Callable, branches: Branches) -> torch.Tensor:
    """The layer with its rows or its columns scaled, without touching its weight; both at once add, they do not
    multiply."""
    rows, columns = branches.row_excess, branches.column_excess
    if rows is None and columns is not None:
        return base(layer, x + x * columns.to(x.device, x.dtype))
    y = base(layer, x)
    return _scaled_beside(layer, x, y, base, branches, product=y if layer.bias is None else y - layer.bias.to(y.dtype))


def _scaled_beside(
    layer: nn.Linear,
    x: torch.Tensor,
    y: torch.Tensor,
    base: Callable,
    branches: Branches,
    product: torch.Tensor | None = None,
) -> torch.Tensor:
    """y plus what scaled rows and columns of the bare weight add. `product`: x W^T, if it is known."""
    rows, columns = branches.row_excess, branches.column_excess
    if rows is not None:
        product = _product(layer, x, base) if product is None else product
        y = y + product * rows.to(y.device, y.dtype)
    if columns is not None:
        y = y + _product(layer, x * columns.to(x.device, x.dtype), base)
    return y


def _product(layer: nn.Linear, x: torch.Tensor, base: Callable) -> torch.Tensor:
    """x W^T by the layer's own weight, however it is stored."""
    if not is_quantized(layer):
        return F.linear(x, layer.weight.to(x.dtype))
    y = base(layer, x)
    return y if layer.bias is None else y - layer.bias.to(y.dtype)


def _plus(y: torch.Tensor, inner: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """y + inner @ up^T; in place where nobody else can see y."""
    if torch.is_grad_enabled() or not y.is_contiguous():
        return y + F.linear(inner, up)
    y.view(-1, y.shape[-1]).addmm_(inner.reshape(-1, inner.shape[-1]), up.t())
    return y


def _kronecker(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """x (..., i1*i2) times kron(left, right)^T: (..., o1*o2)."""
    cells = F.linear(x.unflatten(-1, (left.shape[1], right.shape[1])), right)
    return torch.matmul(left, cells).flatten(-2)


def _forward_conv(kind: type[nn.Module]) -> Callable:
    base = kind.forward

    def forward(self, x, *args, **kwargs):
        branches = _near(self, x)
        with _with_added(self, branches) if branches.added else nullcontext():
            y = base(self, x, *args, **kwargs)
        if branches.up is not None and branches.down is not None:
            inner = F.conv2d(x, branches.down, None, self.stride, self.padding, self.dilation)
            y = y + F.conv2d(inner, branches.up[:, :, None, None])
        return y

    return forward


def _forward_any(kind: type[nn.Module]) -> Callable:
    base = kind.forward

    def forward(self, *args, **kwargs):
        with _with_added(self, getattr(self, STATE)):
            return base(self, *args, **kwargs)

    return forward


@contextmanager
def _with_added(layer: nn.Module, branches: Branches) -> Iterator[None]:
    """Within it the layer's parameters are replaced by their sums with `branches.added`."""
    kept = {}
    try:
        for name, delta in branches.added.items():
            if name.endswith("*"):
                continue
            parameter = layer._parameters[name]
            assert parameter is not None, f"a change of {name} was built for it"
            kept[name] = parameter
            excess = branches.added.get(name + "*")
            whole = parameter.float() + delta.to(parameter.device, torch.float32)
            if excess is not None:
                whole = whole + parameter.float() * excess.to(parameter.device, torch.float32)
            layer._parameters[name] = nn.Parameter(whole.to(parameter.dtype), requires_grad=False)
        yield
    finally:
        layer._parameters.update(kept)
