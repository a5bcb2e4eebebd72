"""Which stored tensors are weights and which say how 8-bit weights are to be read. Unknown companions are an error, never a guess.

Forms: a plain cast (no companions); ComfyUI's older form (`scaled_fp8` marker, `.scale_weight`, `.scale_input`) and newer form
(`.weight_scale`, `.input_scale`, `.comfy_quant` and `_quantization_metadata`), which vendors' own fp8 files share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from backend.catalog.header import read_bytes
from backend.catalog.spec import TensorAt
from backend.schema.messages import Trouble

EIGHT_BIT = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8")
SCALES = ("scale_weight", "weight_scale")
ACTIVATION_ONLY = ("scale_input", "input_scale")  # hints for activations; the weights do not change by them
MARKERS = ("scaled_fp8", "comfy_quant")
FACTOR_FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8_blockwise")  # weight = codes x factor
FACTOR_DTYPES = ("F64", "F32", "F16", "BF16")
HARMLESS = (  # what else a marker may say of a layer
    "format",
    "full_precision_matrix_mult",
    "orig_dtype",
    "orig_shape",
    "group_size",
    "convrot_groupsize",
)
OTHER_FORMS = {
    "absmax": "bitsandbytes 4-bit",
    "quant_map": "bitsandbytes 4-bit",
    "bitsandbytes__nf4": "bitsandbytes 4-bit",
    "bitsandbytes__fp4": "bitsandbytes 4-bit",
    "SCB": "bitsandbytes 8-bit",
    "weight_scale_2": "nvfp4",
    "qweight": "SVDQuant (nunchaku)",
    "wscales": "SVDQuant (nunchaku)",
    "qzeros": "GPTQ or AWQ",
    "zero_point": "SDNQ or another scheme with a zero point",
}
STRAY = re.compile(r"(?P<inner>.+)\.weight\..+|(?P<joined>.+)_(?:scale|zero|absmax|quant)\w*")
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.", "transformer.")
HINT = "Take the bf16 or the fp8 file of this model instead."


def split_scales(tensors: Mapping[str, TensorAt], metadata: Mapping[str, str]) -> tuple[dict, dict]:
    """(weights, scales by weight name) of a part's tensors under its own names.

    Raises Trouble("not_supported") for a scheme that is known but cannot be read, or for an 8-bit weight with a companion that
    nobody knows.
    """
    weights, scales = {}, {}
    siblings = _by_module(tensors)
    formats = _formats(metadata)
    for name, at in tensors.items():
        module, _, leaf = name.rpartition(".")
        if at.dtype not in EIGHT_BIT or leaf in (*MARKERS, *SCALES, *ACTIVATION_ONLY):
            continue
        scale = _scale_of(name, at, siblings[module], _said_of(module, formats), siblings.get(name, ()))
        if scale is not None:
            scales[name] = scale
    helpers = (*SCALES, *ACTIVATION_ONLY, *MARKERS)
    for name, at in tensors.items():
        if name.rpartition(".")[2] not in helpers:
            _check_stray(name, at, tensors)
            weights[name] = at
    marked = any(name.rpartition(".")[2] == "scaled_fp8" for name in tensors)
    if scales or marked:
        _check_complete(weights, scales)
    return weights, scales


def _by_module(tensors: Mapping[str, TensorAt]) -> dict[str, dict[str, TensorAt]]:
    modules: dict[str, dict[str, TensorAt]] = {}
    for name, at in tensors.items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = at
    return modules


def _scale_of(
    name: str, at: TensorAt, beside: dict[str, TensorAt], said: dict | None, strays: Iterable[str]
) -> TensorAt | None:
    """The factor of the 8-bit weight `name`. `beside`: its module's tensors; `strays`: what lies under its own name."""
    leaf = name.rpartition(".")[2]
    for other in (*beside, *strays):
        if other in OTHER_FORMS:
            raise _unsupported(at, name, f"{OTHER_FORMS[other]} ({other})")
    if leaf == "weight":
        _check_companions(name, at, beside)
        for entry in (_marked(beside.get("comfy_quant")), said or {}):
            _check_format(name, at, entry)
    scale = next((beside[key] for key in SCALES if key in beside), None) if leaf == "weight" else None
    if scale is None:
        if at.dtype in ("I8", "U8") and leaf == "weight":
            raise _unsupported(at, name, f"{at.dtype} without a factor")
        return None
    rows = at.shape[0] if at.shape else 1
    known = scale.shape in ((), (1,), (1, 1), (rows,), (rows, 1)) or is_by_block(scale.shape, at.shape)
    if not known or at.dtype == "U8" or scale.dtype not in FACTOR_DTYPES:
        what = f"a {scale.dtype} factor of shape {list(scale.shape)} for a weight of shape {list(at.shape)}"
        raise _unsupported(at, name, what)
    for entry in (_marked(beside.get("comfy_quant")), said or {}):
        _check_blocks(name, at, scale, entry)
    return scale


def is_by_block(scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether a factor of that shape is one for each of equal blocks of a matrix, whose sides are powers of two in every scheme.

    A remainder would leave the size of the blocks open.
    """
    if len(scale) != 2 or len(weight) != 2 or 0 in scale or scale[1] == 1:
        return False
    whole = all(size % parts == 0 for size, parts in zip(weight, scale, strict=True))
    sides = [size // parts for size, parts in zip(weight, scale, strict=True)]
    return whole and all(side & (side - 1) == 0 or side == size for side, size in zip(sides, weight, strict=True))


def _check_blocks(name: str, at: TensorAt, scale: TensorAt, entry: Mapping) -> None:
    """Raises Trouble where the block size that a file states is not the one that its factors have."""
    said = entry.get("group_size")
    if not isinstance(said, int) or not is_by_block(scale.shape, at.shape):
        return
    if said not in (at.shape[0] // scale.shape[0], at.shape[1] // scale.shape[1]):
        raise _unsupported(at, name, f"blocks of {said} with a factor of shape {list(scale.shape)}")


def _check_companions(name: str, at: TensorAt, beside: dict[str, TensorAt]) -> None:
    known = {"weight", "bias", *SCALES, *ACTIVATION_ONLY, *MARKERS}
    unknown = sorted(set(beside) - known)
    if unknown:
        raise Trouble(
            "not_supported",
            f"{at.file.name} stores {name} as {at.dtype} with {unknown[0]!r} beside it, and what that does to the weight is unknown.",
            hint=HINT,
            detail="\n".join(unknown),
        )


def _check_complete(weights: dict[str, TensorAt], scales: dict[str, TensorAt]) -> None:
    """In a file of scaled weights an 8-bit weight without a factor would be 100 times too large: refuse it."""
    for name, at in weights.items():
        if at.dtype in EIGHT_BIT and len(at.shape) > 1 and name not in scales:
            raise Trouble(
                "not_supported",
                f"{at.file.name} is a scaled 8-bit file, but {name} ({at.dtype}) has no factor beside it.",
                hint=HINT,
            )


def _unsupported(at: TensorAt, name: str, what: str) -> Trouble:
    return Trouble("not_supported", f"{at.file.name} stores {name} in a form that is not read: {what}.", hint=HINT)


def _check_stray(name: str, at: TensorAt, tensors: Mapping[str, TensorAt]) -> None:
    """A companion whose name is joined to the weight's in another way (`to_q.weight.scale`, `to_q_scale`) is one nonetheless."""
    match = STRAY.fullmatch(name)
    module = (match["inner"] or match["joined"]) if match else ""
    weight = tensors.get(f"{module}.weight")
    if weight is not None and weight.dtype in EIGHT_BIT:
        _check_companions(f"{module}.weight", weight, {name[len(module) + 1 :]: at})


def _check_format(name: str, at: TensorAt, entry: Mapping) -> None:
    """Raises Trouble where what is said of a layer is more than that its codes are to be multiplied by a factor."""
    form = str(entry.get("format", ""))
    if form and form not in FACTOR_FORMATS:
        raise _unsupported(at, name, form)
    more = [f"{form} with {key}" for key, value in entry.items() if key not in HARMLESS and value not in (None, False)]
    if more:
        raise _unsupported(at, name, more[0][:100])


def _marked(marker: TensorAt | None) -> dict:
    """What a `comfy_quant` tensor (bytes of JSON) says."""
    if marker is None or marker.nbytes > 65536:
        return {}
    try:
        said = json.loads(read_bytes(marker).rstrip(b"\0"))
    except (ValueError, RecursionError):
        raise Trouble("damaged", f"{marker.file.name} holds a broken {marker.key}: it is not JSON.") from None
    return said if isinstance(said, dict) else {}


def _formats(metadata: Mapping[str, str]) -> dict[str, dict]:
    """module -> what `_quantization_metadata` says of it; a layer may be named there and yet be stored plainly."""
    try:
        layers = json.loads(metadata.get("_quantization_metadata", "{}")).get("layers", {})
        return {str(module): entry for module, entry in layers.items() if isinstance(entry, dict)}
    except (ValueError, AttributeError, RecursionError):
        return {}


def _said_of(module: str, formats: Mapping[str, dict]) -> dict | None:
    """The entry of a module, which may be named with a prefix there."""
    if module in formats or not formats:
        return formats.get(module)
    for prefix in PREFIXES:
        if prefix + module in formats:
            return formats[prefix + module]
    return None
