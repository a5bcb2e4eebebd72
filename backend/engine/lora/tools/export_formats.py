"""LoRA contents as the files of diffusers, ComfyUI and kohya: names, fused projections, and where the scale goes.

diffusers keeps no alpha tensors, so the scale is folded into the up factor (in float32 unless it is a power of two,
which costs nothing); the two others get an alpha beside the factors. What a layout has no form for is refused, never
dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from backend.catalog.state_dict_keys import fill, flatten
from backend.engine.lora.algorithms.delta import Body, Dense, Hadamard, Kronecker, LowRank, sum_of, swapped
from backend.engine.lora.tools.content import Content
from backend.engine.lora.tools.key_tables import Book, native_finder
from backend.engine.lora.tools.text_encoder_keys import MARK, text_stem
from backend.schema.messages import Trouble


@dataclass(frozen=True)
class Layout:
    """How one program writes LoRA files."""

    name: str
    prefix: str
    unet_prefix: str
    down: str
    up: str
    native: bool  # the original's module names, fused where they are
    flat: bool
    alpha: bool  # a tensor beside the factors


LAYOUTS = {
    "diffusers": Layout("diffusers", "transformer.", "unet.", "lora_A", "lora_B", False, False, False),
    "comfyui": Layout("comfyui", "diffusion_model.", "diffusion_model.", "lora_A", "lora_B", True, False, True),
    "kohya": Layout("kohya", "lora_unet_", "lora_unet_", "lora_down", "lora_up", True, True, True),
}


def layout_named(name: str) -> Layout:
    if name not in LAYOUTS:
        raise Trouble("bad_value", f"There is no layout {name!r}.", hint=f"There are {', '.join(LAYOUTS)}.")
    return LAYOUTS[name]


def write_layout(contents: dict[str, Content], layout: Layout, book: Book) -> dict[str, torch.Tensor]:
    """The tensors of a file in `layout`, by key: factors (rank, in) and (out, rank), or as the layout stores them.

    Raises Trouble("not_supported") where the layout cannot express a change.
    """
    named = _as_native(contents, book, layout) if layout.native else contents
    prefix = layout.unet_prefix if book.family.PARTS["dit"].folder == "unet" else layout.prefix
    tensors: dict[str, torch.Tensor] = {}
    for module, content in named.items():
        stem = prefix + (flatten(module) if layout.flat else module)
        if MARK in module:
            stem = text_stem(module, layout.name, book.family)
        tensors |= {f"{stem}.{key}": tensor.contiguous() for key, tensor in _tensors(module, content, layout).items()}
    return tensors


def _tensors(module: str, content: Content, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of one module by suffix."""
    body = _single(content.bodies)
    out: dict[str, torch.Tensor] = {}
    if isinstance(body, LowRank):
        out = _pair(body, layout)
    elif body is not None:
        if layout.name == "diffusers":
            raise Trouble(
                "not_supported",
                f"diffusers' layout has no form for {type(body).__name__.lower()} changes, such as that of {module}.",
                hint="Write it for ComfyUI or kohya, or give it a rank first (resize).",
            )
        out = _other(body)
    if content.magnitude is not None:
        out |= _magnitude(module, content.magnitude, layout)
    if content.bias:
        total = sum_of(content.bias)
        if layout.name == "diffusers":
            if not isinstance(body, LowRank):
                raise Trouble("not_supported", f"diffusers' layout cannot hold a bias of {module} without factors.")
            out["lora_B.bias"] = total
        else:
            out["diff_b"] = total
    return out


def _single(bodies: list[Body]) -> Body | None:
    """One body that is the sum of all; pairs are put side by side."""
    if len(bodies) < 2:
        return bodies[0] if bodies else None
    pairs = [body for body in bodies if isinstance(body, LowRank)]
    if len(pairs) == len(bodies):
        return side_by_side(pairs)
    return Dense(sum_of(bodies), 1.0)


def side_by_side(bodies: list[LowRank]) -> LowRank:
    """One pair whose product is the sum of all, scales folded into the ups in float32."""
    ups = [body.up.float() * body.scale for body in bodies]
    return LowRank(torch.cat(ups, dim=1), torch.cat([body.down.float() for body in bodies]), 1.0)


def _pair(body: LowRank, layout: Layout) -> dict[str, torch.Tensor]:
    up, down, rank = body.up, body.down, body.down.shape[0]
    if down.ndim > 2:
        up = up.reshape(*up.shape, *[1] * (down.ndim - 2))
    found = {}
    if layout.alpha:
        found["alpha"] = torch.tensor(float(body.scale * rank), dtype=torch.float32)
        if abs(float(found["alpha"]) / rank - body.scale) > 1e-7 * abs(body.scale):
            up, found["alpha"] = up.float() * body.scale, torch.tensor(float(rank))
    else:
        exact = math.frexp(abs(body.scale))[0] == 0.5 and up.dtype != torch.float16
        up = up * body.scale if exact else up.float() * body.scale
    return {f"{layout.down}.weight": down, f"{layout.up}.weight": up, **found}


def _other(body: Body) -> dict[str, torch.Tensor]:
    if isinstance(body, Hadamard):
        first, second = body.first, body.second
        rank = first.down.shape[0]
        halves = {"hada_w1_a": first.up, "hada_w1_b": first.down, "hada_w2_a": second.up, "hada_w2_b": second.down}
        flat = {key: tensor.flatten(1) for key, tensor in halves.items()}
        return {**flat, "alpha": torch.tensor(float(body.scale * rank), dtype=torch.float32)}
    if isinstance(body, Kronecker):
        return {
            "lokr_w1": body.left.float() * body.scale,
            "lokr_w2": body.right,
        }  # both whole: a reader applies no scale
    return {"diff": body.dense()}


def _magnitude(module: str, magnitude: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    if layout.name != "diffusers":
        return {"dora_scale": magnitude}
    if magnitude.shape[0] == 1 and magnitude.numel() > 1:
        raise Trouble("not_supported", f"diffusers' layout has no form for the DoRA by columns of {module}.")
    return {"lora_magnitude_vector": magnitude.flatten()}


def _as_native(contents: dict[str, Content], book: Book, layout: Layout) -> dict[str, Content]:
    """The contents under the original's names; parts of a fused module together, missing ones as zeros."""
    find = native_finder(book, layout.name)
    native: dict[str, Content] = {}
    parts: dict[str, tuple] = {}
    for module, content in contents.items():
        found = find(module)
        if found is None:
            native[module] = content
            continue
        rule, place, numbers = found
        theirs = fill(rule.theirs, numbers)
        if len(rule.modules) == 1:
            native[theirs] = _swapped(content) if rule.swap_halves else content
        else:
            parts.setdefault(theirs, (rule, {}))[1][place] = content
    for theirs, (rule, pieces) in parts.items():
        native[theirs] = _fused(theirs, pieces, rule.rows or (1,) * len(rule.modules))
    return native


def _swapped(content: Content) -> Content:
    magnitude = content.magnitude
    if magnitude is not None and magnitude.shape[0] > 1:
        magnitude = torch.cat(magnitude.chunk(2)[::-1])
    return Content([swapped(body) for body in content.bodies], magnitude, [swapped(body) for body in content.bias])


def _fused(theirs: str, pieces: dict[int, Content], shares: tuple[int, ...]) -> Content:
    """Contents of a fused module's parts as one: downs stacked, ups along the diagonal, absent parts zero."""
    unit = _unit(theirs, pieces, shares)
    whole = {place: _single(content.bodies) for place, content in pieces.items()}
    bodies = {place: body for place, body in whole.items() if body is not None}
    content = Content()
    if bodies:
        content.bodies = [_fused_body(theirs, bodies, [share * unit for share in shares])]
    if any(content_.bias for content_ in pieces.values()):
        rows = []
        for place, share in enumerate(shares):
            biases = pieces[place].bias if place in pieces else []
            rows.append(sum_of(biases) if biases else torch.zeros(share * unit))
        content.bias = [Dense(torch.cat(rows), 1.0)]
    magnitudes = {place: piece.magnitude for place, piece in pieces.items() if piece.magnitude is not None}
    if magnitudes:
        if len(magnitudes) < len(shares):
            raise Trouble("not_supported", f"{theirs} is a DoRA in some of its parts only; that has no fused form.")
        if any(magnitude.shape[0] == 1 for magnitude in magnitudes.values()):
            raise Trouble("not_supported", f"{theirs} is a DoRA by columns; its parts cannot be put together.")
        content.magnitude = torch.cat([magnitudes[place] for place in range(len(shares))])
    return content


def _unit(theirs: str, pieces: dict[int, Content], shares: tuple[int, ...]) -> int:
    """Rows of one share."""
    for place, content in pieces.items():
        for body in (*content.bodies, *content.bias):
            if body.shape[0] % shares[place] == 0:
                return body.shape[0] // shares[place]
    raise Trouble("shape_mismatch", f"The parts of {theirs} do not have the rows that its fused form takes.")


def _fused_body(theirs: str, bodies: dict[int, Body], rows: list[int]) -> Body:
    pairs = {place: body for place, body in bodies.items() if isinstance(body, LowRank)}
    if len(pairs) == len(bodies):
        return _fused_pairs(pairs, rows)
    lohas = {place: body for place, body in bodies.items() if isinstance(body, Hadamard)}
    if len(lohas) == len(bodies) and len({body.scale for body in lohas.values()}) == 1:
        firsts = _fused_pairs({place: replace(body.first, scale=1.0) for place, body in lohas.items()}, rows)
        seconds = _fused_pairs({place: replace(body.second, scale=1.0) for place, body in lohas.items()}, rows)
        if firsts.down.shape == seconds.down.shape:
            return Hadamard(firsts, seconds, next(iter(bodies.values())).scale)
    like = next(iter(bodies.values()))
    parts = [
        bodies[place].dense() if place in bodies else torch.zeros(num, *like.shape[1:])
        for place, num in enumerate(rows)
    ]
    return Dense(torch.cat(parts), 1.0)


def _fused_pairs(bodies: dict[int, LowRank], rows: list[int]) -> LowRank:
    """Pairs of equal scale keep it (so alpha grows with the rank); of different scales have it folded in. A shared down
    stays one."""
    pairs = list(bodies.values())
    scale = pairs[0].scale
    if any(pair.scale != scale for pair in pairs):
        bodies = {place: LowRank(pair.up.float() * pair.scale, pair.down, 1.0) for place, pair in bodies.items()}
        pairs, scale = list(bodies.values()), 1.0
    dtype = pairs[0].up.dtype if len({pair.up.dtype for pair in pairs}) == 1 else torch.float32
    shared = all(pair.down.shape == pairs[0].down.shape and torch.equal(pair.down, pairs[0].down) for pair in pairs)
    if shared:
        rank = pairs[0].down.shape[0]
        ups = [
            bodies[place].up.to(dtype) if place in bodies else torch.zeros(num, rank, dtype=dtype)
            for place, num in enumerate(rows)
        ]
        return LowRank(torch.cat(ups), pairs[0].down, scale)
    up = torch.zeros(sum(rows), sum(pair.down.shape[0] for pair in pairs), dtype=dtype)
    reached = 0
    for place, pair in bodies.items():
        start, rank = sum(rows[:place]), pair.down.shape[0]
        up[start : start + rows[place], reached : reached + rank] = pair.up
        reached += rank
    return LowRank(up, torch.cat([pair.down for pair in pairs]), scale)
