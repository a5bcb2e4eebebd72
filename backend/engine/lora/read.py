"""Read a LoRA file against the loaded parts: every change it makes, unused keys and why. Nothing is applied here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from backend.catalog.family import Family
from backend.catalog.key_prefixes import unwrapped
from backend.catalog.lora.alpha import alpha_rules
from backend.catalog.lora.identify import families_of, named, outline_of
from backend.catalog.lora.keys import BUNDLED, group, is_adapter, plain
from backend.catalog.lora.metadata import table, trigger_words
from backend.catalog.lora.peft_config import METADATA, is_unclear
from backend.engine.loading.tensor_source import Source
from backend.engine.lora import fuse
from backend.engine.lora.algorithms.build import changes_of
from backend.engine.lora.algorithms.delta import Change
from backend.engine.lora.algorithms.module_tensors import Module
from backend.engine.lora.algorithms.scale import warnings
from backend.engine.lora.duplicate_modules import Claim, Claims, lend_alphas
from backend.engine.lora.module_index import Resolved, index_of, resolve
from backend.engine.quantization.layers import weight_shape
from backend.schema.messages import Trouble

MANY_NOTES = 8
SECOND = "transformer_2."


@dataclass
class ReadLora:
    """What a LoRA does to the parts that are loaded."""

    changes: dict[str, list[Change]] = field(default_factory=dict)
    num_applied: int = 0  # modules of the file that change something
    num_found: int = 0  # modules that the file speaks of
    dialect: str = ""
    unused: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_lora(
    source: Source,
    modules: Mapping[str, nn.Module],
    family: Family | None,
    families: Sequence[Family],
    *,
    weight_of: Callable[[str, str], torch.Tensor] | None = None,
    first: str | None = None,
) -> ReadLora:
    """Everything in `source` that `modules` (part -> module) have a place for.

    `weight_of(part, parameter)` gives base values, which DoRA needs. `first`: the part that names without a prefix
    belong to; no other part but a text encoder is then touched. Raises Trouble for whatever makes the file unusable as
    a whole.
    """
    grouped, others = group(source.shapes)
    _check_is_adapter(source, grouped, others)
    indexes = _indexes(modules, family, first)
    found = _of_one_expert({stem: resolve(stem, roles, indexes) for stem, roles in grouped.items()})
    grouped = lend_alphas(
        grouped, {stem: (p.part, p.slots) for stem, p in found.items() if not isinstance(p, str)}, source
    )
    wholes, others, resized = _whole_parameters(source, others, found, indexes, modules)
    grouped = {**grouped, **wholes}
    result = ReadLora(num_found=len(grouped))
    result.unused = {stem: reason for stem, reason in found.items() if isinstance(reason, str)}
    outline = outline_of(tuple(source.shapes), tuple(source.shapes.values()))
    result.dialect = outline.dialect
    _check_family(source, found, outline.widths, family, families)
    result.notes = _doubts(source, outline.widths, family, families)
    result.unused |= dict.fromkeys(resized, "is a whole weight for a model with other inputs")
    for key in others:
        embedding = key.startswith(BUNDLED)
        result.unused[key] = "is a textual inversion, which is not used here" if embedding else "is no adapter's tensor"
    try:
        _build(source, grouped, found, modules, weight_of, result)
    except Trouble as trouble:
        other = family is not None and _strangers(source, outline.widths, family, families)
        if trouble.kind == "shape_mismatch" and family is not None and other:
            raise _other_family(source, outline.widths, family, families, trouble.message) from None
        raise
    if not any(result.changes.values()):
        raise _nothing(source, result, family, families, outline.widths)
    return result


def _check_is_adapter(source: Source, grouped: Mapping, others: Sequence[str]) -> None:
    """Raises Trouble for what is no LoRA: nothing at all, a model, or one whose low-rank branches belong to its packed
    weights."""
    packed = next((key for key in others if key.endswith(".qweight")), None)
    if packed is None and grouped:
        return
    if packed is not None:
        what = f"it is a quantized model: {packed[:100]!r} lies beside its factors"
    else:
        what = f"its first tensor is {others[0][:100]!r}" if others else "it is empty"
    raise Trouble("no_keys_match", f"{source.name} is not a LoRA: {what}.", hint="Is it a model? Load it as one.")


def _indexes(modules: Mapping, family: Family | None, first: str | None) -> dict:
    parts = list(modules) if first is None else [first, *(p for p in modules if p != first and p.startswith("text_"))]
    return {part: index_of(modules[part], part, family) for part in parts}


def _whole_parameters(
    source: Source, others: list[str], found: dict[str, Resolved | str], indexes: Mapping, modules: Mapping
) -> tuple[dict[str, dict[str, str]], list[str], list[str]]:
    """({module: {role: key}} of tensors that are parameters of this model as a whole, the other keys, keys of inputs of
    another size). `found` gets the modules' places.

    Trainers save so what they trained beside their pairs (norms of FLUX.1's control LoRAs, `bias="all"` and
    `modules_to_save` of PEFT). Left out, the rest of the file would act without what it was trained with. A matrix that
    is as high as the model's and not as wide takes other inputs (Wan's patch embedding of another task) and stays out;
    anything else of another size makes the file unusable.
    """
    wholes, left, resized = {}, [], []
    for key in others:
        stem, _, leaf = unwrapped(key).rpartition(".")
        role = {"weight": "set_weight", "scale": "set_weight", "bias": "set_bias"}.get(leaf)
        for infix in (".base_layer", ".modules_to_save", ".original_module"):
            stem = stem.replace(infix, "")
        place = resolve(stem, (role,), indexes) if role and stem and not key.startswith(BUNDLED) else ""
        if isinstance(place, str) or "original_module" in key:
            left.append(key)
            continue
        own = _shape(modules[place.part], f"{place.slots[0].module}.weight") or ()
        size = source.shapes[key]
        if len(place.slots) == 1 and len(size) == len(own) > 1 and size[:1] == own[:1] and size != own:
            resized.append(key)
            continue
        name = f"{stem} ({leaf})"
        wholes[name] = {role: key}
        found[name] = place
    if wholes and not is_adapter(source.shapes):
        raise Trouble(
            "no_keys_match",
            f"{source.name} is not a LoRA: it holds {len(wholes)} whole weights of this model, more than adapters.",
            hint="Is it a model? Load it as one.",
        )
    return wholes, left, resized


def _of_one_expert(found: dict[str, Resolved | str]) -> dict[str, Resolved | str]:
    """A file for both of Wan 2.2's transformers must not put both changes on the one that is loaded: the first's are
    taken."""
    second = {stem for stem, place in found.items() if not isinstance(place, str) and SECOND in place.reading.prefix}
    if len(second) == sum(not isinstance(place, str) and place.part == "dit" for place in found.values()):
        return found
    return {stem: "belongs to the second transformer" if stem in second else place for stem, place in found.items()}


def _build(
    source: Source,
    grouped: Mapping[str, Mapping[str, str]],
    found: Mapping[str, Resolved | str],
    modules: Mapping[str, nn.Module],
    weight_of: Callable | None,
    result: ReadLora,
) -> None:
    names = {stem: _names(place) for stem, place in found.items() if not isinstance(place, str)}
    rules = alpha_rules(
        source.metadata,
        source.config,
        tensors_say=any("alpha" in roles for roles in grouped.values()),
        names=[name for some in names.values() for name in some],
        source=source.name,
    )
    claims = Claims(source.name)
    notes: list[str] = list(result.notes)
    ranks: set[int] = set()
    alphas: set[float] = set()
    for stem, roles in sorted(grouped.items(), key=lambda item: _extent(found[item[0]])):
        place = found[stem]
        if isinstance(place, str):
            continue
        if set(roles) == {"alpha"}:
            result.unused[plain(stem)] = "has an alpha and nothing else"
            continue
        part, whole = place.part, modules[place.part]
        module = Module(
            source=source,
            stem=stem,
            roles=roles,
            slots=place.slots,
            names=names[stem],
            component=part,
            rules=rules,
            shape_of=lambda name, whole=whole: _shape(whole, name),
            weight_of=lambda name, part=part, whole=whole: _base(source, whole, part, name, weight_of),
            notes=notes,
            unused=result.unused,
            ranks=ranks,
            alphas=alphas,
        )
        changes = changes_of(module)
        new = [change for change in changes if claims.is_new(f"{part}.{change.name}", _claim(module, change))]
        if new:
            result.changes.setdefault(part, []).extend(new)
            result.num_applied += 1
        elif changes:
            result.num_found -= 1
        elif plain(stem) not in result.unused:
            result.unused[plain(stem)] = f"has nothing that changes a weight ({', '.join(roles)})"
    notes += [note for note in (claims.note(), _of_config(source)) if note]
    notes += warnings(source, ranks, alphas)
    words = trigger_words(source.metadata, source.path)
    if words:
        notes.insert(0, f"trigger words: {', '.join(words)}")
    result.notes = tuple(notes[:MANY_NOTES]) + (
        (f"and {len(notes) - MANY_NOTES} more",) if len(notes) > MANY_NOTES else ()
    )


def _names(place: Resolved) -> tuple[str, ...]:
    """What rules for alpha may call a module: as the file has it, then, where it is one module here, by the model's own
    name."""
    own = (place.slots[0].module,) if len(place.slots) == 1 else ()
    return tuple(dict.fromkeys((place.reading.name, *own)))


def _extent(place: Resolved | str) -> float:
    """What is of whole parameters comes before what is of some of their rows, of which it may be a repetition."""
    if isinstance(place, str):
        return 0.0
    start, stop, whole = place.slots[0].place
    return -(stop - start) / whole


def _claim(module: Module, change: Change) -> Claim:
    place = next((s.place for s in module.slots if s.module == change.module), (0, 1, 1))
    factor = None if change.dora is None else change.dora.factor
    return Claim(module.stem, next(iter(module.roles.values())), place, change.body.dense, factor)


def _of_config(source: Source) -> str:
    """What is to be said of PEFT's configuration beside the file."""
    if source.path is not None and is_unclear(source.path):
        return "an adapter_config.json lies beside it, but also other LoRAs, so it is not used"
    if METADATA in source.metadata and not table(source.metadata, METADATA):
        return f"its {METADATA} cannot be read: what alpha it says is not known"
    return "settings from adapter_config.json beside it" if source.config else ""


def _base(source: Source, module: nn.Module, part: str, name: str, weight_of: Callable | None) -> torch.Tensor:
    """The values of a parameter before any LoRA, on the CPU."""
    if _shape(module, name) is None:
        raise Trouble(
            "shape_mismatch", f"{source.name} needs {name}, which this model has not.", hint="Nothing was changed."
        )
    return weight_of(part, name) if weight_of else fuse.parameter(module, name).detach().cpu()


def _shape(module: nn.Module, name: str) -> tuple[int, ...] | None:
    """The shape of a parameter, None where the module has none of that name."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf == "weight":
        return weight_shape(owner)
    tensor = owner._parameters.get(leaf)
    return None if tensor is None else tuple(tensor.shape)


def _check_family(source: Source, found: Mapping, widths: tuple, family: Family | None, families: Sequence) -> None:
    """A LoRA of another family may match a few names by chance; half of it applied is worse than an error."""
    strange = [stem for stem, place in found.items() if isinstance(place, str) and "no such module" in place]
    if family is None or len(strange) == len(found):
        return  # where nothing matches, that is said elsewhere
    doubtful = (
        strange or family.NAME in families_of(widths, {}, families)[1]
    )  # names that all match may be another's too
    if doubtful and _strangers(source, widths, family, families):
        raise _other_family(source, widths, family, families, "\n".join(strange[:200]))


def _strangers(source: Source, widths: tuple, family: Family | None, families: Sequence) -> tuple[str, ...]:
    """The families that a LoRA can be for if the model's is not among them; metadata decides where names leave a
    choice."""
    by_names = families_of(widths, {}, families)[1]
    possible = families_of(widths, source.metadata, families)[1] if by_names else ()
    return possible if family is not None and family.NAME not in possible else ()


def _other_family(source: Source, widths: tuple, family: Family, families: Sequence, detail: str) -> Trouble:
    return Trouble(
        "wrong_family",
        f"{source.name} is a LoRA for {_titles(_strangers(source, widths, family, families), families)}; "
        f"the model is {family.TITLE}.",
        hint="Choose a LoRA for this model; nothing was changed.",
        detail=detail,
    )


def _doubts(source: Source, widths: tuple, family: Family | None, families: Sequence) -> tuple[str, ...]:
    """A note where other models have the same module names and neither widths nor metadata tell which is meant."""
    possible = families_of(widths, source.metadata, families)[1]
    if family is None or len(possible) < 2 or family.NAME not in possible:
        return ()
    return (f"it could as well be for {_titles([name for name in possible if name != family.NAME], families)}",)


def _titles(names: Sequence[str], families: Sequence[Family]) -> str:
    return " or ".join(named(name, families) for name in names)


def _nothing(
    source: Source, result: ReadLora, family: Family | None, families: Sequence[Family], widths: tuple
) -> Trouble:
    model = family.TITLE if family else "this model"
    _, possible, _ = families_of(widths, source.metadata, families)
    reasons = sorted(set(result.unused.values()))
    sentence = f"{source.name} changes nothing in {model}: none of its {result.num_found} modules can be applied"
    if possible and (family is None or family.NAME not in possible):
        sentence = f"{source.name} is a LoRA for {_titles(possible, families)}; the model is {model}"
    elif len(reasons) == 1 and "no such module" not in reasons[0]:
        sentence += f" ({reasons[0]})"
    return Trouble(
        "no_keys_match",
        sentence + ".",
        hint="Choose a LoRA for this model; nothing was changed.",
        detail="\n".join(f"{key}: {why}" for key, why in list(result.unused.items())[:200]),
    )
