"""Scaled FP8 and INT8: codes times a factor for the whole weight, for each row, or for each block.

Spellings: `scale_weight` (ComfyUI's older form, musubi-tuner), `weight_scale` (ComfyUI's newer form, vendors' files,
convert_to_quant, ModelOpt, compressed-tensors), `weight_scale_inv` (fine-grained FP8 of transformers: a factor
nonetheless, in spite of its name). Musubi-tuner's blocks are (rows, blocks, 1): runs of neighbouring inputs of one row
share a factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from backend.catalog.quantization import small_tensors
from backend.catalog.quantization.layer import (
    ACTIVATIONS,
    FLOAT8,
    FLOATS,
    MARKERS,
    SCALES,
    Decision,
    Layer,
    is_single,
    packed,
    refusal,
)
from backend.catalog.spec import TensorAt

CODES = (*FLOAT8, "I8")
INVERSE = "weight_scale_inv"
PLAIN_METHODS = ("", "fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "quark")  # weight = codes x factor
# what a marker may say of a layer: format -> (dtype of its codes, how many factors)
FORMATS: Mapping[str, tuple[str, str]] = {
    "float8_e4m3fn": ("F8_E4M3", "any"),
    "float8_e5m2": ("F8_E5M2", "any"),
    "float8_e4m3fn_rowwise": ("F8_E4M3", "rows"),
    "float8_e4m3fn_blockwise": ("F8_E4M3", "blocks"),
    "float8_e4m3fn_block3d": ("F8_E4M3", "blocks"),
    "int8_tensorwise": ("I8", "any"),
    "int8_blockwise": ("I8", "blocks"),
}
SAID = ("format", "full_precision_matrix_mult", "orig_dtype", "orig_shape", "per_row", "group_size", "block_size")


def title(layer: Layer) -> str:
    return "scaled INT8" if layer.stored.dtype == "I8" else "scaled FP8"


def match(layer: Layer) -> Decision | None:
    """Codes with a factor, said by a marker or not; None where the layer has neither."""
    at, form = layer.weight, layer.entry.get("format")
    if at is None or not (layer.has(*SCALES, INVERSE) or form in FORMATS):
        return None
    if at.dtype not in CODES:
        return None
    if at.dtype == "F8_E4M3FNUZ" and form:
        raise refusal(layer, f"{at.dtype} with the marker {form}, which names another dtype")
    _check_marker(layer)
    scale = scale_of(layer)
    if scale is None:
        raise refusal(layer, f"{title(layer)} (a marker says {form}), but it has no factor beside it")
    if scale.dtype not in FLOATS:
        raise refusal(layer, f"{title(layer)} with a {scale.dtype} factor, which is not read")
    if layer.about.method not in PLAIN_METHODS:
        raise refusal(
            layer, f"{title(layer)}, while the model's quantization_config says {layer.about.method}: they disagree"
        )
    used = frozenset(("weight", *SCALES, INVERSE))
    sides = sides_of(layer, scale)
    if sides is None:
        return Decision(at, scale, used)
    role = next(role for role in (*SCALES, INVERSE) if layer.tensors.get(role) is scale)
    found = packed(
        layer,
        "scaled_blocks",
        "INT8 in blocks" if at.dtype == "I8" else "FP8 in blocks",
        {"weight": "weight", "scale": role},
        at.shape,
        {"rows": sides[0], "columns": sides[1]},
    )
    return Decision(found.at, used=used)


def scale_of(layer: Layer) -> TensorAt | None:
    """The one factor. Raises Trouble where two are there that disagree."""
    found = [(role, layer.tensors[role]) for role in (*SCALES, INVERSE) if role in layer.tensors]
    if not found:
        return None
    for role, at in found[1:]:
        if not small_tensors.are_equal(found[0][1], at):
            raise refusal(layer, f"{title(layer)} with two factors that disagree: {found[0][0]} and {role}")
    if found[0][0] == INVERSE and layer.about.method != "fp8":
        raise refusal(layer, f"FP8 with {INVERSE}, and no quantization_config says how it is meant")
    return found[0][1]


def _check_marker(layer: Layer) -> None:
    """Raises Trouble where the marker names another format than the one that is stored, or says more than is
    understood."""
    form, at = layer.entry.get("format"), layer.stored
    if not layer.entry:
        return
    if not isinstance(form, str) or form not in FORMATS:
        raise refusal(layer, f"{at.dtype} with a marker of the format {str(form)[:60]!r}, which is not known")
    if FORMATS[form][0] != at.dtype:
        raise refusal(layer, f"{at.dtype}, while its marker says {form}: they disagree")
    for key, value in layer.entry.items():
        if key not in SAID and key != "convrot_groupsize" and value not in (None, False, "", 0):
            raise refusal(layer, f"{form} with {key} = {str(value)[:60]}, which is not understood")
    if layer.entry.get("convrot_groupsize") and "convrot" not in layer.entry:
        raise refusal(layer, f"{form} with a convrot_groupsize, and it does not say whether it is rotated")
    said = layer.entry.get("orig_shape")
    if said is not None and list(at.shape) != said:
        raise refusal(layer, f"{form} of the shape {str(said)[:60]}, but it is stored as {list(at.shape)}")


def sides_of(layer: Layer, scale: TensorAt) -> tuple[int, int] | None:
    """Rows and columns of the blocks that share a factor; None for one factor or one a row.

    Raises Trouble where the shape fits nothing.
    """
    at, kind = layer.stored, FORMATS.get(str(layer.entry.get("format")), ("", "any"))[1]
    rows, columns = at.shape[0] if at.shape else 1, math.prod(at.shape[1:])
    size = layer.entry.get("group_size", layer.entry.get("block_size"))
    shape = tuple(scale.shape)
    misfit = refusal(
        layer, f"{title(layer)} with a factor of shape {list(shape)} for a weight of shape {list(at.shape)}"
    )
    by_row = shape and shape[0] == rows and math.prod(shape) == rows
    if is_single(shape) and not (kind == "rows" and rows > 1):
        if layer.entry.get("per_row") and rows > 1:
            raise misfit
        sides = (rows, columns)
    elif by_row:
        sides = (1, columns)
    elif len(at.shape) != 2 or kind == "rows" or layer.entry.get("per_row"):
        raise misfit
    elif scale.key.endswith(INVERSE):
        sides = _fine_grained(layer, shape)
    elif len(shape) == 3 and shape[0] == rows and shape[2] == 1 and shape[1] and columns % shape[1] == 0:
        sides = (1, columns // shape[1])
    elif is_by_block(shape, at.shape) and (shape[1] > 1 or kind == "blocks"):
        sides = (rows // shape[0], columns // shape[1])
    else:
        raise misfit
    if sides is None:
        raise misfit
    if kind == "blocks" and isinstance(size, int) and not _said(sides, size, rows, columns):
        raise refusal(layer, f"{title(layer)} in blocks of {size}, but its factor has the shape {list(shape)}")
    return None if sides == (rows, columns) or (by_row and sides[1] == columns) else sides


def _said(sides: tuple[int, int], size: int, rows: int, columns: int) -> bool:
    """Whether blocks of `sides` are blocks of `size`: squares, or runs along a row."""
    return sides in ((size, size), (1, size)) or (min(size, rows), min(size, columns)) == sides


def _fine_grained(layer: Layer, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Block sides that a quantization_config states; the last blocks may be cut off."""
    said = layer.about.config.get("weight_block_size")
    if not (isinstance(said, list) and len(said) == 2 and all(type(side) is int and side > 0 for side in said)):
        return None
    counts = tuple(-(-size // side) for size, side in zip(layer.stored.shape, said, strict=True))
    return tuple(said) if shape == counts else None


def is_by_block(scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether a factor of that shape is one for each of equal blocks of a matrix, whose sides are powers of two in
    every scheme.

    A remainder would leave the size of the blocks open, and a factor for each column could be one for each row,
    transposed.
    """
    if len(scale) != 2 or len(weight) != 2 or 0 in scale:
        return False
    whole = all(size % parts == 0 for size, parts in zip(weight, scale, strict=True))
    sides = [size // parts for size, parts in zip(weight, scale, strict=True)]
    if not whole or (sides[1] == 1 and weight[1] > 1):
        return False
    return all(side & (side - 1) == 0 or side == size for side, size in zip(sides, weight, strict=True))


def left_beside(layer: Layer) -> None:
    """Raises Trouble for a weight of plain numbers that has a factor beside it: nothing says whether it was multiplied
    in. Factors of 1 say nothing."""
    for role in (*SCALES, INVERSE):
        if role in layer.tensors and not small_tensors.is_one(layer.tensors[role]):
            what = layer.stored.dtype.replace("GGUF_", "GGUF ")
            raise refusal(layer, f"{what} with {role} beside it, and nothing says whether it was multiplied in already")


HARMLESS = frozenset((*ACTIVATIONS, *MARKERS, *SCALES, INVERSE))
