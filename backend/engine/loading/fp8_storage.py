"""FP8 storage of weights (layerwise casting): quantization to float8, and the exact cast back.

FP8 here is *storage*: matrices take one byte a number and are cast to the computation dtype right before they are
used. It saves memory and transferred bytes, and is not faster than bfloat16. Matrices of a block are stored with one
power-of-two scale a tensor (`exponent`), so that their largest number fills the format: trained weights near 0.02 would
otherwise fall among the format's subnormal numbers. A power of two costs nothing when casting back and rounds nothing.

Casting to bfloat16 on a CPU is done by four integer operations over cache-sized chunks: widen the byte with its sign,
shift exponent and mantissa to bfloat16's places, mask, and multiply by the power of two that makes up for the other
exponent bias. This is exact for every finite code, subnormal ones too. NaN and Inf codes (`nonfinite`) are filled in
afterwards, which is only done where there are any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

CHUNK = 1 << 19  # numbers cast at a time on a CPU: one MiB of bfloat16 stays in the second-level cache
CARD_CHUNK = 1 << 26  # on an accelerator


@dataclass(frozen=True)
class Format:
    """One 8-bit float: its torch dtype, its largest number, and how its bits become those of bfloat16."""

    dtype: torch.dtype
    largest: float
    shift: int  # places to the left that bring the exponent's lowest bit to bit 7
    mask: int  # sign, exponent and mantissa after the shift, as a signed 16-bit number
    exponent: int  # difference of the exponent biases
    nonfinite: tuple[int, ...]  # codes, as signed bytes, that stand for NaN and Inf


FORMATS = {
    "float8_e4m3fn": Format(torch.float8_e4m3fn, 448.0, 4, 0x87F0 - 0x10000, 120, (0x7F, -1)),
    "float8_e4m3fnuz": Format(torch.float8_e4m3fnuz, 240.0, 4, 0x87F0 - 0x10000, 119, (-128,)),
    "float8_e5m2": Format(torch.float8_e5m2, 57344.0, 5, 0x8FE0 - 0x10000, 112, (124, 125, 126, 127, -4, -3, -2, -1)),
}
_BY_DTYPE = {fmt.dtype: fmt for fmt in FORMATS.values()}


def is_float8(dtype: torch.dtype) -> bool:
    """Whether `dtype` is one of the formats that weights can be stored in."""
    return dtype in _BY_DTYPE


def has_nonfinite(codes: torch.Tensor) -> bool:
    """Whether any code of a float8 tensor (any shape) is NaN or Inf. Slower than a cast: check once and remember."""
    found = codes.reshape(-1).view(torch.int8)
    return any(bool((found == code).any()) for code in _BY_DTYPE[codes.dtype].nonfinite)


def exponent_for(weight: torch.Tensor, dtype: torch.dtype) -> int:
    """The exponent of the power of two that scales the largest number of `weight` (a float of any shape) to just inside
    the range of `dtype`; 0 for zeros and NaN."""
    if weight.numel() == 0:
        return 0
    low, high = torch.stack(torch.aminmax(weight.detach())).tolist()  # makes no copy of the weight, as abs() would
    largest = max(-low, high) if not math.isnan(low) else math.nan
    if not (0.0 < largest < math.inf):
        return 0
    return max(-100, min(100, math.floor(math.log2(_BY_DTYPE[dtype].largest / largest))))


def store(weight: torch.Tensor, codes: torch.Tensor) -> int:
    """Quantizes `weight` (float32, float16 or bfloat16) to the nearest codes, in place in `codes` (float8, same shape).

    Returns the exponent: `weight` is about `codes` / 2**exponent, with a relative error of at most 2**-4 (e5m2: 2**-3)
    of each normal number.
    """
    exponent = exponent_for(weight, codes.dtype)
    if exponent == 0:
        codes.copy_(weight)
        return 0
    source, target, chunk = weight.reshape(-1), codes.view(-1), _chunk(weight.device)
    for start in range(0, source.numel(), chunk):
        piece = source[start : start + chunk].to(torch.float32)
        target[start : start + chunk].copy_(piece * 2.0**exponent)
    return exponent


def cast(
    codes: torch.Tensor, out: torch.Tensor, *, factor: float | torch.Tensor = 1.0, nonfinite: bool | None = None
) -> torch.Tensor:
    """`codes` (float8) times `factor`, written to `out` (same shape, contiguous; bfloat16, float16 or float32), rounded
    once.

    `factor` is a number or a float32 tensor that broadcasts against the weight (the scales of scaled FP8 files: one, or
    one a row). `nonfinite` says whether any code is NaN or Inf; None checks. Exact when `factor` is a power of two in
    range.
    """
    if isinstance(factor, torch.Tensor) and factor.numel() == 1:
        factor = float(factor)
    number = factor if isinstance(factor, float) else 1.0
    if codes.device.type != "cpu":
        _cast_by_torch(codes, out, number)
    elif out.dtype is torch.bfloat16 and 2.0**-100 < abs(number) < 64.0:
        _cast_to_bfloat16(
            codes.reshape(-1), out.view(-1), number, has_nonfinite(codes) if nonfinite is None else nonfinite
        )
    else:
        _cast_by_chunks(
            codes.reshape(-1), out.view(-1), number, has_nonfinite(codes) if nonfinite is None else nonfinite
        )
    if isinstance(factor, torch.Tensor):
        multiply(out, out, factor)
    return out


def multiply(numbers: torch.Tensor, out: torch.Tensor, factor: float | torch.Tensor) -> None:
    """Writes `numbers` times `factor` to `out` (same shape as `numbers`), computed in float32 and rounded once.

    `factor`: one number, or float32 of shape (1,) or (rows,). A strip of rows at a time, so that little memory is taken
    besides `out`. `factor` should be on the device of `out`: copying it there synchronizes.
    """
    single = not isinstance(factor, torch.Tensor) or factor.numel() == 1
    if isinstance(factor, torch.Tensor):
        factor = factor.to(device=out.device, dtype=torch.float32)
        factor = factor.reshape(()) if single else factor.reshape(-1, *[1] * (out.ndim - 1))
    rows = max(1, _chunk(out.device) // max(1, out[:1].numel())) if out.ndim else 1
    for start in range(0, out.shape[0] if out.ndim else 1, rows):
        part = slice(start, start + rows) if out.ndim else ...
        out[part].copy_(
            numbers[part].to(torch.float32)
            * (factor[part] if isinstance(factor, torch.Tensor) and not single else factor)
        )


def _chunk(device: torch.device) -> int:
    """Numbers to work on at a time: what stays in a processor's cache; on a card a whole matrix, but for the
    largest."""
    return CHUNK if device.type == "cpu" else CARD_CHUNK


def _cast_by_torch(codes: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    out.copy_(codes)
    if factor != 1.0:
        out.mul_(factor)


def _cast_to_bfloat16(codes: torch.Tensor, out: torch.Tensor, factor: float, nonfinite: bool) -> None:
    fmt = _BY_DTYPE[codes.dtype]
    scale = math.ldexp(factor, fmt.exponent)
    signed, bits = codes.view(torch.int8), out.view(torch.int16)
    for start in range(0, codes.numel(), CHUNK):
        piece = bits[start : start + CHUNK]
        piece.copy_(signed[start : start + CHUNK])
        piece.bitwise_left_shift_(fmt.shift).bitwise_and_(fmt.mask)
        out[start : start + CHUNK].mul_(scale)
    if nonfinite:
        _put_nonfinite(codes, out, factor)


def _put_nonfinite(codes: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    """Replaces what the integer path made of NaN and Inf codes by what they stand for, times `factor`."""
    fmt, signed = _BY_DTYPE[codes.dtype], codes.view(torch.int8)
    for code in fmt.nonfinite:
        value = torch.tensor([code], dtype=torch.int8).view(fmt.dtype).to(torch.float32).item() * factor
        out.masked_fill_(signed == code, value)


def _cast_by_chunks(codes: torch.Tensor, out: torch.Tensor, factor: float, nonfinite: bool) -> None:
    """The exact bfloat16 of each chunk first, then the factor in float32, then `out`'s dtype."""
    exact = torch.empty(min(CHUNK, codes.numel()), dtype=torch.bfloat16)
    for start in range(0, codes.numel(), CHUNK):
        piece = exact[: min(CHUNK, codes.numel() - start)]
        _cast_to_bfloat16(codes[start : start + CHUNK], piece, 1.0, nonfinite)
        target = out[start : start + CHUNK]
        if factor == 1.0:
            target.copy_(piece)
        else:
            target.copy_(piece.to(torch.float32).mul_(factor))
