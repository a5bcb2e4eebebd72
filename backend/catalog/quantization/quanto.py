"""optimum-quanto: `weight._data` with `weight._scale` (8 bits), `weight._data._data` with `_scale` and `_shift` (4 and
2 bits, in groups).

Source: optimum/quanto/tensor of optimum-quanto 0.2.7. The packed matrix is (rows x groups, numbers of a group) and does
not say how many rows there are; the bias does.
"""

from __future__ import annotations

import math

from backend.catalog.quantization.layer import FLOATS, Decision, Layer, check_roles, check_tensor, packed, refusal

DATA, PACKED, SCALE, SHIFT = "weight._data", "weight._data._data", "weight._scale", "weight._shift"


def match(layer: Layer) -> Decision | None:
    if not layer.has(DATA, PACKED, SCALE, SHIFT):
        return None
    if layer.has("weight"):
        raise refusal(layer, "quanto's codes, with a second weight beside them")
    return _bits(layer) if layer.has(PACKED) else _bytes(layer)


def _bytes(layer: Layer) -> Decision:
    known = layer.tensors.get(DATA)
    title = "quanto qint8" if known is None or known.dtype == "I8" else "quanto qfloat8"
    check_roles(layer, title, (DATA, SCALE))
    at = layer.tensors[DATA]
    check_tensor(layer, title, DATA, ("I8", "F8_E4M3", "F8_E5M2"))
    rows = at.shape[0] if at.shape else 0
    ones = (1,) * (len(at.shape) - 1)
    check_tensor(layer, title, SCALE, FLOATS, (), (1,), (1, *ones), (rows, *ones))
    if layer.has(SHIFT):
        raise refusal(layer, f"{title} with a shift, which it does not have")
    single = math.prod(layer.tensors[SCALE].shape) == 1
    settings = {"rows": rows if single else 1, "columns": math.prod(at.shape[1:])}
    return packed(layer, "affine_blocks", title, {"weight": DATA, "scale": SCALE}, at.shape, settings)


def _bits(layer: Layer) -> Decision:
    title = "quanto qint4"
    check_roles(layer, title, (PACKED, SCALE, SHIFT))
    check_tensor(layer, title, PACKED, ("U8",))
    data, scale = layer.tensors[PACKED], layer.tensors[SCALE]
    if len(data.shape) != 2 or len(scale.shape) != 2 or scale.shape[1] != 1 or not data.shape[0]:
        raise refusal(layer, f"{title} along another axis than the first")
    check_tensor(layer, title, SCALE, FLOATS)
    check_tensor(layer, title, SHIFT, FLOATS, tuple(scale.shape))
    groups, bias = scale.shape[0], layer.tensors.get("bias")
    bits = {-(-groups // 2): 4, -(-groups // 4): 2}.get(data.shape[0])
    title = f"quanto qint{bits or 4}"
    rows = bias.shape[0] if bias is not None and len(bias.shape) == 1 else 0
    if bits is None or not rows or groups % rows:
        raise refusal(layer, f"{title} of a shape that the file does not tell")
    shape = (rows, groups // rows * data.shape[1])
    roles = {"weight": PACKED, "scale": SCALE, "shift": SHIFT}
    return packed(layer, "quanto_bits", title, roles, shape, {"bits": bits})
