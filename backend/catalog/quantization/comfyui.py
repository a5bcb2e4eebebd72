"""Forms that ComfyUI's markers name (`comfy_quant`, `_quantization_metadata`), beyond codes times a factor.

Sources: comfy/ops.py and comfy/quant_ops.py of Comfy-Org/ComfyUI, comfy_kitchen/tensor of Comfy-Org/comfy-kitchen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

SAID = ("format", "full_precision_matrix_mult", "orig_dtype", "orig_shape", "per_row", "linear_dtype")


def match(layer: Layer) -> Decision | None:
    form = layer.entry.get("format")
    if form == "int8_tensorwise" and layer.entry.get("convrot"):
        return _convrot_int8(layer)
    if isinstance(form, str) and form in FORMS:
        title, read = FORMS[form]
        return read(layer, title)
    return None


def _convrot_int8(layer: Layer) -> Decision:
    title = "ConvRot INT8"
    _check_said(layer, title, "convrot", "convrot_groupsize", "group_size")
    check_roles(layer, title, ("weight", "weight_scale"))
    rows, columns = _matrix(layer, title, "I8")
    check_tensor(layer, title, "weight_scale", FLOATS, (), (1,), (1, 1), (rows,), (rows, 1))
    group = _rotated(layer, title, columns)
    roles = {"weight": "weight", "scale": "weight_scale"}
    return packed(layer, "convrot_int8", title, roles, (rows, columns), {"group": group})


def _convrot_int4(layer: Layer, title: str) -> Decision:
    _check_said(layer, title, "convrot", "convrot_groupsize", "quant_group_size")
    check_roles(layer, title, ("weight", "weight_scale"))
    rows, half = _matrix(layer, title, "I8")
    check_tensor(layer, title, "weight_scale", FLOATS, (rows,), (rows, 1))
    group = _rotated(layer, title, 2 * half)
    roles = {"weight": "weight", "scale": "weight_scale"}
    return packed(layer, "convrot_int4", title, roles, (rows, 2 * half), {"group": group})


def _w4a8(layer: Layer, title: str) -> Decision:
    _check_said(layer, title, "convrot", "convrot_groupsize", "group_size")
    check_roles(layer, title, ("weight", "weight_s_rel", "weight_s_channel"))
    rows, half = _matrix(layer, title, "I8")
    columns, group = 2 * half, _whole(layer, title, "group_size", 16)
    if columns % group:
        raise refusal(layer, f"{title} with groups of {group} for {columns} inputs")
    check_tensor(layer, title, "weight_s_rel", (*FLOATS, "F8_E4M3", "U8"), (rows, columns // group))
    check_tensor(layer, title, "weight_s_channel", FLOATS, (rows,), (rows, 1))
    roles = {"weight": "weight", "groups": "weight_s_rel", "scale": "weight_s_channel"}
    if layer.has("weight_codebook"):
        check_tensor(layer, title, "weight_codebook", FLOATS, (16,))
        roles["levels"] = "weight_codebook"
    return packed(layer, "w4a8", title, roles, (rows, columns), {"group": _rotated(layer, title, columns)})


def _awq(layer: Layer, title: str) -> Decision:
    _check_said(layer, title, "group_size")
    check_roles(layer, title, ("weight", "weight_scale", "weight_zeros"))
    rows, half = _matrix(layer, title, "I8")
    columns, group = 2 * half, _whole(layer, title, "group_size", 64)
    if columns % group:
        raise refusal(layer, f"{title} with groups of {group} for {columns} inputs")
    for role in ("weight_scale", "weight_zeros"):
        check_tensor(layer, title, role, FLOATS, (columns // group, rows))
    roles = {"weight": "weight", "scale": "weight_scale", "zeros": "weight_zeros"}
    return packed(layer, "awq_w4a16", title, roles, (rows, columns))


def _mxfp8(layer: Layer, title: str) -> Decision:
    _check_said(layer, title, "group_size", "block_size")
    check_roles(layer, title, ("weight", "weight_scale"))
    rows, columns = _matrix(layer, title, "F8_E4M3")
    if columns % 32:
        raise refusal(layer, f"{title} of {columns} inputs, which are no blocks of 32")
    check_tensor(layer, title, "weight_scale", ("F8_E8M0", "U8"), tiled(rows, columns // 32))
    roles = {"weight": "weight", "scale": "weight_scale"}
    return packed(layer, "mxfp8", title, roles, (kept_rows(layer, rows, 32), columns), {"tiled": True})


def _nvfp4(layer: Layer, title: str) -> Decision | None:
    if layer.about.method == "modelopt":
        return None  # the same name for another order of the codes
    _check_said(layer, title, "group_size", "block_size")
    check_roles(layer, title, ("weight", "weight_scale", "weight_scale_2"))
    rows, half = _matrix(layer, title, "U8")
    if half % 8:
        raise refusal(layer, f"{title} of {2 * half} inputs, which are no blocks of 16")
    check_tensor(layer, title, "weight_scale", ("F8_E4M3", "U8"), tiled(rows, half // 8))
    check_tensor(layer, title, "weight_scale_2", ("F32",), (), (1,), (1, 1))
    roles = {"weight": "weight", "scale": "weight_scale", "whole": "weight_scale_2"} | input_factor(
        layer, title, 2 * half
    )
    return packed(
        layer, "nvfp4", title, roles, (kept_rows(layer, rows, 16), 2 * half), {"tiled": True, "high_first": True}
    )


def _unread(layer: Layer, title: str) -> Decision:
    raise not_read(layer, title)


FORMS: Mapping[str, tuple[str, Callable[[Layer, str], Decision | None]]] = {
    "convrot_w4a4": ("ConvRot INT4", _convrot_int4),
    "asym_w4a8_int8": ("W4A8 INT8 (ComfyUI)", _w4a8),
    "awq_w4a16": ("AWQ W4A16 (ComfyUI)", _awq),
    "mxfp8": ("MXFP8 (ComfyUI)", _mxfp8),
    "nvfp4": ("NVFP4 (ComfyUI)", _nvfp4),
    "svdquant_w4a4": ("SVDQuant INT4 (ComfyUI)", _unread),
}


def tiled(rows: int, columns: int) -> tuple[int, int]:
    """The shape of block scales in cuBLAS' tiles of 128 x 4."""
    return -(-rows // 128) * 128, -(-columns // 4) * 4


def input_factor(layer: Layer, title: str, columns: int) -> dict[str, str]:
    """`pre_quant_scale`, where it is there: the layer's input is multiplied by it, and so its weight's columns are."""
    if not layer.has("pre_quant_scale"):
        return {}
    check_tensor(layer, title, "pre_quant_scale", FLOATS, (columns,))
    return {"input": "pre_quant_scale"}


def kept_rows(layer: Layer, rows: int, multiple: int) -> int:
    """Rows without those that were added up to a multiple: as many as the bias has."""
    bias = layer.tensors.get("bias")
    if bias is not None and len(bias.shape) == 1 and 0 <= rows - bias.shape[0] < multiple:
        return bias.shape[0]
    return rows


def _matrix(layer: Layer, title: str, dtype: str) -> tuple[int, int]:
    at = layer.stored
    if at.dtype != dtype or len(at.shape) != 2:
        raise refusal(layer, f"{at.dtype} {list(at.shape)}, while its marker says {title}: they disagree")
    return at.shape[0], at.shape[1]


def _whole(layer: Layer, title: str, key: str, default: int) -> int:
    value = layer.entry.get(key, default)
    if type(value) is not int or value < 1:
        raise refusal(layer, f"{title} with {key} = {str(value)[:40]}")
    return value


def _rotated(layer: Layer, title: str, columns: int) -> int:
    """The size of the groups that were rotated: a power of four that divides the inputs."""
    group = _whole(layer, title, "convrot_groupsize", 256)
    if group < 4 or group & (group - 1) or group.bit_length() % 2 == 0 or columns % group:
        raise refusal(layer, f"{title} rotated in groups of {group} for {columns} inputs, which cannot be")
    return group


def _check_said(layer: Layer, title: str, *known: str) -> None:
    for key, value in layer.entry.items():
        if key not in (*SAID, *known) and value not in (False, "", 0):
            raise refusal(layer, f"{title} with {key} = {str(value)[:60]}, which is not understood")
    shape = layer.entry.get("orig_shape")
    if shape is not None and not (isinstance(shape, list) and len(shape) == 2):
        raise refusal(layer, f"{title} of the shape {str(shape)[:60]}")
