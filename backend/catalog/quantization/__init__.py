"""How each weight of a model is stored, decided from everything that its files say: the one owner of storage forms.

Read: small_tensors, layer, evidence, scaled, comfyui, torchao, bitsandbytes, quanto, sdnq, svdquant, other_vendors,
    methods.
Public: evidence, methods.

`methods` lists what Loft can quantize with. `layer` is a weight and what is known of it, `evidence` how that is
gathered; the others are the forms. Each says whether a layer is its, and as what it is read. The rule: a marker, prefix
or companion that is not understood never counts as absent. A weight is read right, or refused in a sentence that names
its form. `backend.engine.loading.dequantize` has for each form the formula.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from backend.catalog.quantization import bitsandbytes, comfyui, other_vendors, quanto, sdnq, svdquant, torchao
from backend.catalog.quantization import scaled as factors
from backend.catalog.quantization.evidence import COMPANIONS, gather
from backend.catalog.quantization.layer import ACTIVATIONS, FLOAT8, FLOATS, HINT, MARKERS, Decision, Layer, refusal
from backend.catalog.spec import TensorAt
from backend.schema.messages import Trouble

__all__ = ["Stored", "check_complete", "understood"]

FORMS: tuple[Callable[[Layer], Decision | None], ...] = (  # the most particular first
    torchao.match,
    bitsandbytes.match,
    quanto.match,
    sdnq.match,
    svdquant.match,
    comfyui.match,
    other_vendors.modelopt,
    other_vendors.named,
    factors.match,
)
MARKED = (
    "scaled_blocks",
    "convrot_int8",
    "convrot_int4",
    "w4a8",
    "awq_w4a16",
    "mxfp8",
    "nvfp4",
)  # forms that ComfyUI's markers name
SUSPECT = re.compile(  # of a role beside a matrix: what only weights have that are made of several tensors
    r"(?:.*[._])?(?:w?scales?\w*|w?zeros?\w*|absmax|quant\w*|codebook\w*|smooth\w*|qdata|offset|scb|g_idx|perm\w*"
    r"|lut|shift|had\w*|rotat\w*|svd_?\w+|proj_(?:down|up)|lora_\w+|weight_(?:g|v|u|bias|shape|orig|mask))",
    re.IGNORECASE,
)
INNOCENT = ("weight", "bias", "embed_scale")


@dataclass(frozen=True)
class Stored:
    """What tensors mean: numbers by name (shapes are the weights' own), factors of scaled codes, and what cannot be
    read, by name."""

    tensors: dict[str, TensorAt]
    scales: dict[str, TensorAt] = field(default_factory=dict)
    refused: dict[str, Trouble] = field(default_factory=dict)


def understood(tensors: Mapping[str, TensorAt], metadata: Mapping[str, str], settings: Mapping | None = None) -> Stored:
    """The weights in `tensors` (as stored, of one file or several) by name, wrappers taken off; companions and markers
    are gone.

    `settings`: the config.json beside them. A Trouble is kept by name and raised by who needs that weight.
    """
    layers, others = gather(tensors, metadata, settings)
    found = Stored(dict(others))
    for layer in layers:
        _note(layer, found)
    return found


def _note(layer: Layer, found: Stored) -> None:
    try:
        decision = _decide(layer)
    except Trouble as trouble:
        found.refused[layer.name] = trouble
        decision = Decision(layer.weight or next(iter(layer.tensors.values())))
    rest = {role for role in layer.tensors if role not in decision.used and role not in factors.HARMLESS}
    if decision.at is not None:
        found.tensors[layer.name] = decision.at
    if decision.scale is not None:
        found.scales[layer.name] = decision.scale
    found.tensors.update(decision.others)
    for role in rest - {"weight"}:
        found.tensors.setdefault(f"{layer.module}.{role}".lstrip("."), layer.tensors[role])


def _decide(layer: Layer) -> Decision:
    plain = layer.weight is not None and (layer.stored.dtype in FLOATS or layer.stored.dtype.startswith("GGUF"))
    if plain:
        return _plain(layer)
    if layer.about.broken:
        raise refusal(layer, f"{_codes(layer)}, but {layer.about.broken}, and with it what it said of this layer")
    if "unreadable" in layer.entry:
        raise refusal(layer, f"{_codes(layer)}, but {layer.entry['unreadable']}")
    decision = next((found for match in FORMS if (found := match(layer)) is not None), None)
    if decision is None:
        decision = _unmarked(layer)
    elif layer.entry and decision.at is not None and not _is_marked(decision.at):
        raise refusal(layer, f"{decision.at.dtype}, while its marker says {layer.entry['format'][:60]}: they disagree")
    unknown = set(layer.tensors) - decision.used - {"weight", "bias", *ACTIVATIONS, *MARKERS}
    if unknown:
        raise refusal(
            layer, f"{_codes(layer)} with {sorted(unknown)[0]!r} beside it, and what that does to the weight is unknown"
        )
    if decision.at is layer.weight and not layer.entry:
        about, scaled = layer.about, decision.scale is not None
        stray = about.stray_marker if not scaled or layer.stored.dtype == "I8" else ""
        stray = stray or ("" if scaled else about.stray_factor)
        if stray:
            raise refusal(layer, f"{_codes(layer)}, while {stray} belongs to no weight that is there")
    if layer.about.marked_int8 and not layer.entry and layer.weight is not None and layer.stored.dtype == "I8":
        raise refusal(layer, "I8 without a marker, while others have one, which says whether they are rotated")
    _check_scaled(layer, decision)
    return decision


def _is_marked(at: TensorAt) -> bool:
    return at.packed is None or at.packed.form in MARKED


def _plain(layer: Layer) -> Decision:
    """A weight of plain numbers: nothing beside it may say that they are codes."""
    if layer.torchao:
        torchao.match(layer)
    factors.left_beside(layer)
    for role in layer.tensors:
        if role in INNOCENT or role in ACTIVATIONS or role in MARKERS or role in factors.HARMLESS:
            continue
        known = role in COMPANIONS or role.startswith(("weight.", "_weight_"))
        if len(layer.stored.shape) > 1 and (known or SUSPECT.fullmatch(role)):
            what = layer.stored.dtype.replace("GGUF_", "GGUF ")
            raise refusal(layer, f"{what} with {role!r} beside it, and what that does to the weight is unknown")
    if any(role in layer.tensors for role in MARKERS):
        said = layer.entry.get("format", layer.entry.get("unreadable"))
        if said is not None and len(layer.stored.shape) > 1:
            raise refusal(layer, f"{layer.stored.dtype}, while its marker says {str(said)[:60]}: they disagree")
    if layer.entry.get("convrot"):
        raise refusal(layer, f"{layer.stored.dtype}, while the header says that it is rotated (ConvRot)")
    return Decision(layer.weight)


def _unmarked(layer: Layer) -> Decision:
    """Codes of which no form was found: plain FP8 is numbers, nothing else is."""
    at = layer.weight
    if layer.entry:
        raise refusal(
            layer,
            (
                f"{at.dtype if at else 'codes'} with a marker of the format {str(layer.entry.get('format'))[:60]!r}, "
                "which is not known"
            ),
        )
    if at is None or at.dtype not in FLOAT8:
        raise refusal(layer, f"{_codes(layer)} without a factor, and codes without one are no numbers")
    if layer.about.method and not layer.excluded():
        raise refusal(
            layer, f"{at.dtype} without a factor, while the model's quantization_config says {layer.about.method}"
        )
    return Decision(at)


def _check_scaled(layer: Layer, decision: Decision) -> None:
    """What the marker `scaled_fp8` covers has a factor, and is of the dtype that it names (float32 stands for e4m3)."""
    at = layer.weight
    if layer.scaled is None or at is None or at.dtype not in FLOAT8 or len(at.shape) < 2:
        return
    if decision.at is at and decision.scale is None:
        raise refusal(layer, f"{at.dtype} in a scaled FP8 file (marker scaled_fp8), but it has no factor beside it")
    named = "F8_E4M3" if layer.scaled in FLOATS else layer.scaled
    if named != at.dtype:
        raise refusal(layer, f"{at.dtype}, while the marker scaled_fp8 says {layer.scaled}: they disagree")


def _codes(layer: Layer) -> str:
    at = layer.weight or next(iter(layer.tensors.values()))
    return at.dtype


def check_complete(tensors: Mapping[str, TensorAt], scales: Mapping[str, TensorAt]) -> None:
    """In a part with scaled weights an 8-bit matrix without a factor would be 100 times too large.

    Raises Trouble for it.
    """
    if not scales and not any(at.packed is not None for at in tensors.values()):
        return
    for name, at in tensors.items():
        if at.dtype in FLOAT8 and len(at.shape) > 1 and name not in scales and at.packed is None:
            raise Trouble(
                "not_supported",
                f"{at.file.name} holds scaled weights, but {name} ({at.dtype}) has no factor beside it.",
                hint=HINT,
            )
