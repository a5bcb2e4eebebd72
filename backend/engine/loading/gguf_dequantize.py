"""GGUF dequantization: the blocks of ggml's quantized types (Q4_0, Q4_K, IQ2_XXS, ...) to float32, on any device.

Layouts and formulas are those of the ggml project's reference code (`dequantize_row_*`). Shapes: B blocks of 32 or
256 numbers; d and m are a block's scale and offset in float16; the "K" types have 6-bit (or 4-bit) scales for groups
of 16 or 32 numbers besides. Each `_q*`, `_iq*` function takes blocks (B, bytes of a block) uint8 and returns float32
with the numbers of each block in order, in any shape of (B, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from safetensors.torch import load_file

from backend.schema.paths import ASSETS

PIECE, CARD_PIECE = 1 << 20, 1 << 24  # numbers dequantized at a time: each step of a formula allocates as many float32
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # the 16 levels of the IQ4 types

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of 4-bit floats, doubled


@dataclass(frozen=True)
class GgufBlocks:
    """A tensor of `shape` in blocks of the type `kind` ("GGUF_Q4_K", ...)."""

    kind: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size, nbytes, _ = TYPES[self.kind]
        return math.prod(self.shape) // size * nbytes if math.prod(self.shape) % size == 0 else -1

    def dequantize(self, raw: torch.Tensor) -> torch.Tensor:
        """float32 of `shape`, from `raw` (uint8, shape (nbytes,): all bytes of the tensor), on its device."""
        assert raw.numel() == self.nbytes, "the bytes are not those of the shape"
        size, nbytes, read = TYPES[self.kind]
        blocks, step = raw.reshape(-1, nbytes), (PIECE if raw.device.type == "cpu" else CARD_PIECE) // size
        if len(blocks) <= step:
            return read(blocks).reshape(self.shape)
        found = torch.empty(len(blocks), size, dtype=torch.float32, device=raw.device)
        for start in range(0, len(blocks), step):
            found[start : start + step].copy_(read(blocks[start : start + step]).reshape(-1, size))
        return found.reshape(self.shape)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block: (B, 1) float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _signed(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int8)


def _halves(values: torch.Tensor) -> torch.Tensor:
    """The low four bits of every byte, then the high ones: (B, 2n) of (B, n)."""
    return torch.cat([values & 15, values >> 4], dim=1)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of the bytes, lowest first: (B, 8n) of (B, n)."""
    places = torch.arange(8, device=values.device, dtype=torch.uint8)
    return ((values[:, :, None] >> places) & 1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_halves(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _halves(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * ((_halves(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_halves(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4).float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _signed(blocks[:, 2:]).float()


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _level(_halves(blocks[:, 2:]))


def _level(codes: torch.Tensor) -> torch.Tensor:
    return table(_IQ4, codes.device)[codes.int()]


@lru_cache(maxsize=64)
def table(values: tuple, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`values` as a tensor on `device`, shape (len(values),) or as nested; copied once: each copy would synchronize."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """(B, 2, 32, 4) two-bit numbers of (B, 64): [half, byte, place]."""
    places = torch.arange(0, 8, 2, device=values.device, dtype=torch.uint8)
    return (values.view(-1, 2, 32, 1) >> places) & 3


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, d, low = blocks[:, :16], _half(blocks, 80), _half(blocks, 82)
    numbers = _pairs(blocks[:, 16:80]).permute(0, 1, 3, 2).reshape(-1, 16, 16).float()
    return (d * (scales & 15).float())[:, :, None] * numbers - (low * (scales >> 4).float())[:, :, None]


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    packed, d = blocks[:, 96:108], _half(blocks, 108)
    low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], dim=1)
    places = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)
    high = ((packed[:, None, 8:] >> places[:, None]) & 3).flatten(1)  # (B, 16): of scales 0-3, 4-7, ...
    scales = (low | high << 4).float() - 32
    top = (blocks[:, :32, None] >> torch.arange(8, device=blocks.device, dtype=torch.uint8)) & 1  # (B, 32, 8)
    numbers = (
        _pairs(blocks[:, 32:96]).permute(0, 1, 3, 2).reshape(-1, 8, 32).float() - 4 + 4 * top.permute(0, 2, 1).float()
    )
    return (d * scales)[:, :, None] * numbers.reshape(-1, 16, 16)


def _scales_and_offsets(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight 6-bit scales and offsets of (B, 12) bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], dim=1)
    return scales.float(), torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], dim=1).float()


def _scaled_by_32(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`numbers` (B, 8, 32) by the scales and offsets of the 4- and 5-bit K types."""
    scales, offsets = _scales_and_offsets(blocks[:, 4:16])
    return (_half(blocks, 0) * scales)[:, :, None] * numbers.float() - (_half(blocks, 2) * offsets)[:, :, None]


def _by_32(values: torch.Tensor) -> torch.Tensor:
    """(B, 8, 32) four-bit numbers of (B, 128): the low ones of 32 bytes, then their high ones."""
    bytes32 = values.view(-1, 4, 1, 32)
    return torch.cat([bytes32 & 15, bytes32 >> 4], dim=2).view(-1, 8, 32)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_by_32(blocks, _by_32(blocks[:, 16:].contiguous()))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    top = (blocks[:, None, 16:48] >> torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]) & 1
    return _scaled_by_32(blocks, _by_32(blocks[:, 48:].contiguous()) | top << 4)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    fours = torch.cat([low & 15, low >> 4], dim=2)  # (B, 2, 4, 32)
    places = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)[:, None]
    numbers = (fours | ((high >> places) & 3) << 4).float() - 32
    return (_half(blocks, 208) * _signed(blocks[:, 192:208]).float())[:, :, None] * numbers.view(-1, 16, 16)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    places = torch.arange(0, 16, 2, device=blocks.device)
    high = (blocks[:, 2:3].int() | blocks[:, 3:4].int() << 8) >> places & 3
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2).flatten(1).int()
    scales = _half(blocks, 0) * ((low | high << 4) - 32).float()
    sixteen = blocks[:, 8:].reshape(-1, 8, 16)
    return scales[:, :, None] * _level(torch.cat([sixteen & 15, sixteen >> 4], dim=2))


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """One E8M0 exponent (2 ** (e - 127)) and 32 numbers of e2m1; `_E2M1` holds these doubled, so the factor is
    halved."""
    factor = torch.ldexp(torch.ones_like(blocks[:, :1], dtype=torch.float32), blocks[:, :1].int() - 128)
    return factor * _doubled(_halves(blocks[:, 1:]))


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Four unsigned e4m3 factors of 16 numbers of e2m1 each."""
    codes = blocks[:, :4] & 127
    factors = codes.view(torch.float8_e4m3fn).float().masked_fill(codes == 127, 0.0) / 2
    pairs = blocks[:, 4:].reshape(-1, 4, 8)
    return factors[:, :, None] * _doubled(torch.cat([pairs & 15, pairs >> 4], dim=2))


def _doubled(codes: torch.Tensor) -> torch.Tensor:
    return table(_E2M1, codes.device)[codes.int()]


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    """Digits of base 3 (-1, 0, 1), five or four a byte: byte x 3 / 256 is the first, and so on."""
    runs = [
        _ternary(blocks[:, start:end], count, width)
        for start, end, count, width in ((0, 32, 5, 32), (32, 48, 5, 16), (48, 52, 4, 4))
    ]
    return _half(blocks, 52) * torch.cat(runs, dim=1)


def _ternary(values: torch.Tensor, count: int, width: int) -> torch.Tensor:
    powers = table(tuple(3**place for place in range(count)), values.device, torch.int32)
    rest = (values.int().reshape(-1, 1, width) * powers[:, None]) & 255
    return ((rest * 3 >> 8) - 1).flatten(1).float()


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 64) * (_pairs(blocks[:, :64]).permute(0, 1, 3, 2).flatten(1).float() - 1)


def _q1_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_bits(blocks[:, 2:]).float() * 2 - 1)


def _q8_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _signed(blocks[:, 4:]).float()


def _q8_k(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, :4].contiguous().view(torch.float32) * _signed(blocks[:, 4:260]).float()


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    words = blocks[:, 2:].contiguous().view(torch.int32).view(-1, 8, 2)
    numbers = _codebook("iq2_xxs", blocks)[words[..., 0].contiguous().view(torch.uint8).view(-1, 8, 4).long()]
    scale = _half(blocks, 0) * (0.5 + (words[..., 1] >> 28 & 15).float()) * 0.25
    return scale[:, :, None, None] * numbers * _signs(words[..., 1])


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    words = _words16(blocks[:, 2:66]).view(-1, 16, 2)
    numbers = _codebook("iq2_xs", blocks)[(words & 511).long()] * _sign_bits(_even(words >> 9))
    return _by_four_bits(blocks, blocks[:, 66:74])[:, :, None, None] * numbers


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    codes = _with_high_bits(blocks[:, 2:34], blocks[:, 66:74], 2).view(-1, 16, 2)
    numbers = _codebook("iq2_s", blocks)[codes] * _sign_bits(blocks[:, 34:66].reshape(-1, 16, 2).int())
    return _by_four_bits(blocks, blocks[:, 74:82])[:, :, None, None] * numbers


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    words = blocks[:, 66:].contiguous().view(torch.int32)
    numbers = _codebook("iq3_xxs", blocks)[blocks[:, 2:66].long()].view(-1, 8, 4, 8)
    scale = _half(blocks, 0) * (0.5 + (words >> 28 & 15).float()) * 0.5
    return scale[:, :, None, None] * numbers * _signs(words)


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    codes = _with_high_bits(blocks[:, 2:66], blocks[:, 66:74], 1)
    numbers = _codebook("iq3_s", blocks)[codes].view(-1, 8, 4, 8) * _sign_bits(
        blocks[:, 74:106].reshape(-1, 8, 4).int()
    )
    scale = _half(blocks, 0) * (1 + 2 * _in_turn(blocks[:, 106:110]).float())
    return scale[:, :, None, None] * numbers


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    high = _words16(blocks[:, 34:50])
    places = torch.arange(0, 12, 3, device=blocks.device)
    codes = blocks[:, 2:34].int().view(-1, 8, 4) | (high[:, :, None] >> places & 7) << 8
    scale = _half(blocks, 0) * (2 * (high >> 12 & 7) + 1).float()
    offset = 0.125 - 0.25 * (high >> 15 & 1).float()
    return scale[:, :, None, None] * (_codebook("iq1_s", blocks)[codes.long()] + offset[:, :, None, None])


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    """The float16 scale of a block is spread over the highest four bits of its four words of scales."""
    words, high = _words16(blocks[:, 48:56]), _in_turn(blocks[:, 32:48])
    whole = sum(((words[:, place] >> 12 & 15) << 4 * place for place in range(4)), torch.zeros_like(words[:, 0]))
    whole = torch.stack([whole & 255, whole >> 8], dim=1).to(torch.uint8).view(torch.float16).float()
    places = torch.arange(0, 12, 3, device=blocks.device)
    scale = whole * (2 * (words[:, :, None] >> places & 7) + 1).flatten(1).float()
    codes = blocks[:, :32].int() | (high & 7).int() << 8
    offset = 0.125 - 0.25 * (high >> 3 & 1).float()
    numbers = _codebook("iq1_s", blocks)[codes.long()] + offset[:, :, None]
    return scale[:, :, None, None] * numbers.view(-1, 16, 2, 8)


@lru_cache(maxsize=16)
def _codebook_on(name: str, device: torch.device) -> torch.Tensor:
    return load_file(ASSETS / "ggml" / "codebooks.safetensors")[name].to(device).float()


def _codebook(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """ggml's table `name`: a code -> 8 (or 4) numbers, float32, on the device of `blocks`."""
    return _codebook_on(name, blocks.device)


def _words16(values: torch.Tensor) -> torch.Tensor:
    """Unsigned 16-bit words, lowest byte first, as int32."""
    return values[:, 0::2].int() | values[:, 1::2].int() << 8


def _in_turn(values: torch.Tensor) -> torch.Tensor:
    """The low and the high four bits of each byte in turn: (B, 2n) of (B, n)."""
    return torch.stack([values & 15, values >> 4], dim=2).flatten(1)


def _by_four_bits(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (0.5 + _in_turn(scales).float()) * 0.25


def _with_high_bits(low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 8 + `bits` bits: the low bytes, and their highest bits packed, first ones lowest."""
    places = torch.arange(0, 8, bits, device=low.device, dtype=torch.uint8)
    return (low.int() | ((high[:, :, None] >> places) & (2**bits - 1)).flatten(1).int() << 8).long()


def _even(seven: torch.Tensor) -> torch.Tensor:
    """Seven sign bits and an eighth that makes their number even."""
    odd = sum(seven >> place & 1 for place in range(7)) & 1
    return seven & 127 | odd << 7


def _signs(words: torch.Tensor) -> torch.Tensor:
    """Four times eight signs of the low 28 bits of each word: (..., 4, 8)."""
    return _sign_bits(_even(words[..., None] >> torch.arange(0, 28, 7, device=words.device) & 127))


def _sign_bits(bits: torch.Tensor) -> torch.Tensor:
    """-1 where a bit is set, else 1: (..., 8) of (...)."""
    return 1.0 - 2.0 * (bits[..., None] >> torch.arange(8, device=bits.device) & 1).float()


# type -> (numbers in a block, its bytes, how it is read)
TYPES: dict[str, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "GGUF_Q4_0": (32, 18, _q4_0),
    "GGUF_Q4_1": (32, 20, _q4_1),
    "GGUF_Q5_0": (32, 22, _q5_0),
    "GGUF_Q5_1": (32, 24, _q5_1),
    "GGUF_Q8_0": (32, 34, _q8_0),
    "GGUF_IQ4_NL": (32, 18, _iq4_nl),
    "GGUF_Q2_K": (256, 84, _q2_k),
    "GGUF_Q3_K": (256, 110, _q3_k),
    "GGUF_Q4_K": (256, 144, _q4_k),
    "GGUF_Q5_K": (256, 176, _q5_k),
    "GGUF_Q6_K": (256, 210, _q6_k),
    "GGUF_IQ4_XS": (256, 136, _iq4_xs),
    "GGUF_MXFP4": (32, 17, _mxfp4),
    "GGUF_NVFP4": (64, 36, _nvfp4),
    "GGUF_TQ1_0": (256, 54, _tq1_0),
    "GGUF_TQ2_0": (256, 66, _tq2_0),
    "GGUF_Q1_0": (128, 18, _q1_0),
    "GGUF_Q8_1": (32, 36, _q8_1),
    "GGUF_Q8_K": (256, 292, _q8_k),
    "GGUF_IQ1_S": (256, 50, _iq1_s),
    "GGUF_IQ1_M": (256, 56, _iq1_m),
    "GGUF_IQ2_XXS": (256, 66, _iq2_xxs),
    "GGUF_IQ2_XS": (256, 74, _iq2_xs),
    "GGUF_IQ2_S": (256, 82, _iq2_s),
    "GGUF_IQ3_XXS": (256, 98, _iq3_xxs),
    "GGUF_IQ3_S": (256, 110, _iq3_s),
}
