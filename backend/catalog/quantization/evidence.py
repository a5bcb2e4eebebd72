"""Everything that files say of how their weights are stored, gathered by weight: stored tensors by role, markers,
header entries, configurations.

What cannot be understood is kept as words (`Evidence.broken`, an entry's "unreadable"), never dropped: codes that it
may speak of are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from backend.catalog.formats.duplicate_tensors import check_same
from backend.catalog.formats.header import is_far
from backend.catalog.key_prefixes import Modules, bare, unwrapped
from backend.catalog.quantization import small_tensors
from backend.catalog.quantization.layer import ACTIVATIONS, MARKERS, SCALES, Evidence, Layer
from backend.catalog.spec import TensorAt
from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble

LAYERS = "_quantization_metadata"
CONFIG = "quantization_config"
VERSIONS = ("1.0", "1", 1, 1.0, None)
TOLD = (  # beside the layers: nothing that a weight would be read by
    "format_version",
    "layers",
    "version",
    "producer",
    "tool",
    "software",
    "created_by",
    "author",
    "date",
    "name",
    "model",
    "source",
    "description",
    "comment",
)
TWICE = ["said twice"]  # no entry that could be understood
PRIMARY = ("weight", "weight._data", "weight._data._data", "_weight_qdata", "qweight", "weight_packed", "W_q")
JOINED = re.compile(r"(?P<module>.+)_(?P<role>scale\w*|zero\w*|absmax|quant\w*|scb)", re.IGNORECASE)
# roles that only a quantized weight has beside it; whose weight is elsewhere looks for it under other prefixes
COMPANIONS = (
    *SCALES,
    *ACTIVATIONS,
    *MARKERS,
    "weight_scale_inv",
    "weight_scale_2",
    "pre_quant_scale",
    "SCB",
    "weight_zero_point",
)


def together(headers: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The metadata of several files as one: what each says of its layers is kept, and so is what is broken in one of
    them.

    Raises Trouble("repeated") where two say different things of all weights, or of one."""
    merged: dict[str, str] = {}
    layered: list[str] = []
    for metadata in headers:
        for key, text in metadata.items():
            if (key == CONFIG or key.endswith(".weight")) and merged.get(key, text) != text:
                raise Trouble(
                    "repeated",
                    f"Files that were named together say {key[:160]} twice and differently in their headers.",
                    hint="Name only the files that belong together.",
                )
        merged.update(metadata)
        if metadata.get(LAYERS) and metadata[LAYERS] not in layered:
            layered.append(metadata[LAYERS])
    if len(layered) > 1:
        entries: dict = {}
        for text in layered:
            said, broken = _layers_of(text)
            if broken:
                merged[LAYERS] = text
                break
            for name, entry in said.items():
                entries[name] = entry if entries.get(name, entry) == entry else TWICE
        else:
            merged[LAYERS] = json.dumps({"layers": entries})
    return merged


def gather(
    tensors: Mapping[str, TensorAt], metadata: Mapping[str, str], settings: Mapping | None
) -> tuple[list[Layer], dict[str, TensorAt]]:
    """(modules with a weight, all other tensors by name) of a file or several.

    Names are without wrappers, prefixes stay.

    `settings`: a config.json beside the files.
    """
    modules, scaled = _by_module(tensors)
    others: dict[str, TensorAt] = {}
    weighted = {name for name, roles in modules.items() if any(role in roles for role in PRIMARY)}
    index = Modules(weighted)
    stray_marker, stray_factor = _home_strays(modules, weighted, index)
    entries, broken = _said_of_layers(metadata)
    by_module: dict[str, dict] = {}
    for said, entry in entries.items():
        meant = index.meant(said)
        stray_marker = stray_marker or ("" if meant else f"the header's entry {said[:120]!r}")
        for name in meant:
            by_module.setdefault(name, {"entries": []})["entries"].append(entry)
    config, unread = _config(metadata, settings)
    said_of = {
        name: _entry(modules[name], by_module.get(name, {"entries": []})["entries"])
        for name in modules
        if name in weighted
    }
    marked = LAYERS in metadata or any(
        entry and "weight" in modules[name] and modules[name]["weight"].dtype == "I8" for name, entry in said_of.items()
    )
    about = Evidence(_method(config), config, broken or unread, stray_marker, stray_factor, bool(entries), marked)
    torchao = _torchao(metadata, index)
    layers = []
    for name in modules:
        if name in weighted:
            roles, entry = modules[name], said_of[name]
            layers.append(Layer(name, roles, entry, torchao.get(name, {}), _covering(name, scaled, weighted), about))
        else:
            others.update({f"{name}.{role}" if name else role: at for role, at in modules[name].items()})
    return layers, others


def _by_module(tensors: Mapping[str, TensorAt]) -> tuple[dict[str, dict], dict[str, TensorAt]]:
    """(module -> role -> tensor, prefix -> `scaled_fp8` marker)."""
    modules: dict[str, dict[str, TensorAt]] = {}
    scaled: dict[str, TensorAt] = {}
    for key, at in tensors.items():
        name = unwrapped(key)
        before, inside, after = name.partition(".weight.")
        module, _, role = (before, "", f"weight.{after}") if inside else name.rpartition(".")
        if role == "scaled_fp8":
            scaled[f"{module}." if module else ""] = at
            continue
        roles = modules.setdefault(module, {})
        if role in roles:  # with a wrapper and without
            check_same(roles[role], at)
        roles.setdefault(role, at)
    for name in [name for name in modules if name]:
        for role in list(modules[name]):
            match = JOINED.fullmatch(role)
            owner = f"{name}.{match['module']}" if match else ""
            matrix = modules.get(owner, {}).get("weight")
            if match and matrix is not None and len(matrix.shape) > 1 and "weight" not in modules[name]:
                modules[owner][f"_{match['role']}"] = modules[name].pop(role)
    return modules, scaled


def _home_strays(modules: dict, weighted: set[str], index: Modules) -> tuple[str, str]:
    """Gives companions whose weight lies under another prefix to it; answers (a marker, a factor) that belong to no
    weight."""
    marker = factor = ""
    for name in [name for name in modules if name not in weighted]:
        roles = modules[name]
        for role in [role for role in roles if role in COMPANIONS]:
            meant = index.meant(name)
            for one in meant:
                if role in modules[one] and not small_tensors.are_equal(modules[one][role], roles[role]):
                    check_same(modules[one][role], roles[role])
                modules[one].setdefault(role, roles[role])
            if meant:
                del roles[role]
            elif role in MARKERS:
                marker = marker or f"the marker {roles[role].key!r}"
            elif role not in ACTIVATIONS:
                factor = factor or f"the factor {roles[role].key!r}"
    return marker, factor


def _said_of_layers(metadata: Mapping[str, str]) -> tuple[dict[str, object], str]:
    """`_layers_of` the header's entry, under whatever spelling; another entry about quantization that holds a table is
    not understood."""
    entries, broken = _layers_of(metadata.get(LAYERS))
    for key, text in metadata.items():
        plain = bare(key.strip()).strip("_").lower()
        table = text.lstrip().startswith(("{", "[")) and '"_type"' not in text  # not torchao's of a weight
        if "quant" not in plain or key in (LAYERS, CONFIG) or not table:
            continue
        said, why = _layers_of(text)
        if why or any(entries.get(name, entry) != entry for name, entry in said.items()):
            return entries, f"the header's {key[:60]} is not understood"
        entries = {**entries, **said}
    return entries, broken


def _layers_of(text: str | None) -> tuple[dict[str, object], str]:
    """(module -> entry, why it cannot be understood) of `_quantization_metadata`."""
    if text is None:
        return {}, ""
    try:
        said = parse_json(text, pairs=_once)
    except ValueError:
        return {}, f"the header's {LAYERS} is cut off or no JSON"
    layers = said.get("layers") if isinstance(said, dict) else None
    if not isinstance(said, dict) or not isinstance(layers, dict):
        return {}, f"the header's {LAYERS} has no table of layers"
    unknown = next((key for key in said if key not in TOLD), None)
    if unknown is not None:
        return {}, f"the header's {LAYERS} says {str(unknown)[:60]!r} of all layers, which is not understood"
    if said.get("format_version") not in VERSIONS:
        return {}, f"the header's {LAYERS} has the unknown version {str(said.get('format_version'))[:40]}"
    return {str(name): entry for name, entry in layers.items()}, ""


def _once(pairs: list[tuple[str, object]]) -> dict:
    """A JSON table; a key that stands in it twice with two values has none that could be read."""
    found: dict = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            value = TWICE
        found[key] = value
    return found


def _entry(roles: Mapping[str, TensorAt], from_header: list) -> dict:
    """What markers say of one layer; {"unreadable": why} where one cannot be understood or two disagree."""
    found = list(from_header)
    for role in MARKERS:
        if role not in roles or is_far(roles[role].file):
            continue
        try:
            found.append(small_tensors.said(roles[role]))
        except ValueError:
            return {"unreadable": f"{role} is no JSON"}
    flat = []
    for said in found:
        if isinstance(said, str):
            said = {"format": said}
        if not isinstance(said, dict):
            return {"unreadable": f"its marker is {type(said).__name__} instead of a table"}
        params = said.get("params")
        said = {**(params if isinstance(params, dict) else {}), **{k: v for k, v in said.items() if k != "params"}}
        if not isinstance(said.get("format"), str) or not said["format"]:
            return {"unreadable": "its marker names no format"}
        flat.append({key: value for key, value in said.items() if value is not None})
    if any(one != flat[0] for one in flat[1:]):
        return {"unreadable": "its markers disagree"}
    return flat[0] if flat else {}


def _config(metadata: Mapping[str, str], settings: Mapping | None) -> tuple[Mapping, str]:
    """(quantization_config of the header or of a config.json, why it cannot be understood)."""
    text, beside = metadata.get(CONFIG), (settings or {}).get(CONFIG)
    if text is not None:
        try:
            said = parse_json(text)
        except ValueError:
            return {}, f"the header's {CONFIG} is no JSON"
        if not isinstance(said, dict):
            return {}, f"the header's {CONFIG} is no table"
        return said, ""
    if beside is not None and not isinstance(beside, dict):
        return {}, f"config.json's {CONFIG} is no table"
    return beside or {}, ""


def _method(config: Mapping) -> str:
    for key in ("quant_method", "method", "quant_type"):
        if isinstance(config.get(key), str):
            return config[key].lower()
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return "unknown" if config else ""


def _torchao(metadata: Mapping[str, str], index: Modules) -> dict[str, dict]:
    """module -> what torchao's header says of its weight, for weights that are no plain tensors."""
    found: dict[str, dict] = {}
    for name, text in metadata.items():
        if not name.endswith(".weight") or '"_type"' not in text:
            continue
        try:
            said = parse_json(text)
        except ValueError:
            said = {"_type": "unreadable"}
        if isinstance(said, dict) and said.get("_type") not in ("Tensor", "torch.Tensor"):
            for module in index.meant(name.removesuffix(".weight")):
                found[module] = said
    return found


def _covering(name: str, scaled: Mapping[str, TensorAt], weighted: set[str]) -> str | None:
    """The dtype of the `scaled_fp8` marker under whose prefix `name` lies; one under a prefix without weights covers
    all."""
    for prefix, at in scaled.items():
        if name.startswith(prefix) or not any(other.startswith(prefix) for other in weighted):
            return at.dtype
    return None
