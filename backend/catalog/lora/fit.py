"""Whether a LoRA fits a model: whether every module it touches is there and has its size.

By headers alone, without torch.

What the engine would refuse is told apart from what it would leave out: a LoRA of another width changes nothing and
draws nothing, one with a few modules that this model lacks acts with the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt, prod
from pathlib import Path

from backend.catalog.family import Family
from backend.catalog.formats.read import read_header
from backend.catalog.formats.safetensors import read_layout
from backend.catalog.key_prefixes import unwrapped
from backend.catalog.lora.identify import PICKLES
from backend.catalog.lora.keys import group, plain
from backend.catalog.lora.module_lookup import Index, Resolved, index_of_rows, resolve
from backend.catalog.lora.role_pairs import disagreeing_ranks, does_nothing, half_of
from backend.catalog.spec import ModelSpec
from backend.schema.messages import Trouble

PACKED = ("U8",)  # dtypes whose shapes in a header may be those of packed codes
MOST_NAMED = 3
_INDEXES: dict[tuple, tuple[dict[str, Index], dict[str, dict[str, tuple[int, ...] | None]]]] = {}


@dataclass(frozen=True)
class Fit:
    """How a LoRA meets a model.

    `refused`: why it cannot act at all; `partly`: what of it is left out. Both "" where it fits.
    """

    refused: str = ""
    partly: str = ""

    @property
    def fits(self) -> bool:
        return not self.refused and not self.partly


def fit_of(path: str | os.PathLike, model: ModelSpec, family: Family) -> Fit:
    """How the LoRA at `path` meets `model`; remembered for as long as neither file changes.

    Raises Trouble for a file that cannot be read.
    """
    path = Path(path)
    status = path.stat()
    indexes, shapes = _model(model, family)
    return _fit(str(path), status.st_size, status.st_mtime_ns, _key(model), _Held(indexes, shapes))


class _Held:
    """What a remembered answer depends on but is not told apart by: its key stands beside it."""

    def __init__(self, indexes: dict[str, Index], shapes: dict):
        self.indexes, self.shapes = indexes, shapes

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)


@lru_cache(maxsize=4096)
def _fit(path: str, nbytes: int, modified: int, key: tuple, held: _Held) -> Fit:
    if path.lower().endswith(PICKLES):
        sizes = {name: tuple(at.shape) for name, at in read_header(Path(path)).tensors.items()}
    else:
        sizes = {name: tuple(entry["shape"]) for name, entry in read_layout(Path(path)).entries.items()}
    return _alike(tuple(sizes), tuple(sizes.values()), key, held)


@lru_cache(maxsize=256)
def _alike(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], key: tuple, held: _Held) -> Fit:
    """Files of one trainer and one rank have the same names and shapes; a library holds many of a kind."""
    return compared(dict(zip(names, shapes, strict=True)), held.indexes, held.shapes)


def compared(
    sizes: Mapping[str, tuple[int, ...]],
    indexes: Mapping[str, Index],
    shapes: Mapping[str, Mapping[str, tuple[int, ...] | None]],
) -> Fit:
    """`sizes`: tensors of a LoRA; `shapes`: part -> parameter -> its shape (None for one that a header does not
    tell)."""
    grouped, others = group(sizes)
    missing, elsewhere, wrong, damaged, num, idle = [], [], [], [], 0, 0
    for stem, roles in grouped.items():
        of = {role: sizes[key] for role, key in roles.items()}
        idle += does_nothing(of)
        if set(roles) == {"alpha"}:
            continue
        num += 1
        half, ranks = half_of(roles), disagreeing_ranks(of)
        if half:
            damaged.append(f"{roles[half[0]]} has no other half ({half[1].replace('_', ' ')})")
        elif ranks:
            damaged.append(f"the factors of {plain(stem)} have ranks {ranks[0]} and {ranks[1]}")
        place = resolve(stem, roles, indexes)
        if isinstance(place, str):
            (elsewhere if "not loaded" in place else missing).append(plain(stem))
            continue
        said = _mismatch(roles, sizes, place, shapes[place.part])
        if said:
            wrong.append(f"{plain(stem)} {said}")
    for key in others:  # norms and biases that a file holds whole
        stem, _, leaf = unwrapped(key).rpartition(".")
        place = resolve(stem, (), indexes) if stem and leaf in ("weight", "scale", "bias") else ""
        if not isinstance(place, str) and len(place.slots) == 1 and len(sizes[key]) == 1:
            parameter = "bias" if leaf == "bias" else place.slots[0].parameter
            own = shapes[place.part].get(f"{place.slots[0].module}.{parameter}")
            if own is not None and len(own) == 1 and own != sizes[key]:
                wrong.append(f"{key} has {sizes[key][0]} numbers, but this model {own[0]}")
    if wrong:
        more = f" ({len(wrong) - 1} more likewise)" if len(wrong) > 1 else ""
        return Fit(refused=f"It was made for a model of another size: {wrong[0]}{more}.")
    if damaged:
        return Fit(refused=f"It is damaged or incomplete: {damaged[0]}.")
    if grouped and idle == len(grouped):
        return Fit(refused="It changes nothing: its modules have an alpha alone, or rank 0.")
    if num and len(missing) + len(elsewhere) == num:
        return Fit(refused=f"This model has none of its {num} modules, such as {(missing or elsewhere)[0]}.")
    parts = []
    if missing:
        parts.append(f"{len(missing)} of its {num} modules are not in this model ({', '.join(missing[:MOST_NAMED])})")
    if elsewhere:
        parts.append(f"{len(elsewhere)} belong to a text encoder that this model has not")
    return Fit(partly="; ".join(parts) + ", and would be left out." if parts else "")


def _mismatch(
    roles: Mapping[str, str], sizes: Mapping[str, tuple[int, ...]], place: Resolved, shapes: Mapping[str, tuple | None]
) -> str:
    """In what a module's tensors do not have the size of the parameters they are for; "" where they do, or where it
    cannot be told."""
    of = {role: sizes[key] for role, key in roles.items()}
    width = _input_width(of)
    change = _change(of)
    if len(place.slots) == 1 and len(of.get("diff_b", ())) == 1:
        bias = shapes.get(f"{place.slots[0].module}.bias")
        if bias is not None and bias != of["diff_b"]:
            return f"changes {of['diff_b'][0]} numbers of a bias, but {place.slots[0].module} here has {bias[0]}"
    for slot in place.slots:
        own = shapes.get(f"{slot.module}.{slot.parameter}".lstrip("."))
        if own is None:
            continue
        start, stop, parts = slot.place
        begin, end, whole = slot.share
        if change is not None:
            rows, columns = change
            have = rows * (end - begin) * parts, own[0] * (stop - start) * whole
            if (columns and columns != prod(own[1:])) or have[0] != have[1]:
                return (
                    f"changes {rows} x {columns} numbers, but {slot.module} here has {own[0]} x {prod(own[1:])}"
                    if whole == 1 == parts
                    else (
                        f"is {columns} wide and {rows} high, which {slot.module} here, {own[0]} x "
                        f"{prod(own[1:])}, has no place for"
                    )
                )
        elif width and prod(own[1:]) % width:
            return f"turns blocks of {width} inputs, but {slot.module} here has {prod(own[1:])}"
    return ""


def _change(of: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """(rows, columns with the kernel) of what these tensors change; None where they do not tell or have odd forms."""
    try:
        if "down" in of and "up" in of:
            if not of["down"][0]:
                return None
            kernel = of["mid"][2:] if "mid" in of else of["down"][2:]
            return of["up"][0], of["down"][1] * prod(kernel)
        if "embedding_down" in of and "embedding_up" in of:
            return of["embedding_down"][1], of["embedding_up"][0]
        if "hada_w1_a" in of and "hada_w1_b" in of:
            if "hada_t1" in of:
                return of["hada_w1_a"][1], of["hada_w1_b"][1] * prod(of["hada_t1"][2:])
            return of["hada_w1_a"][0], prod(of["hada_w1_b"][1:])
        if "lokr_w1" in of or "lokr_w1_a" in of:
            (o1, i1), (o2, i2) = (_half(of, side) for side in ("1", "2"))
            return o1 * o2, i1 * i2
        if len(of.get("oft", ())) == 3:
            return of["oft"][0] * of["oft"][1], 0
        for role in ("diff", "set_weight"):
            if role in of:
                return of[role][0], prod(of[role][1:])
    except (IndexError, KeyError, ValueError):
        return None
    return None


def _half(of: Mapping[str, tuple[int, ...]], side: str) -> tuple[int, int]:
    """(rows, columns) of one Kronecker factor."""
    if f"lokr_w{side}" in of:
        return of[f"lokr_w{side}"][0], prod(of[f"lokr_w{side}"][1:])
    a, b = of[f"lokr_w{side}_a"], of[f"lokr_w{side}_b"]
    if f"lokr_t{side}" in of:
        return a[1], b[1] * prod(of[f"lokr_t{side}"][2:])
    return a[0], prod(b[1:])


def _input_width(of: Mapping[str, tuple[int, ...]]) -> int:
    """Inputs that an OFT's blocks turn: all of a layer's, or those of the one block that is for all; 0 for other
    algorithms."""
    shape = of.get("oft", ())
    if len(shape) != 2:
        return 0
    return shape[0] * ((1 + isqrt(1 + 8 * shape[1])) // 2)


def _key(model: ModelSpec) -> tuple:
    """What tells one state of a model's files from another."""
    files = sorted({file for part in model.parts.values() for file in part.files})
    return tuple((str(file), _stamp(file)) for file in files)


def _stamp(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _model(model: ModelSpec, family: Family) -> tuple[dict[str, Index], dict]:
    """The names and shapes of a model's denoiser and text encoders; those of the last few models are kept."""
    key = (_key(model), family.NAME)
    if key not in _INDEXES:
        indexes, shapes = {}, {}
        for name, part in model.parts.items():
            if name != "dit" and not name.startswith("text_encoder"):
                continue
            rows: dict[str, int] = {}
            for tensor, at in part.tensors.items():
                module, _, leaf = tensor.rpartition(".")
                if leaf == "weight" and at.shape:
                    rows[module] = at.shape[0]
                else:
                    rows.setdefault(module, 1)
            indexes[name] = index_of_rows(rows, name, family)
            shapes[name] = {
                tensor: None if at.dtype in PACKED else tuple(at.shape) for tensor, at in part.tensors.items()
            }
        while len(_INDEXES) >= 4:
            _INDEXES.pop(next(iter(_INDEXES)))
        _INDEXES[key] = (indexes, shapes)
    return _INDEXES[key]


def check(path: str | os.PathLike, model: ModelSpec, family: Family) -> None:
    """Raises Trouble where the LoRA at `path` cannot act on `model`."""
    said = fit_of(path, model, family).refused
    if said:
        raise Trouble(
            "shape_mismatch",
            f"{Path(path).name} does not fit the chosen model. {said}",
            hint="Choose another LoRA, or the model it was made for.",
        )
