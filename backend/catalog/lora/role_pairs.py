"""Which tensors of a LoRA's module belong together, and whether their shapes agree: what a header tells of damage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PAIRS = (  # (role, partner): one without the other is half a pair
    ("down", "up"),
    ("up", "down"),
    ("mid", "down"),
    ("embedding_down", "embedding_up"),
    ("embedding_up", "embedding_down"),
    ("hada_w1_a", "hada_w1_b"),
    ("hada_w1_b", "hada_w1_a"),
    ("hada_w2_a", "hada_w2_b"),
    ("hada_w2_b", "hada_w2_a"),
    ("hada_w1_a", "hada_w2_a"),
    ("hada_w2_a", "hada_w1_a"),
    ("hada_t1", "hada_t2"),
    ("hada_t2", "hada_t1"),
    ("lokr_w1_a", "lokr_w1_b"),
    ("lokr_w1_b", "lokr_w1_a"),
    ("lokr_w2_a", "lokr_w2_b"),
    ("lokr_w2_b", "lokr_w2_a"),
)
PRODUCTS = (("down", "up"), ("hada_w1_b", "hada_w1_a"), ("hada_w2_b", "hada_w2_a"))  # (inner, outer) of equal rank


def half_of(roles: Iterable[str]) -> tuple[str, str] | None:
    """(a role, the partner that it lacks) of a module whose tensors are not all there."""
    roles = set(roles)
    return next(((role, partner) for role, partner in PAIRS if role in roles and partner not in roles), None)


def disagreeing_ranks(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """The two ranks of a pair whose factors cannot be multiplied. `shapes`: role -> shape."""
    for inner, outer in PRODUCTS:
        down, up = shapes.get(inner, ()), shapes.get(outer, ())
        if len(down) > 1 and len(up) > 1 and "hada_t1" not in shapes and down[0] != up[1]:
            return down[0], up[1]
    return None


def does_nothing(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a module has an alpha alone, or only pairs of rank 0."""
    others = {role: shape for role, shape in shapes.items() if role != "alpha"}
    return not others or (set(others) <= {"down", "up"} and len(others) == 2 and others["down"][:1] == (0,))
