"""How strongly a LoRA changes each block: the Frobenius norms of its deltas at strength 1, with numpy and mostly
without forming a delta."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy

from backend.catalog.formats.header import read_bytes
from backend.catalog.formats.read import read_header
from backend.catalog.lora.alpha import AlphaRules, alpha_rules
from backend.catalog.lora.keys import group, innermost, plain, scales_of
from backend.catalog.lora.peft_config import config_beside
from backend.catalog.spec import TensorAt
from backend.catalog.state_dict_keys import flatten
from backend.schema.messages import Trouble

MOST_BYTES = 2**31  # larger files are not read for a picture of bars
MOST_NUMBERS = 2**26  # of a change that has to be formed whole
_BLOCK = re.compile(
    r"(?:^|[._])((?:[a-z]+_)*(?:blocks?|layers?|refiner|resnets|attentions)(?:[._]\d+)+)", re.IGNORECASE
)
_READ = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


def block_strengths(path: Path) -> list[tuple[str, float]]:
    """(block, norm of all its changes) in the order of the network.

    Empty where the file holds none that can be measured.

    Of a DoRA it is the low-rank part; what its magnitudes add depends on the model's weights.
    """
    status = path.stat()
    return list(_strengths(path, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=64)
def _strengths(path: Path, nbytes: int, modified: int) -> tuple[tuple[str, float], ...]:
    header = read_header(path)
    if sum(at.nbytes for at in header.tensors.values()) > MOST_BYTES:
        return ()
    modules, _ = group(header.tensors)
    readings = {stem: innermost(plain(stem)) for stem in modules}
    rules = alpha_rules(
        header.metadata,
        config_beside(path),
        tensors_say=any("alpha" in roles for roles in modules.values()),
        names=[reading.name for reading in readings.values()],
        source=path.name,
    )
    scales = {owner: header.tensors[key] for key, owner in scales_of(header.tensors).items() if owner}
    squares: dict[str, float] = {}
    seen: set[tuple[str, str]] = set()  # a module that is in the file twice acts once
    for stem, roles in modules.items():
        called = (readings[stem].component or "dit", flatten(readings[stem].name))
        if called in seen:
            continue
        try:
            stored = {role: _Stored(header.tensors[key], scales.get(key)) for role, key in roles.items()}
            square = _square(stored, stem, rules)
            seen |= {called} if square is not None else set()
        except (Trouble, ValueError, IndexError, KeyError):
            continue
        if square is not None and numpy.isfinite(square):
            block = block_of(plain(stem))
            squares[block] = squares.get(block, 0.0) + square
    return tuple(
        sorted(((name, square**0.5) for name, square in squares.items()), key=lambda pair: block_order(pair[0]))
    )


def _square(tensors: Mapping[str, _Stored], stem: str, rules: AlphaRules) -> float | None:
    """The squared norm of one module's change, by its algorithm; None for one that is not measured."""

    def scale(rank: int) -> float:
        if "alpha" in tensors:
            return float(tensors["alpha"].matrix().reshape(-1)[0]) / rank
        return rules.scale((innermost(plain(stem)).name,), innermost(plain(stem)).component or "dit", rank)

    found = None
    if {"down", "up"} <= tensors.keys():
        found = _pair(tensors) * scale(tensors["down"].shape[0]) ** 2
    elif "hada_w1_a" in tensors and "hada_t1" not in tensors:
        found = _hadamard(tensors) * scale(tensors["hada_w1_b"].shape[0]) ** 2
    elif "lokr_t2" not in tensors and ("lokr_w1" in tensors or "lokr_w1_a" in tensors):
        ranks = [tensors[f"lokr_{w}_b"].shape[0] for w in ("w2", "w1") if f"lokr_{w}_b" in tensors]
        found = _half(tensors, "w1") * _half(tensors, "w2") * (scale(ranks[0]) if ranks else 1.0) ** 2
    wholes = [float(numpy.sum(numpy.square(tensors[role].matrix()))) for role in ("diff", "diff_b") if role in tensors]
    return found if not wholes else (found or 0.0) + sum(wholes)


def squared_norm(up, down) -> float:
    """|up @ down|^2 of two matrices (out, rank) and (rank, in), of numpy or torch: trace((up^T up)(down down^T)), so that
    only the small products are made."""
    return float(((up.T @ up) * (down @ down.T)).sum())


def _pair(tensors: Mapping[str, _Stored]) -> float:
    """|up down|^2 = trace((up^T up)(down down^T)), with a core between them likewise: only the small products are
    made."""
    down, up = tensors["down"].matrix(), tensors["up"].matrix()
    if "mid" not in tensors:
        return squared_norm(up, down)
    core = tensors["mid"].values().reshape(*tensors["mid"].shape[:2], -1)  # (m, n, k) between up (o, m) and down (n, i)
    inner = numpy.einsum("mnk,nN,MNk->mM", core, down @ down.T, core, optimize=True)
    return float(numpy.sum((up.T @ up) * inner))


def _hadamard(tensors: Mapping[str, _Stored]) -> float:
    """A product element by element is formed whole."""
    a, b, c, d = (tensors[f"hada_{name}"].matrix() for name in ("w1_a", "w1_b", "w2_a", "w2_b"))
    if a.shape[0] * b.shape[1] > MOST_NUMBERS:
        raise ValueError("too large")
    return float(numpy.sum(numpy.square((a @ b) * (c @ d))))


def _half(tensors: Mapping[str, _Stored], side: str) -> float:
    """|w|^2 of one Kronecker factor; the norm of the product is the product of the norms."""
    if f"lokr_{side}" in tensors:
        return float(numpy.sum(numpy.square(tensors[f"lokr_{side}"].matrix())))
    return _pair({"down": tensors[f"lokr_{side}_b"], "up": tensors[f"lokr_{side}_a"]})


def block_of(stem: str) -> str:
    """ "transformer_blocks.7" of "transformer_blocks.7.attn.to_q", in any spelling; "other" for a module outside of
    blocks."""
    found = _BLOCK.search(innermost(stem).name)
    if not found:
        return "other"
    return re.sub(r"[._](\d+)", r".\1", found.group(1))


def block_order(name: str) -> tuple:
    """Double blocks before single ones, the way down before the way up, numbers as numbers, what lies outside last."""
    kind, *numbers = name.split(".")
    places = (
        "input",
        "down",
        "middle",
        "mid",
        "double",
        "noise",
        "context",
        "transformer",
        "layers",
        "single",
        "output",
        "up",
    )
    place = next((at for at, word in enumerate(places) if kind.startswith(word)), len(places) // 2)
    return name == "other", place, kind, tuple(int(part) if part.isdigit() else -1 for part in numbers)


class _Stored:
    """A tensor in the file, read when it is asked for."""

    def __init__(self, at: TensorAt, scale: TensorAt | None = None):
        self.at, self.shape, self.scale = at, at.shape, scale

    def values(self) -> numpy.ndarray:
        """float32, in its own shape. Raises ValueError for a dtype that is not read here."""
        data = read_bytes(self.at)
        if self.at.dtype == "BF16":
            found = (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        elif self.at.dtype in ("F8_E4M3", "F8_E5M2"):
            found = _eighths(self.at.dtype)[numpy.frombuffer(data, "u1")]
        elif self.at.dtype in ("I64", "I32") or (self.at.dtype == "I8" and self.scale is not None):
            found = numpy.frombuffer(data, {"I64": "<i8", "I32": "<i4", "I8": "i1"}[self.at.dtype]).astype("<f4")
        elif self.at.dtype in _READ:
            found = numpy.frombuffer(data, _READ[self.at.dtype]).astype("<f4")
        else:
            raise ValueError(self.at.dtype)
        found = found.reshape(self.at.shape)
        return found if self.scale is None else found * _spread(_Stored(self.scale).values(), self.at.shape)

    def matrix(self) -> numpy.ndarray:
        """Everything behind the first axis flattened."""
        return self.values().reshape(self.at.shape[0] if self.at.shape else 1, -1)


def _spread(scale: numpy.ndarray, shape: tuple[int, ...]) -> numpy.ndarray:
    """A scale of 8-bit numbers (one, one a row, one a block) for each of them.

    Raises ValueError where it does not fit.
    """
    if scale.size == 1:
        return scale.reshape(())
    if scale.ndim == 1 and scale.shape[0] == shape[0]:
        scale = scale.reshape(-1, *[1] * (len(shape) - 1))
    for axis, (size, parts) in enumerate(zip(shape, scale.shape, strict=True)):
        if size % parts:
            raise ValueError(scale.shape)
        scale = scale.repeat(size // parts, axis) if parts > 1 else scale
    return scale


@lru_cache(maxsize=2)
def _eighths(dtype: str) -> numpy.ndarray:
    """The 256 numbers of an 8-bit float: sign, 4 or 5 bits of exponent, 3 or 2 of mantissa, after the OCP 8-bit
    specification."""
    mantissa_bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    codes = numpy.arange(256)
    exponents, fractions = (codes & 127) >> mantissa_bits, (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    sizes = numpy.where(exponents > 0, 1 + fractions, fractions) * 2.0 ** (numpy.maximum(exponents, 1) - bias)
    if mantissa_bits == 3:
        sizes[(codes & 127) == 127] = numpy.nan
    else:
        sizes[exponents == 31] = numpy.where(fractions[exponents == 31] == 0, numpy.inf, numpy.nan)
    return numpy.where(codes & 128, -sizes, sizes).astype("<f4")
