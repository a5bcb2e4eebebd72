"""SDNQ: packed `weight`, `scale` and `zero_point` by row or group; the settings stand in config.json's
quantization_config.

Source: dequantizer.py, quantizer.py and packed_int of sdnq 0.2.8 (Disty0/sdnq).
"""

from __future__ import annotations

import math

from backend.catalog.quantization.layer import (
    FLOATS,
    Decision,
    Layer,
    check_roles,
    check_tensor,
    not_read,
    packed,
    refusal,
)

ROLES = ("scale", "zero_point", "svd_up", "svd_down", "scale_2", "scale_zero_point", "zero_point_scale", "zero_point_2")
READ = {
    "int8": ("I8", 8),
    "uint8": ("U8", 8),
    "int4": ("U8", 4),
    "uint4": ("U8", 4),
    "int2": ("U8", 2),
    "uint2": ("U8", 2),
}
OFF = ("use_hadamard", "use_codebook", "use_codebook_scale", "use_quantized_matmul", "quant_conv")
OTHERS = ("scale_dtype", "zero_point_dtype")


def match(layer: Layer) -> Decision | None:
    at = layer.weight
    if at is None or not layer.has(*ROLES) or at.dtype in FLOATS or at.dtype.startswith("GGUF"):
        return None
    config = layer.about.config
    if layer.about.method != "sdnq":
        raise refusal(
            layer, "codes with a scale and a zero point (SDNQ?), and no quantization_config says how they are packed"
        )
    kind = config.get("weights_dtype")
    title = f"SDNQ {str(kind)[:20]}"
    if layer.has("scale_2", "zero_point_scale") or kind not in READ:
        raise not_read(layer, title)
    if any(config.get(key) for key in (*OFF, "modules_dtype_dict", "modules_quant_config")):
        raise not_read(
            layer,
            (
                f"{title} with "
                f"{next(key for key in (*OFF, 'modules_dtype_dict', 'modules_quant_config') if config.get(key))}"
            ),
        )
    if any(config.get(key) not in (None, "none") for key in OTHERS):
        raise not_read(layer, f"{title} with quantized scales")
    check_roles(layer, title, ("scale", *(("zero_point",) if kind.startswith("u") else ())))
    return _read(layer, title, kind)


def _read(layer: Layer, title: str, kind: str) -> Decision:
    at, scale, (dtype, bits) = layer.stored, layer.tensors["scale"], READ[kind]
    check_tensor(layer, title, "weight", (dtype,))
    count = math.prod(at.shape) * 8 // bits
    fine = len(scale.shape) in (2, 3) and scale.shape[-1] == 1 and scale.shape[0]
    groups, bias = math.prod(scale.shape), layer.tensors.get("bias")
    rows = scale.shape[0] if groups > 1 or bias is None or len(bias.shape) != 1 else max(1, bias.shape[0])
    if not fine or count % (rows * groups // math.gcd(rows, groups)) or (groups == 1 and bias is None):
        raise refusal(layer, f"{title} with a scale of shape {list(scale.shape)} for {count} numbers")
    if bits == 8 and at.shape[0] != rows:
        raise refusal(layer, f"{title} of the shape {list(at.shape)} with a scale of shape {list(scale.shape)}")
    check_tensor(layer, title, "scale", FLOATS)
    roles = {"weight": "weight", "scale": "scale"}
    if layer.has("zero_point"):
        check_tensor(layer, title, "zero_point", FLOATS, tuple(scale.shape))
        roles["zero"] = "zero_point"
    if layer.has("svd_up", "svd_down"):
        check_roles(layer, title, ("svd_up", "svd_down"))
        rank = layer.tensors["svd_up"].shape[-1] if layer.tensors["svd_up"].shape else 0
        check_tensor(layer, title, "svd_up", FLOATS, (rows, rank))
        check_tensor(layer, title, "svd_down", FLOATS, (rank, count // rows))
        roles |= {"up": "svd_up", "down": "svd_down"}
    settings = {"bits": bits, "signed": not kind.startswith("u")}
    return packed(layer, "sdnq", title, roles, (rows, count // rows), settings)
