"""Tensors that torchao flattened for safetensors: `<module>._weight_qdata`, `._weight_scale`, ...; what they are stands
in the header.

Source: torchao/prototype/safetensors/safetensors_support.py of torchao 0.18, and the `dequantize` of each class.
"""

from __future__ import annotations

from backend.catalog.quantization.comfyui import tiled
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

PREFIX = "_weight_"
TITLES = {
    "Float8Tensor": "torchao float8",
    "Int8Tensor": "torchao int8",
    "IntxUnpackedToInt8Tensor": "torchao intx",
    "Int4Tensor": "torchao int4",
    "Int4TilePackedTo4dTensor": "torchao int4 (tile-packed)",
    "Int4PlainInt32Tensor": "torchao int4 (plain int32)",
    "MXTensor": "torchao MX",
    "NVFP4Tensor": "torchao NVFP4",
}
MX = {"float8_e4m3fn": ("MXFP8", "F8_E4M3"), "float8_e5m2": ("MXFP8", "F8_E5M2"), "float4_e2m1fn_x2": ("MXFP4", "U8")}


def match(layer: Layer) -> Decision | None:
    own = [role for role in layer.tensors if role.startswith(PREFIX)]
    if not own:
        if layer.torchao and layer.has("weight"):
            raise refusal(layer, f"{layer.stored.dtype}, while torchao's header says {layer.torchao.get('_type')}")
        return None
    kind = str(layer.torchao.get("_type"))
    title = TITLES.get(kind, "torchao")
    said = layer.torchao.get("_data")
    if not isinstance(layer.torchao.get("_type"), str) or not isinstance(said, dict):
        raise refusal(layer, "torchao, but the header does not say which of its forms")
    check_roles(layer, title, (f"{PREFIX}qdata", f"{PREFIX}scale"))
    if layer.has("weight"):
        raise refusal(layer, f"{title}, with a second weight beside it")
    read = {"Float8Tensor": _affine, "Int8Tensor": _affine, "IntxUnpackedToInt8Tensor": _affine}
    read |= {"MXTensor": _mx, "NVFP4Tensor": _nvfp4}
    if kind not in read:
        raise not_read(layer, title)
    return read[kind](layer, title, said)


def _affine(layer: Layer, title: str, said: dict) -> Decision:
    data = layer.tensors[f"{PREFIX}qdata"]
    dtypes = ("F8_E4M3", "F8_E5M2") if title.endswith("float8") else ("I8",)
    check_tensor(layer, title, f"{PREFIX}qdata", dtypes)
    block = said.get("block_size")
    sides = block if len(data.shape) == 2 and isinstance(block, list) and len(block) == 2 else ()
    if not sides or not all(type(side) is int and side > 0 for side in sides):
        raise refusal(layer, f"{title} with blocks of {str(block)[:40]}")
    if any(size % side for size, side in zip(data.shape, sides, strict=True)):
        raise refusal(layer, f"{title} in blocks of {block} for a weight of {list(data.shape)}")
    counts = tuple(size // side for size, side in zip(data.shape, sides, strict=True))
    shapes = (counts, *([(), (1,)] if counts == (1, 1) else []), *([(counts[0],)] if counts[1] == 1 else []))
    check_tensor(layer, title, f"{PREFIX}scale", FLOATS, *shapes)
    roles = {"weight": f"{PREFIX}qdata", "scale": f"{PREFIX}scale"}
    if layer.has(f"{PREFIX}zero_point"):
        check_tensor(layer, title, f"{PREFIX}zero_point", (*FLOATS, "I8", "I32", "I64", "I16"), *shapes)
        roles["zero"] = f"{PREFIX}zero_point"
    _check_pieces(layer, title, roles.values())
    return packed(layer, "affine_blocks", title, roles, data.shape, {"rows": sides[0], "columns": sides[1]})


def _mx(layer: Layer, title: str, said: dict) -> Decision:
    kind = said.get("elem_dtype")
    kind = kind.get("_data") if isinstance(kind, dict) else kind
    if kind not in MX:
        raise not_read(layer, f"torchao MX ({str(kind)[:40]})")
    title, dtype = f"torchao {MX[kind][0]}", MX[kind][1]
    check_tensor(layer, title, f"{PREFIX}qdata", (dtype,))
    data = layer.tensors[f"{PREFIX}qdata"]
    if len(data.shape) != 2 or said.get("block_size") != 32:
        raise refusal(layer, f"{title} in blocks of {str(said.get('block_size'))[:40]} for {list(data.shape)}")
    rows, columns = data.shape[0], data.shape[1] * (2 if dtype == "U8" else 1)
    swizzled = _scales(layer, title, said, rows, columns, 32, ("F8_E8M0", "U8"))
    roles = {"weight": f"{PREFIX}qdata", "scale": f"{PREFIX}scale"}
    _check_pieces(layer, title, roles.values())
    form = "mxfp4" if dtype == "U8" else "mxfp8"
    return packed(layer, form, title, roles, (rows, columns), {"tiled": swizzled})


def _nvfp4(layer: Layer, title: str, said: dict) -> Decision:
    check_tensor(layer, title, f"{PREFIX}qdata", ("U8",))
    data = layer.tensors[f"{PREFIX}qdata"]
    if len(data.shape) != 2 or said.get("block_size") != 16:
        raise refusal(layer, f"{title} in blocks of {str(said.get('block_size'))[:40]} for {list(data.shape)}")
    rows, columns = data.shape[0], 2 * data.shape[1]
    swizzled = _scales(layer, title, said, rows, columns, 16, ("F8_E4M3", "U8"))
    roles = {"weight": f"{PREFIX}qdata", "scale": f"{PREFIX}scale"}
    if layer.has(f"{PREFIX}per_tensor_scale"):
        check_tensor(layer, title, f"{PREFIX}per_tensor_scale", FLOATS, (), (1,), (1, 1))
        roles["whole"] = f"{PREFIX}per_tensor_scale"
    _check_pieces(layer, title, roles.values(), "act_per_tensor_scale")
    settings = {"tiled": swizzled, "high_first": False}
    return packed(layer, "nvfp4", title, roles, (rows, columns), settings, also=(f"{PREFIX}act_per_tensor_scale",))


def _scales(layer: Layer, title: str, said: dict, rows: int, columns: int, block: int, dtypes: tuple) -> bool:
    """Whether the scales lie in tiles; their shape has to be the one that the header's answer asks for."""
    swizzled = said.get("is_swizzled_scales")
    if not isinstance(swizzled, bool) or columns % block:
        raise refusal(layer, f"{title}, but the header does not say how its scales lie")
    tiles = tiled(rows, columns // block)
    shapes = (tiles, (tiles[0] // 4, tiles[1] * 4)) if swizzled else ((rows, columns // block),)
    check_tensor(layer, title, f"{PREFIX}scale", dtypes, *shapes)
    return swizzled


def _check_pieces(layer: Layer, title: str, used, *also: str) -> None:
    """Raises Trouble where the header names other tensors than are there."""
    names = layer.torchao.get("_tensor_data_names")
    found = {role.removeprefix(PREFIX) for role in layer.tensors if role.startswith(PREFIX)}
    wanted = {role.removeprefix(PREFIX) for role in used}
    if not isinstance(names, list) or set(map(str, names)) != found or found - wanted - set(also):
        raise refusal(
            layer, f"{title}, but its tensors are {', '.join(sorted(found))[:80]}, others than the header says"
        )
