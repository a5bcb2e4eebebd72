"""Whatever roles, dtypes, shapes and words a header holds: a decision or a refusal for every layer, and no code without a factor passes as a number."""

from __future__ import annotations

import json
import random

import pytest

from backend.catalog.formats.header import DTYPE_BITS
from backend.catalog.formats.read import read_header
from backend.catalog.quantization import understood
from backend.catalog.quantization.layer import FLOAT8, FLOATS
from tests.catalog.files import write_file

ROLES = ("weight", "bias", "weight_scale", "scale_weight", "weight_scale_2", "weight_scale_inv", "comfy_quant", "weight.comfy_quant", "input_scale", "SCB",
    "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "weight.quant_state.bitsandbytes__nf4",
    "weight._data", "weight._data._data", "weight._scale", "weight._shift", "_weight_qdata", "_weight_scale", "_weight_zero_point", "qweight", "wscales",
    "wzeros", "smooth_factor", "proj_down", "proj_up", "scale", "zero_point", "svd_up", "svd_down", "weight_zeros", "weight_s_rel", "weight_s_channel",
    "weight_codebook", "pre_quant_scale", "weight_packed", "qzeros", "g_idx", "other")  # fmt: skip
FORMATS = (
    "float8_e4m3fn",
    "int8_tensorwise",
    "nvfp4",
    "mxfp8",
    "convrot_w4a4",
    "asym_w4a8_int8",
    "awq_w4a16",
    "secret",
    "",
    5,
    None,
)
METHODS = ("modelopt", "sdnq", "svdquant", "fp8", "torchao", "secret")
WORDS = (None, True, 0, 16, -1, "x", [], [1, 16], {}, 1e99)
DTYPES = [dtype for dtype, bits in DTYPE_BITS.items() if bits >= 8]


def anything(chance: random.Random, depth: int = 0) -> object:
    if depth < 2 and chance.random() < 0.3:
        return {chance.choice(("format", "layers", "convrot", "group_size", "params")): anything(chance, depth + 1)}
    return chance.choice(WORDS)


def entry(chance: random.Random) -> object:
    keys = ("convrot", "convrot_groupsize", "group_size", "per_row", "orig_shape", "params", "secret")
    said = {"format": chance.choice(FORMATS), **{chance.choice(keys): anything(chance) for _ in range(2)}}
    return chance.choice((said, said, said["format"], [said], anything(chance)))


@pytest.mark.parametrize("seed", range(8))
def test_any_layer(seed, tmp_path):
    chance = random.Random(seed)
    for number in range(60):
        layer = "transformer_blocks.0.attn.to_q" if number % 2 else "transformer_blocks.0.img_mlp.net.2"
        sizes = (0, 1, 2, 16, 64, 128)
        tensors = {
            f"{layer}.{role}": (
                chance.choice(DTYPES),
                tuple(chance.choice(sizes) for _ in range(chance.choice((0, 1, 2, 2, 2, 3)))),
            )
            for role in chance.sample(ROLES, chance.randint(1, 7))
        }
        metadata = {
            "_quantization_metadata": json.dumps(chance.choice(({"layers": {layer: entry(chance)}}, anything(chance))))[
                : chance.choice((20, 999))
            ],
            "quantization_config": json.dumps(
                {"quant_method": chance.choice(METHODS), "weights_dtype": "uint4", "weight": anything(chance)}
            ),
            f"{layer}.weight": json.dumps(
                {"_type": chance.choice(("Int8Tensor", "MXTensor", "NVFP4Tensor", "x")), "_data": anything(chance)}
            ),
        }
        kept = chance.sample(list(metadata), chance.randint(0, 3))
        path = write_file(tmp_path / f"{number}.safetensors", tensors, {key: metadata[key] for key in kept})
        stored = understood(read_header(path).tensors, {key: metadata[key] for key in kept})
        for name, at in stored.tensors.items():
            if not name.endswith(".weight") or name in stored.refused:
                continue
            assert at.packed is not None or at.dtype in (*FLOATS, *FLOAT8) or name in stored.scales, (tensors, kept)
        for trouble in stored.refused.values():
            assert trouble.kind == "not_supported" and len(trouble.message) < 500
