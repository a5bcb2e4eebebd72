"""Dequantization: quantized weights to float32, on any device; one formula per form of `backend.catalog.quantization`.

`FORMS[form](pieces, settings, shape)` gets the stored tensors by role, the form's settings and the shape of the result
(rows, columns), and returns that, float32. The source of each formula stands at the form's evidence in
`backend.catalog.quantization`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from backend.catalog.spec import Packed, TensorAt
from backend.engine.loading.gguf_dequantize import table
from backend.schema.messages import Trouble

Pieces = Mapping[str, torch.Tensor]
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_H4 = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


@dataclass(frozen=True)
class Dequantizer:
    """A quantized weight. Its bytes are those of its pieces one after the other (`pieces_of`)."""

    at: TensorAt
    _checked: list[bool] = field(default_factory=list, compare=False, repr=False)

    def dequantize(self, raw: torch.Tensor) -> torch.Tensor:
        """float32 of shape `at.shape`, on the device of `raw` (uint8, shape (at.nbytes,)).

        Raises Trouble ("not_finite") where a scale is NaN or infinite.
        """
        packed = packed_of(self.at)
        pieces, start = {}, 0
        for role, piece in pieces_of(self.at):
            part = raw[start : start + piece.nbytes]
            dtype = TORCH_DTYPES.get(piece.dtype, torch.uint8)
            pieces[role] = (
                part.view(dtype).view(piece.shape) if piece.nbytes else part.new_empty(piece.shape, dtype=dtype)
            )
            start += piece.nbytes
        numbers = FORMS[packed.form](pieces, dict(packed.settings), packed.whole)
        if not self._checked:  # only once: each check synchronizes with the accelerator
            if not bool(torch.isfinite(numbers).all()):
                raise Trouble(
                    "not_finite",
                    f"A scale of {self.at.key} in {self.at.file.name} is NaN or infinite.",
                    hint="The model's file is damaged.",
                )
            self._checked.append(True)
        if packed.rows is not None:
            numbers = numbers[packed.rows[0] : packed.rows[1]]
        return numbers.reshape(self.at.shape)


def pieces_of(at: TensorAt) -> list[tuple[str, TensorAt]]:
    """The stored tensors of a quantized weight by role, in the order in which they are read: larger dtypes first, so
    that each lies aligned."""
    return sorted(packed_of(at).pieces, key=lambda pair: -TORCH_DTYPES.get(pair[1].dtype, torch.uint8).itemsize)


def packed_of(at: TensorAt) -> Packed:
    """How a tensor is quantized that is known to be."""
    assert at.packed is not None, f"{at.key} is not quantized"
    return at.packed


def _per_block(scale: torch.Tensor, rows: int, columns: int, shape: tuple[int, ...]) -> torch.Tensor:
    """One scale for each block of `rows` x `columns` as one for each number of a matrix of `shape` (float32, broadcast
    where one block spans all); the last blocks may be cut off."""
    counts = -(-shape[0] // rows), -(-shape[1] // columns)
    repeated = scale.float().reshape(counts)
    repeated = repeated.repeat_interleave(rows, 0)[: shape[0]] if counts[0] > 1 or rows == 1 else repeated
    return repeated.repeat_interleave(columns, 1)[:, : shape[1]] if counts[1] > 1 else repeated


def _scaled_blocks(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    return pieces["weight"].float().mul_(_per_block(pieces["scale"], settings["rows"], settings["columns"], shape))


def _affine_blocks(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    """(codes - zero point) x scale, one of each per block."""
    codes = pieces["weight"].float().reshape(shape[0], -1)
    flat = tuple(codes.shape)
    if "zero" in pieces:
        codes = codes - _per_block(pieces["zero"], settings["rows"], settings["columns"], flat)
    return codes.mul_(_per_block(pieces["scale"], settings["rows"], settings["columns"], flat)).reshape(shape)


def _convrot_int8(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    scale = pieces["scale"].float()
    scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(1, 1)
    return _hadamard_rotated(pieces["weight"].float().mul_(scale), settings["group"])


def _convrot_int4(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    codes = _nibbles(pieces["weight"])
    codes = torch.where(codes > 7, codes.float() - 16, codes.float())
    return _hadamard_rotated(codes.mul_(pieces["scale"].float().reshape(-1, 1)), settings["group"])


def _w4a8(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    """Levels times the group's factor are ROUNDED to an int8 before the channel's factor, as the kernel does."""
    codes, groups = _nibbles(pieces["weight"]), pieces["groups"]
    groups = (groups.view(torch.float8_e4m3fn) if groups.dtype is torch.uint8 else groups).float()
    values = pieces["levels"].float()[codes.int()] if "levels" in pieces else codes.float() - 8
    values = values.view(shape[0], groups.shape[1], -1).mul_(groups[:, :, None]).round_().clamp_(-127, 127)
    return _hadamard_rotated(values.view(shape).mul_(pieces["scale"].float().reshape(-1, 1)), settings["group"])


def _awq_w4a16(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    scale, zeros = pieces["scale"].float().t(), pieces["zeros"].float().t()  # (rows, groups)
    codes = _nibbles(pieces["weight"]).float().sub_(8).view(shape[0], scale.shape[1], -1)
    return codes.mul_(scale[:, :, None]).add_(zeros[:, :, None]).view(shape)


def _mxfp8(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    return _scaled_runs(
        pieces["weight"].float(), _e8m0(_untiled(pieces["scale"], settings, pieces["weight"], 32)), shape
    )


def _mxfp4(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    numbers = _e2m1(_nibbles(pieces["weight"]))
    return _scaled_runs(numbers, _e8m0(_untiled(pieces["scale"], settings, numbers, 32)), shape)


def _nvfp4(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    numbers = _e2m1(_nibbles(pieces["weight"], high_first=settings["high_first"]))
    stored = pieces["scale"].view(torch.uint8)
    scale = _untiled(stored, settings, numbers, 16).contiguous().view(torch.float8_e4m3fn).float()
    if "whole" in pieces:
        scale = scale * pieces["whole"].float().reshape(())
    weight = _scaled_runs(numbers, scale, shape)
    return weight.mul_(pieces["input"].float()) if "input" in pieces else weight


def _bitsandbytes_4bit(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    """Levels times the largest magnitude of a block; blocks run over the flattened matrix, the high nibble comes
    first."""
    count, absmax = math.prod(shape), pieces["absmax"]
    if "nested_absmax" in pieces:
        inner = pieces["nested_levels"].float()[absmax.int()]
        outer = pieces["nested_absmax"].float().repeat_interleave(settings["nested_block"])[: inner.numel()]
        absmax = inner.mul_(outer).add_(settings["offset"])
    codes = _nibbles(pieces["weight"].reshape(1, -1), high_first=True).reshape(-1)[:count]
    levels = pieces["levels"].float()[codes.int()]
    return levels.mul_(absmax.float().repeat_interleave(settings["block"])[:count]).view(shape)


def _bitsandbytes_int8(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    return pieces["weight"].float().mul_(pieces["scale"].float().reshape(-1, 1)).div_(127)


def _quanto_bits(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows of the grouped matrix lie one under the other in the bits of a byte, the first ones in the lowest bits."""
    data, bits, scale = pieces["weight"], settings["bits"], pieces["scale"].float()
    codes = torch.cat([(data >> place) & (2**bits - 1) for place in range(0, 8, bits)])[: scale.shape[0]]
    return codes.float().mul_(scale).sub_(pieces["shift"].float()).reshape(shape)


def _sdnq(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    """zero point + codes x scale, for a row or for each of its groups."""
    bits, scale = settings["bits"], pieces["scale"].float()
    data = pieces["weight"].reshape(-1, 1)
    if bits < 8:
        data = torch.cat([(data >> place) & (2**bits - 1) for place in range(0, 8, bits)], dim=1)
    codes = data.float().reshape(scale.numel(), -1)
    if settings["signed"] and bits < 8:
        codes = codes - 2 ** (bits - 1)
    codes = codes.mul_(scale.reshape(-1, 1))
    if "zero" in pieces:
        codes = codes.add_(pieces["zero"].float().reshape(-1, 1))
    weight = codes.reshape(shape)
    return weight.addmm_(pieces["up"].float(), pieces["down"].float()) if "up" in pieces else weight


def _svdquant(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    """(codes x factors) / smoothing + up @ down."""
    rows, columns = shape
    weight = _svdquant_residual(pieces, settings, rows, columns)
    down, up = pieces["down"].float().reshape(columns, -1), pieces["up"].float()
    rank = down.shape[1]
    return weight.addmm_(_in_lanes(up, rows // 16, rank // 16, False), _in_lanes(down, columns // 16, rank // 16, True))


def _svdquant_residual(pieces: Pieces, settings: Mapping, rows: int, columns: int) -> torch.Tensor:
    """Codes of a warp: 128 rows x 64 columns a tile, eight codes a word, lowest bits first, words in lane order."""
    tiles = pieces["weight"].reshape(rows // 128, columns // 64, 8, 8, 4, 2, 2, 4)
    codes = _nibbles(tiles)  # (row tile, column tile, pack, row lane, column lane, row of pack, column of pack, code)
    codes = codes.permute(0, 2, 5, 3, 1, 6, 4, 7).reshape(rows, columns)
    if settings["kind"] == "nvfp4":
        scale = pieces["scale"].view(torch.uint8).reshape(rows // 128, columns // 64, 8, 4, 4, 4)
        scale = (
            scale.permute(0, 4, 3, 2, 1, 5).reshape(rows, columns // 16).contiguous().view(torch.float8_e4m3fn).float()
        )
        if "channel" in pieces:
            scale = scale * _of_lanes(pieces["channel"], rows, 1)
        if "whole" in pieces:
            scale = scale * pieces["whole"].float().reshape(())
        numbers = _e2m1(codes)
    else:
        scale = _of_lanes(pieces["scale"], rows, columns // 64)
        numbers = torch.where(codes > 7, codes.float() - 16, codes.float())
    numbers = _scaled_runs(numbers, scale, (rows, columns))
    return numbers.div_(_of_lanes(pieces["smooth"], columns, 1).view(1, -1))


def _of_lanes(packed: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """16-bit factors as (rows, groups): four of a warp's 128 rows lie in a lane, pairs eight rows apart."""
    return packed.float().reshape(rows // 128, groups, 8, 4, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(rows, groups)


def _in_lanes(packed: torch.Tensor, packs: int, ranks: int, down: bool) -> torch.Tensor:
    """A low-rank factor out of its tiles of 16 x 16: (16 packs, 16 ranks), or for `down` (16 ranks, 16 packs)."""
    tiles = packed.reshape(packs, ranks, 8, 4, 2, 2, 2).permute(0, 1, 4, 2, 5, 3, 6).reshape(packs, ranks, 16, 16)
    if down:
        return tiles.permute(1, 2, 0, 3).reshape(16 * ranks, 16 * packs)
    return tiles.permute(0, 2, 1, 3).reshape(16 * packs, 16 * ranks)


def _svdquant_bias(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    """The bias; where codes are given, with what the kernel's shift of its input by 0.171875 takes off put back."""
    rows = shape[0]
    bias = _of_lanes(pieces["bias"], rows, 1).reshape(rows)
    if "weight" in pieces:
        columns = 2 * pieces["weight"].numel() // rows
        bias = bias + 0.171875 * _svdquant_residual(pieces, settings, rows, columns).double().sum(1).float()
    return bias


def _svdquant_modulation(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    """AWQ words: four rows and runs of 64 columns together; row d * 6 + j is row j * dim + d of the layer."""
    rows, columns = shape
    words = pieces["weight"].contiguous().view(torch.int16).int().view(rows // 4, columns // 64, 4, 16)
    words = words.permute(0, 2, 1, 3).reshape(-1, 1, 8)
    places = torch.arange(0, 16, 4, device=words.device).view(1, 4, 1)
    codes = (words >> places & 15).reshape(rows, columns // 64, 64).float()
    scale, zeros = (pieces[name].float()[: columns // 64].t()[:, :, None] for name in ("scale", "zeros"))
    return codes.mul_(scale).add_(zeros).view(rows // 6, 6, columns).transpose(0, 1).reshape(rows, columns)


def _svdquant_modulation_bias(pieces: Pieces, settings: Mapping, shape: tuple[int, ...]) -> torch.Tensor:
    bias = pieces["bias"].float().view(-1, 6).t().clone()
    bias[[1, 4]] -= 1  # added for both scales when the file was made
    return bias.reshape(-1)


def _nibbles(data: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Two codes a byte, (rows, columns / 2) to (rows, columns) uint8; the low nibble is the first unless
    `high_first`."""
    data = data.view(torch.uint8)
    pair = (data & 15, data >> 4)
    return torch.stack(pair[::-1] if high_first else pair, dim=-1).flatten(-2)


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    return table(_E2M1, codes.device)[codes.int()]


def _e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """E8M0: 2 ** (e - 127); 255 stands for NaN and becomes infinite here."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.to(torch.int32) - 127)


def _untiled(scale: torch.Tensor, settings: Mapping, numbers: torch.Tensor, block: int) -> torch.Tensor:
    """Block scales (uint8) as (rows, blocks), taken out of cuBLAS' tiles of 128 x 4 where they lie in these."""
    rows, blocks = numbers.shape[0], numbers.shape[1] // block
    if not settings["tiled"]:
        return scale.reshape(rows, blocks)
    down, across = -(-rows // 128), -(-blocks // 4)
    # to (tile row, 32-row group, row, tile column, column)
    tiles = scale.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :blocks]


def _scaled_runs(numbers: torch.Tensor, scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Runs of neighbouring inputs times their factors (rows, runs); rows that were added at the end are cut off."""
    rows, runs = scale.shape
    return numbers.view(rows, runs, -1).mul_(scale[:, :, None]).view(numbers.shape)[: shape[0]]


def _hadamard_rotated(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Groups of inputs times the regular Hadamard matrix H4 (x) H4 ... / sqrt(group), which is its own inverse."""
    four = table(_H4, weight.device)
    matrix = four
    while matrix.shape[0] < group:
        matrix = torch.kron(matrix, four)
    return (weight.view(-1, group) @ (matrix / math.sqrt(group))).view(weight.shape)


FORMS: dict[str, Callable[[Pieces, Mapping, tuple[int, ...]], torch.Tensor]] = {
    "scaled_blocks": _scaled_blocks,
    "affine_blocks": _affine_blocks,
    "convrot_int8": _convrot_int8,
    "convrot_int4": _convrot_int4,
    "w4a8": _w4a8,
    "awq_w4a16": _awq_w4a16,
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "bitsandbytes_4bit": _bitsandbytes_4bit,
    "bitsandbytes_int8": _bitsandbytes_int8,
    "quanto_bits": _quanto_bits,
    "sdnq": _sdnq,
    "svdquant": _svdquant,
    "svdquant_bias": _svdquant_bias,
    "svdquant_modulation": _svdquant_modulation,
    "svdquant_modulation_bias": _svdquant_modulation_bias,
}
