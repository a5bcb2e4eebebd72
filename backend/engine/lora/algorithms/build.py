"""Build the changes of a LoRA module from its tensors: LoRA, LoCon, LoHa, LoKr, DoRA, diff, biases, norms."""

from __future__ import annotations

from dataclasses import replace

import torch

from backend.catalog.formats.header import MOST_DIMENSIONS
from backend.catalog.lora.keys import ALGORITHMS, plain
from backend.catalog.lora.metadata import number
from backend.catalog.lora.role_pairs import half_of
from backend.engine.lora.algorithms.delta import Body, Change, Dense, Hadamard, Kronecker, LowRank, sum_of
from backend.engine.lora.algorithms.dora import with_dora
from backend.engine.lora.algorithms.module_tensors import (
    Module,
    at_place,
    cut,
    fitted,
    in_shape,
    incomplete,
    mismatch,
    product,
)
from backend.engine.lora.algorithms.oft import (
    is_output_rotation,
    is_rotation,
    output_rotation_changes,
    rotation_changes,
)
from backend.engine.lora.algorithms.scale import alpha_value
from backend.schema.messages import Trouble

DOUBT = "whole Kronecker factors act at full strength; a trainer that meant alpha / rank for them does not say so"
UNREAD = (
    "oft",
    "oft_rescale",
    "oft_marker",
    "ia3_on_input",
    "ia3_l",
    "oft_embedding",
    "oft_norm",
    "vera",
    "boft",
    "glora_a1",
    "glora_a2",
    "glora_b1",
    "glora_b2",
)
MOST_NUMBERS = 2**31  # of one change; the largest layer of any model here has a twentieth
BUTTERFLIES = 4  # dimensions of a stack of orthogonal blocks: [factors, blocks, b, b]; OFT's has three


def changes_of(module: Module) -> list[Change]:
    """What `module` changes. Raises Trouble before anything is changed: incomplete pairs, shapes or ranks that
    disagree, numbers that are not finite, an algorithm that is not read."""
    if is_rotation(module):
        return rotation_changes(module)
    if is_output_rotation(module):
        return output_rotation_changes(module)
    leave_out_rank_0(module)
    check_whole(module)
    _check_reshaped(module)
    changes: list[Change] = []
    body = weight_body(module)
    if body is not None:
        changes += _on_weight(module, body)
    bias = bias_body(module)
    if bias is not None:
        changes += _on_bias(module, bias)
    if "set_bias" in module.roles:
        changes += _on_bias(module, _new_bias(module))
    if "diff_m" in module.roles:
        changes += [
            Change(slot.module, slot.parameter, fitted(module, Dense(module.read("diff_m"), 1.0), slot))
            for slot in module.slots
        ]
    return changes


def leave_out_rank_0(module: Module) -> None:
    """Takes a pair of rank 0 out of `module`: its product is 0 whatever alpha says. Some trainers write such pairs for
    layers they leave out."""
    shapes = {role: module.source.shapes[key] for role, key in module.roles.items()}
    for inner, outer in (("down", "up"), ("hada_w1_b", "hada_w1_a"), ("embedding_down", "embedding_up")):
        down, up = shapes.get(inner, ()), shapes.get(outer, ())
        if len(down) > 1 and len(up) > 1 and down[0] == 0 == up[1]:
            gone = ("down", "up", "mid", "alpha", "up_bias", "down_bias", "embedding_down", "embedding_up")
            module.roles = {
                role: key for role, key in module.roles.items() if role not in gone and not role.startswith("hada_")
            }
            module.notes.append(f"{plain(module.stem)} has rank 0, so it does nothing")
            module.unused[plain(module.stem)] = "has rank 0, so it changes nothing"


def check_whole(module: Module) -> None:
    """Raises Trouble for half a pair and for an algorithm that is not read."""
    name, roles = module.source.name, module.roles
    for role in roles:
        if role in UNREAD or role.startswith("glora"):
            what = ALGORITHMS.get(role) or {"glora": "GLoRA", "oft": "OFT"}.get(role.partition("_")[0], role)
            what = "BOFT" if role == "oft" and len(module.source.shapes[roles[role]]) == BUTTERFLIES else what
            raise Trouble(
                "unknown_algorithm",
                f"{name} uses {what} on {plain(module.stem)}, which is not read.",
                hint="Convert it with the tool that made it to LoRA, LoHa or LoKr; nothing was changed.",
            )
    half = half_of(roles)
    if half:
        raise incomplete(module, f"has {roles[half[0]]} without its other half ({half[1].replace('_', ' ')})")
    left = "lokr_w1" in roles or "lokr_w1_a" in roles
    right = "lokr_w2" in roles or "lokr_w2_a" in roles
    if left != right:
        raise incomplete(module, f"has one Kronecker factor of {plain(module.stem)} without the other")
    based = {"down", "hada_w1_a", "diff", "embedding_down"} & set(roles) or left
    if ("magnitude" in roles or "magnitude_out" in roles) and not based:
        raise incomplete(module, f"has a DoRA magnitude for {plain(module.stem)} without its factors")


def _check_reshaped(module: Module) -> None:
    """`reshape_weight` is the shape that the weight has in the model a LoRA was made for; another one cannot be made
    here."""
    if "reshape_weight" not in module.roles:
        return
    stored = module.source.read_stored(module.roles["reshape_weight"]).flatten()
    stored = stored.float() if stored.is_floating_point() else stored
    some = 0 < stored.numel() <= MOST_DIMENSIONS and not stored.is_complex()
    if not some or not bool(torch.isfinite(stored).all()):
        raise mismatch(module, "reshape_weight", stored.shape, "the sizes of a weight")
    shape = tuple(int(size) for size in stored)
    for slot in module.slots:
        own = module.shape_of(f"{slot.module}.{slot.parameter}")
        if own is None or shape[1:] != own[1:] or shape[0] * (slot.share[1] - slot.share[0]) != own[0] * slot.share[2]:
            raise mismatch(module, "reshape_weight", shape, list(own or ()))


def weight_body(module: Module) -> Body | None:
    """The change of the weight as the file has it, over all rows of a fused module."""
    roles = module.roles
    bodies: list[Body] = []
    if "down" in roles:
        bodies.append(_lora(module))
    if "embedding_down" in roles:
        bodies.append(_of_embedding(module))
    if "hada_w1_a" in roles:
        bodies.append(_loha(module))
    if "lokr_w1" in roles or "lokr_w1_a" in roles:
        bodies.append(_lokr(module))
    if "diff" in roles:
        bodies.append(Dense(module.read("diff"), 1.0))
    if "set_weight" in roles:
        bodies.append(_replacement(module))
    _check_sizes(module, bodies)
    if "scalar" in roles and bodies:
        bodies = [replace(body, scale=body.scale * alpha_value(module.source, roles["scalar"])) for body in bodies]
    if len(bodies) < 2:
        return bodies[0] if bodies else None
    return Dense(sum_of(bodies), 1.0)


def _check_sizes(module: Module, bodies: list[Body]) -> None:
    """Before anything is multiplied out: small factors may stand for a change that no memory holds, or for several of
    unlike sizes."""
    for body in bodies:
        if product(body.shape) > MOST_NUMBERS or product(body.shape) != product(bodies[0].shape):
            raise mismatch(module, "change", body.shape, list(bodies[0].shape) if len(bodies) > 1 else "a smaller one")


def _lora(module: Module) -> LowRank:
    down, up = module.read("down"), module.read("up")
    rank = down.shape[0]
    up = up.reshape(up.shape[0], -1)
    if up.shape[1] != rank:
        raise Trouble(
            "rank_mismatch",
            f"{module.source.name}: the factors of {plain(module.stem)} have ranks {rank} and {up.shape[1]}, "
            "which must be equal.",
            hint="The file is damaged; nothing was changed.",
        )
    if "mid" in module.roles:
        down = _tucker(module, module.read("mid"), down.reshape(rank, -1))
        if down.shape[0] != rank:
            raise mismatch(module, "core", (down.shape[0], rank), f"[{rank}, {rank}, ...]")
    return LowRank(up, down, module.scale(rank))


def _of_embedding(module: Module) -> LowRank:
    """PEFT's pair for an embedding: A is (r, tokens), B (width, r), and the table, (tokens, width), changes by (B
    A)^T."""
    a, b = module.read("embedding_down"), module.read("embedding_up")
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise mismatch(module, "embedding's pair", (*a.shape, *b.shape), "[rank, tokens] and [width, rank]")
    return LowRank(a.t(), b.t(), module.scale(a.shape[0]))


def _tucker(module: Module, core: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A convolution's core (m, n, *k) applied to its factor (n, i): (m, i, *k)."""
    if core.ndim < 3 or core.shape[1] != down.shape[0]:
        raise mismatch(module, "core", core.shape, f"[rank, {down.shape[0]}, ...]")
    return torch.einsum("mn...,ni->mi...", core.float(), down.float())


def _loha(module: Module) -> Hadamard:
    halves = []
    for half in ("1", "2"):
        a, b = module.read(f"hada_w{half}_a"), module.read(f"hada_w{half}_b")
        if a.ndim != 2:
            raise mismatch(module, f"hada_w{half}_a", a.shape, "two dimensions")
        if f"hada_t{half}" in module.roles:  # tucker: a is (r, o) and b (r, i)
            halves.append(LowRank(a.t(), _tucker(module, module.read(f"hada_t{half}"), b), 1.0))
        else:
            halves.append(LowRank(a, b, 1.0))
        if halves[-1].up.ndim != 2 or halves[-1].up.shape[1] != halves[-1].down.shape[0]:
            raise mismatch(module, f"hada_w{half}_a", a.shape, f"a rank of {b.shape[0]}")
    if halves[0].shape != halves[1].shape:
        raise mismatch(module, "second half", halves[1].shape, list(halves[0].shape))
    return Hadamard(halves[0], halves[1], module.scale(module.read("hada_w1_b").shape[0]))


def _lokr(module: Module) -> Kronecker:
    ranks = []

    def factor(side: str) -> torch.Tensor:
        if f"lokr_{side}" in module.roles:
            return module.read(f"lokr_{side}")
        a, b = module.read(f"lokr_{side}_a"), module.read(f"lokr_{side}_b")
        ranks.append(b.shape[0])
        core = f"lokr_t{side[-1]}"
        if core in module.roles:  # a is (r, o2), b (r, i2)
            return torch.einsum("mo,mi...->oi...", a.float(), _tucker(module, module.read(core), b))
        if a.ndim != 2 or a.shape[1] != b.shape[0]:
            raise mismatch(module, f"lokr_{side}_a", a.shape, f"a rank of {b.shape[0]}")
        return a.float() @ b.flatten(1).float()

    left, right = factor("w1"), factor("w2")
    if left.ndim != 2:
        raise mismatch(module, "lokr_w1", left.shape, "two dimensions")
    right = _with_kernel(module, left, right)
    if ranks:
        return Kronecker(left, right, module.scale(ranks[-1]))
    _doubt_whole_factors(module)
    return Kronecker(left, right, module.scale(None))  # both whole: there is no rank, and only PEFT's config gives one


def _doubt_whole_factors(module: Module) -> None:
    """Where metadata gives a rank, an alpha below it may have been meant as a factor; the file cannot show it."""
    dim = number(module.source.metadata.get("ss_network_dim"))
    alpha = alpha_value(module.source, module.roles["alpha"]) if "alpha" in module.roles else None
    if dim and alpha and alpha < dim and DOUBT not in module.notes:
        module.notes.append(DOUBT)


def _with_kernel(module: Module, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A convolution's right factor is stored with its kernel flattened into the columns when it is decomposed."""
    shape = module.shape_of(f"{module.slots[0].module}.weight") or ()
    kernel = shape[2:]
    flat = right.ndim == 2 and kernel and left.shape[1] * right.shape[1] == product(shape[1:])
    flat = flat and right.shape[1] % product(kernel) == 0
    return right.reshape(right.shape[0], -1, *kernel) if flat else right


def _replacement(module: Module) -> Dense:
    new, slots = module.read("set_weight").float(), module.slots
    if any(slot.place != (0, 1, 1) for slot in slots):
        raise mismatch(module, "set_weight", new.shape, "a whole module")
    old = torch.cat([module.weight_of(f"{slot.module}.{slot.parameter}".lstrip(".")).float() for slot in slots])
    if new.shape != old.shape:
        raise mismatch(module, "set_weight", new.shape, f"{list(old.shape)}, the shape of what it replaces")
    return Dense(new - (torch.cat(old.chunk(2)[::-1]) if slots[0].swap_halves else old), 1.0)


def _new_bias(module: Module) -> Dense:
    new = module.read("set_bias").float()
    if any(slot.place != (0, 1, 1) for slot in module.slots):
        raise mismatch(module, "bias", new.shape, "that of a whole module")
    if any(module.shape_of(f"{slot.module}.bias") is None for slot in module.slots):
        return Dense(torch.zeros_like(new), 1.0)
    old = torch.cat([module.weight_of(f"{slot.module}.bias").float() for slot in module.slots])
    if new.shape != old.shape:
        raise mismatch(module, "bias", new.shape, list(old.shape))
    return Dense(new - (torch.cat(old.chunk(2)[::-1]) if module.slots[0].swap_halves else old), 1.0)


def bias_body(module: Module) -> Dense | None:
    """The change of the bias as the file has it, over all rows of a fused module."""
    values = module.read("diff_b").float() if "diff_b" in module.roles else None
    if "up_bias" in module.roles and "down" in module.roles:
        scale = module.scale(module.source.shapes[module.roles["down"]][0])
        added = module.read("up_bias").float() * scale
        if "down_bias" in module.roles:
            up = module.read("up").float()
            added = added + scale * (up.reshape(up.shape[0], -1) @ module.read("down_bias").float())
        values = added if values is None else values + added
    return None if values is None else Dense(values, 1.0)


def _on_weight(module: Module, body: Body) -> list[Change]:
    bodies = [(slot, fitted(module, body, slot)) for slot in module.slots]
    role = "magnitude" if "magnitude" in module.roles else "magnitude_out"
    if role not in module.roles:
        return [Change(slot.module, slot.parameter, fitted) for slot, fitted in bodies]
    return with_dora(module, body, bodies, module.read(role).float(), only_rows=role == "magnitude_out")


def _on_bias(module: Module, body: Dense) -> list[Change]:
    changes = []
    for slot in module.slots:
        name = f"{slot.module}.bias"
        shape = module.shape_of(name)
        if shape is None:
            module.unused[plain(module.stem) + " (bias)"] = "this module has no bias to change"
            continue
        share = cut(body, slot)
        changes.append(Change(slot.module, "bias", in_shape(module, at_place(share, slot, shape[0]), shape)))
    return changes
