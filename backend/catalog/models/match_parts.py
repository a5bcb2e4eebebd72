"""From a heap of stored tensors to the parts of models in it: prefix, family, variant, own names, sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from backend.catalog.family import Family, NameMap, Part, Signature
from backend.catalog.formats.duplicate_tensors import check_parts, check_same
from backend.catalog.json_files import read_json
from backend.catalog.key_prefixes import WORDS
from backend.catalog.lora.keys import group
from backend.catalog.quantization import Stored, check_complete, understood
from backend.catalog.quantization.evidence import CONFIG
from backend.catalog.spec import PartSpec, TensorAt
from backend.catalog.state_dict_keys import own_tensors
from backend.schema.messages import Trouble

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "I8": "int8",
    "U8": "uint8",
}
ADAPTER_WORDS = (".lora", "lora_", ".hada_", ".lokr_", ".oft_", ".diff")  # of names, to look closer at
CHANGES = (
    ("down", "up"),
    ("hada_w1_a", "hada_w2_a"),
    ("lokr_w1",),
    ("lokr_w1_a", "lokr_w1_b"),
    ("oft",),
    ("diff",),
)  # whole ones
DEPTH = "num_hidden_layers"  # of a language model
NOT_A_PART = ("control", "model_ema", "lora")  # beginnings under which the names of a part mean something else


@dataclass(frozen=True)
class Found:
    """A part in a heap: which, by what, and its tensors under its own names."""

    family: Family
    signature: Signature
    prefix: str
    spec: PartSpec


def find_parts(
    tensors: Mapping[str, TensorAt],
    metadata: Mapping[str, str],
    families: Iterable[Family],
    *,
    folder: Path | None = None,
    only: str | None = None,
) -> list[Found]:
    """Every part that `tensors` (as stored) hold, one entry a (family, part); the most particular variant wins.

    `only`: that part alone.

    `folder` may hold a config.json with the sizes; without one they are taken from the shapes.
    """
    found = []
    stored = understood(tensors, metadata, _settings(folder))
    for family in families:
        for name, part in family.PARTS.items():
            if only not in (None, name):
                continue
            match = _best_match(stored.tensors, family, name)
            if match:
                signature, prefix = match
                spec = _part_spec(stored, family, part, signature, prefix, folder)
                found.append(Found(family, signature, prefix, spec))
    if found and only is None:
        _check_no_adapter(tensors)
        check_parts(tensors, [(*one.spec.tensors.values(), *one.spec.scales.values()) for one in found])
    return found


def _check_no_adapter(tensors: Mapping[str, TensorAt]) -> None:
    """Raises Trouble for a model with a LoRA's tensors among its own: without them it is not the model that was
    saved."""
    suspects = {key for key in tensors if any(word in key for word in ADAPTER_WORDS)}
    for roles in group(suspects)[0].values():
        if any(all(role in roles for role in change) for change in CHANGES):
            key = next(iter(roles.values()))
            raise Trouble(
                "not_supported",
                (
                    f"{tensors[key].file.name} holds a model and a LoRA beside its weights ({key[:160]}), which would "
                    "be left out."
                ),
                hint="Take the model and the LoRA as two files.",
            )


def is_like(tensors: Mapping, family: Family, part: str) -> bool:
    """Whether tensors under a part's own names (anything with a shape) can be that part of `family`."""
    return any(sign.part == part and not sign.dialect and _fits(tensors, sign, "") for sign in family.SIGNATURES)


def _best_match(tensors: Mapping[str, TensorAt], family: Family, part: str) -> tuple[Signature, str] | None:
    best, best_score = None, -1
    for signature in family.SIGNATURES:
        if signature.part != part:
            continue
        score = len(signature.must) + len(signature.must_not) + len(signature.shapes)
        if score <= best_score:
            continue
        fitting = [
            prefix
            for prefix in _prefixes(tensors, signature.must[0].replace("{}", "0"))
            if _fits(tensors, signature, prefix)
        ]
        if fitting:
            best, best_score = (signature, _only(fitting, signature.must[0].replace("{}", "0"), tensors, part)), score
    return best


def _only(prefixes: list[str], name: str, tensors: Mapping[str, TensorAt], part: str) -> str:
    """The prefix that is meant, of a denoiser: a usual one, else the only one ("student." beside "teacher." says
    nothing)."""
    if part != "dit" or len(prefixes) == 1:
        return prefixes[0]
    usual = next((prefix for prefix in prefixes if WORDS.issuperset(prefix.split(".")[:-1])), None)
    if usual is None:
        check_same(tensors[prefixes[0] + name], tensors[prefixes[1] + name])
    return prefixes[0] if usual is None else usual


def _prefixes(tensors: Mapping[str, TensorAt], name: str) -> list[str]:
    """What stands before `name` in the stored names, shortest first."""
    ending = "." + name
    prefixes = [key[: -len(name)] for key in tensors if key == name or key.endswith(ending)]
    return sorted((prefix for prefix in prefixes if not prefix.startswith(NOT_A_PART)), key=len)


def _fits(tensors: Mapping[str, TensorAt], signature: Signature, prefix: str) -> bool:
    def at(name: str) -> TensorAt | None:
        return tensors.get(prefix + name.replace("{}", "0"))

    missing = any(at(name) is None for name in signature.must)
    if missing or any(at(name) is not None for name in signature.must_not):
        return False
    return all(_measures(at(name), shape) for name, shape in signature.shapes.items())


def _measures(at: TensorAt | None, shape: tuple[int | None, ...]) -> bool:
    if at is None or len(at.shape) != len(shape):
        return False
    return all(want in (None, have) for want, have in zip(shape, at.shape, strict=True))


def _settings(folder: Path | None) -> dict | None:
    """The config.json beside the files; one that cannot be read is told by `_config`, where it is needed."""
    try:
        return read_json(folder / "config.json") if folder else None
    except Trouble:
        return None


def _part_spec(
    stored: Stored,
    family: Family,
    part: Part,
    signature: Signature,
    prefix: str,
    folder: Path | None,
) -> PartSpec:
    cut = {key[len(prefix) :]: at for key, at in stored.tensors.items() if key.startswith(prefix)}
    strays = (*part.unused, *NOT_A_PART)
    cut = {name: at for name, at in cut.items() if not name.startswith(strays) and ".lora_" not in name}
    if not prefix:
        cut = {name: at for name, at in cut.items() if not _of_another_part(name, family, signature.part)}
    for name in cut:
        if prefix + name in stored.refused:
            raise stored.refused[prefix + name]
    weights, scales = cut, {name: stored.scales[prefix + name] for name in cut if prefix + name in stored.scales}
    check_complete(weights, scales)
    if signature.dialect:
        dialect = next(
            found for found in family.NAME_MAPS if found.dialect == signature.dialect and found.part == signature.part
        )
        weights, scales = _renamed(weights, scales, _complete(dialect, weights, family))
    config = _config(family, part, signature.part, weights, folder)
    if part.taps:
        config, weights = _below_taps(part, config, weights)
        scales = {name: at for name, at in scales.items() if name in weights}
    return PartSpec(
        name=signature.part,
        network=part.network,
        config=config,
        tensors=weights,
        scales=scales,
        storage=storage_of(weights.values()),
        folder=folder,
    )


def _below_taps(part: Part, config: dict, weights: dict[str, TensorAt]) -> tuple[dict, dict[str, TensorAt]]:
    """An encoder's configuration and tensors without the blocks above the last layer that is used."""
    beginning = f"{part.blocks[0]}."
    numbers = {name: name.removeprefix(beginning).partition(".")[0] for name in weights if name.startswith(beginning)}
    depth = len(set(numbers.values()))
    kept = part.blocks_below_taps(depth)
    cut = {**config, DEPTH: kept}
    if isinstance(config.get("layer_types"), list):
        cut["layer_types"] = config["layer_types"][:kept]
    return cut, {name: at for name, at in weights.items() if name not in numbers or int(numbers[name]) < kept}


def _complete(dialect: NameMap, weights: dict, family: Family) -> NameMap:
    """`dialect` with the rules that depend on how many blocks there are before its own."""
    modules = {name.rpartition(".")[0] for name in own_tensors(weights, dialect)}
    rules = [rule for found in family.derived_maps(dialect.part, tuple(modules)) for rule in found.rules]
    return NameMap(dialect.dialect, dialect.part, (*rules, *dialect.rules))


def _renamed(weights: dict, scales: dict, dialect: NameMap) -> tuple[dict, dict]:
    """Weights and their scales under the part's own names; a factor a row is cut like its rows, a single one serves
    all."""
    own_weights, own_scales = {}, {}
    for name, at in weights.items():
        pieces = own_tensors({name: at}, dialect)
        own_weights.update(pieces)
        scale = scales.get(name)
        if scale is None:
            continue
        several = bool(scale.shape) and scale.shape[0] > 1
        cut: dict[str, TensorAt] = own_tensors({name: scale}, dialect) if several else {own: scale for own in pieces}
        for own, piece in cut.items() if several else ():
            if pieces[own].shape[0] * scale.shape[0] != piece.shape[0] * at.shape[0]:
                raise Trouble("not_supported", f"{at.file.name} keeps blocks of {name} that lie across its parts.")
        own_scales.update(cut)
    return own_weights, own_scales


def _of_another_part(name: str, family: Family, part: str) -> bool:
    """In an all-in-one file a part without a prefix must not take what lies under the others' prefixes."""
    return any(
        name.startswith(prefix)
        for other, described in family.PARTS.items()
        if other != part
        for prefix in described.prefixes
        if prefix.count(".") > 1 or prefix in ("vae.", "first_stage_model.")
    )


def storage_of(tensors: Iterable[TensorAt]) -> str:
    """The dtype of most bytes, in torch's spelling (or the file's own word for what torch has no word for)."""
    counted: Counter[str] = Counter()
    for at in tensors:
        counted[at.dtype] += at.nbytes
    most = counted.most_common(1)[0][0] if counted else "BF16"
    return TORCH_NAMES.get(most, most)


def _config(family: Family, part: Part, name: str, weights: dict[str, TensorAt], folder: Path | None) -> dict:
    said = read_json(folder / "config.json") if folder else None
    if said is not None and _belongs(said, part):
        inner = said.get(part.config_key) if part.config_key else None
        chosen = inner if isinstance(inner, dict) else said
        return {key: value for key, value in chosen.items() if not key.startswith("_") and key != CONFIG}
    shapes = {key: at.shape for key, at in weights.items()}
    try:
        derived = family.config_from_shapes(name, shapes)
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        where = next((at.file.name for at in weights.values()), "the file")
        raise Trouble(
            "damaged",
            f"{where} does not show the sizes of its {name.replace('_', ' ')}: {str(error)[:120]} is missing or odd.",
            hint="Is the file complete? A config.json beside it would tell the sizes.",
        ) from None
    return {**part.config, **derived}


def _belongs(config: dict, part: Part) -> bool:
    """Whether a config.json speaks of this part's class (a transformers one names no class of ours, only a model
    type)."""
    network = part.network.rpartition(":")[2]
    said = config.get("_class_name")
    if said is not None:
        return said == network
    return "architectures" in config or "model_type" in config
