"""One tensor that is there twice: in two files of one model, or under two names that mean the same.

Equal ones count once, others are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backend.catalog.formats.header import is_far
from backend.catalog.key_prefixes import bare
from backend.catalog.spec import TensorAt
from backend.schema.messages import Trouble

PIECE = 1 << 22  # bytes compared at a time


def are_same(one: TensorAt, other: TensorAt) -> bool:
    """Whether both hold the same numbers in the same form.

    Of what is not on this machine only dtype and shape are compared.
    """
    if (one.dtype, tuple(one.shape), one.nbytes) != (other.dtype, tuple(other.shape), other.nbytes):
        return False
    if is_far(one.file) or is_far(other.file):
        return True
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for done in range(0, one.nbytes, PIECE):
            count = min(PIECE, one.nbytes - done)
            if first.read(count) != second.read(count):
                return False
    return True


def check_same(one: TensorAt, other: TensorAt) -> None:
    """Raises Trouble("repeated"), naming both, unless they are the same."""
    if are_same(one, other):
        return
    where = one.file.name if one.file == other.file else f"{one.file.name} and {other.file.name}"
    names = one.key[:160] if one.key == other.key else f"{one.key[:160]} and {other.key[:160]}"
    raise Trouble(
        "repeated",
        f"{where} give one tensor twice and differently: {names}.",
        hint="Only one of them can be meant. Name or keep only the files that belong together.",
        detail=(
            f"{one.file}: {one.key} {one.dtype} {list(one.shape)}\n{other.file}: {other.key} {other.dtype} "
            f"{list(other.shape)}"
        ),
    )


def check_parts(tensors: Mapping[str, TensorAt], parts: Iterable[Iterable[TensorAt]]) -> None:
    """Raises Trouble("repeated") where two tensors are, their prefixes aside, the same one of a part, and differ.

    `parts`: what each part took.
    """
    taken = [{(piece.file, piece.key): piece for at in part for piece in at.pieces} for part in parts]
    for place, mine in enumerate(taken):
        others = {key for other in (*taken[:place], *taken[place + 1 :]) for key in other}
        by_name: dict[str, TensorAt] = {}
        for (_, key), at in mine.items():
            by_name.setdefault(bare(key), at)
        for key, at in tensors.items():
            own = by_name.get(bare(key))
            if own is None or own.key == at.key or (at.file, at.key) in others:
                continue
            if tuple(at.shape) == tuple(own.shape):
                check_same(own, at)
