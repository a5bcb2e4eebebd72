"""bitsandbytes: NF4 and FP4 (`weight.absmax`, `weight.quant_map`, `weight.quant_state.bitsandbytes__nf4`), LLM.int8()
(`SCB`).

Source: bitsandbytes/functional.py (QuantState.as_dict, dequantize_4bit) and nn/modules.py (Linear8bitLt) of
bitsandbytes 0.50. The shape of a 4-bit weight stands in the quant state's JSON alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from backend.catalog.formats.header import is_far
from backend.catalog.quantization import small_tensors
from backend.catalog.quantization.layer import FLOATS, Decision, Layer, check_roles, check_tensor, packed, refusal

STATE = "weight.quant_state.bitsandbytes__"
FOUR = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "absmax", "quant_map")
KNOWN = ("quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset")


def match(layer: Layer) -> Decision | None:
    states = [role for role in layer.tensors if role.startswith(STATE)]
    if states or layer.has(*FOUR):
        return _four_bits(layer, states)
    if layer.has("SCB", "weight_format"):
        return _eight_bits(layer)
    return None


def _four_bits(layer: Layer, states: list[str]) -> Decision:
    title = f"bitsandbytes {states[0].removeprefix(STATE).upper()}" if states else "bitsandbytes 4-bit"
    if len(states) != 1:
        raise refusal(layer, f"{title} with {len(states)} quant states, where one says the weight's shape")
    check_roles(layer, title, ("weight", "weight.absmax", "weight.quant_map"))
    said = _state(layer, title, states[0])
    shape, block = tuple(said["shape"]), said["blocksize"]
    count = math.prod(shape)
    if math.prod(layer.stored.shape) != (count + 1) // 2 or layer.stored.dtype not in ("U8", "I8"):
        raise refusal(
            layer, f"{title} of the shape {list(shape)}, but it is {layer.stored.dtype} of {list(layer.stored.shape)}"
        )
    blocks = -(-count // block)
    roles = {"weight": "weight", "absmax": "weight.absmax", "levels": "weight.quant_map"}
    check_tensor(layer, title, "weight.quant_map", ("F32",), (16,))
    settings: dict[str, object] = {"block": block}
    if layer.has("weight.nested_absmax"):
        check_roles(layer, title, ("weight.nested_quant_map",))
        check_tensor(layer, title, "weight.absmax", ("U8",), (blocks,))
        check_tensor(layer, title, "weight.nested_quant_map", ("F32",), (256,))
        nested = said.get("nested_blocksize")
        if type(nested) is not int or nested < 1 or not isinstance(said.get("nested_offset"), int | float):
            raise refusal(layer, f"{title} whose quant state does not say how its factors are read")
        check_tensor(layer, title, "weight.nested_absmax", ("F32",), (-(-blocks // nested),))
        roles |= {"nested_absmax": "weight.nested_absmax", "nested_levels": "weight.nested_quant_map"}
        settings |= {"nested_block": nested, "offset": float(said["nested_offset"])}
    else:
        check_tensor(layer, title, "weight.absmax", FLOATS, (blocks,))
    return packed(layer, "bitsandbytes_4bit", title, roles, shape, settings, also=states)


def _state(layer: Layer, title: str, role: str) -> Mapping:
    at = layer.tensors[role]
    if is_far(at.file):
        raise refusal(layer, f"{title}, whose shapes stand in the file's data, which is not on this machine")
    try:
        said = small_tensors.said(at)
        if not isinstance(said, dict):
            raise ValueError("no table")
        fine = set(said) <= set(KNOWN)
        fine = fine and type(said["blocksize"]) is int and said["blocksize"] > 0 and isinstance(said["shape"], list)
        fine = fine and all(type(size) is int and size > 0 for size in said["shape"])
        fine = fine and said["quant_type"] == role.removeprefix(STATE)
    except (ValueError, KeyError):
        said, fine = {}, False
    if not fine:
        raise refusal(layer, f"{title} with a quant state that cannot be understood")
    return said


def _eight_bits(layer: Layer) -> Decision:
    title = "bitsandbytes INT8"
    check_roles(layer, title, ("weight", "SCB"))
    rows = layer.stored.shape[0] if layer.stored.shape else 0
    if layer.stored.dtype != "I8" or len(layer.stored.shape) != 2:
        raise refusal(layer, f"{title}, but its weight is {layer.stored.dtype} {list(layer.stored.shape)}")
    check_tensor(layer, title, "SCB", FLOATS, (rows,))
    order = layer.tensors.get("weight_format")
    if order is not None and (order.nbytes > 8 or (not is_far(order.file) and any(small_tensors.read_bytes(order)))):
        raise refusal(layer, f"{title} in another order than by rows")
    roles = {"weight": "weight", "scale": "SCB"}
    return packed(layer, "bitsandbytes_int8", title, roles, layer.stored.shape, also=("weight_format",))
