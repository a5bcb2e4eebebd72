"""What a folder or a file is: a model and its parts (`identify_model`, `identify_files`), or a LoRA (`identify_lora`).

Headers alone are read. What cannot be told is said (`Trouble("not_recognised")`), never guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from backend.catalog.family import Family
from backend.catalog.json_files import read_json
from backend.catalog.lora.identify import identify_lora, is_adapter
from backend.catalog.models import model_folder
from backend.catalog.models.checkpoint_files import (
    WEIGHTS,
    Heap,
    component_files,
    groups,
    heap_of,
    indexed,
    merged,
    walk,
)
from backend.catalog.models.match_parts import Found, find_parts
from backend.catalog.quantization import understood
from backend.catalog.spec import ModelSpec, PartSpec
from backend.schema.messages import Trouble
from backend.schema.untrusted import exists, is_file, is_folder

__all__ = ["identify_files", "identify_lora", "identify_model"]

STRANGERS = (  # what else there is, by a name that only it has
    (r"(?:^|\.)(?:control_model|controlnet_\w+|control_layers)\.", "a ControlNet"),
    (r"(?:^|\.)distilled_guidance_layer\.", "Chroma"),
    (r"(?:^|\.)individual_token_refiner\.", "HunyuanVideo"),
    (r"(?:^|\.)input_blocks\.0\.0\.weight$", "a Stable Diffusion checkpoint in its original layout"),
    (r"(?:^|\.)emb_params$|^string_to_param\.", "a textual inversion"),
)
PathLike = str | os.PathLike


def identify_model(path: PathLike | Sequence[PathLike], families: Iterable[Family]) -> ModelSpec:
    """The model in a folder, a file or a list of files. Troubles: "not_recognised", "damaged", "missing_file"."""
    if not isinstance(path, str | os.PathLike):
        return identify_files(path, families)
    path = Path(path)
    if not exists(path):
        raise Trouble("missing_file", f"There is no file or folder {path}.", hint="Check the path.")
    if is_file(path):
        return identify_files([path], families)
    components = {part.folder for family in families for part in family.PARTS.values()}
    if any(is_folder(path / name) for name in components):
        return _pipeline_folder(path, tuple(families))
    if is_file(path / "config.json"):
        return _model([heap_of(component_files(path))], tuple(families), path)
    files = sorted(found for found in walk(path) if found.suffix in WEIGHTS)
    if not files:
        raise Trouble("not_recognised", f"{path} holds no model: no safetensors and no GGUF file in it.")
    return _model([heap_of(group) for group in groups(files)], tuple(families), path)


def identify_files(paths: Iterable[PathLike | Sequence[PathLike]], families: Iterable[Family]) -> ModelSpec:
    """The model whose parts lie in `paths` (each a file, a component's folder, or a list of shards); any subset of
    parts."""
    heaps = []
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            heaps.append(heap_of(tuple(Path(shard) for shard in path)))
        elif is_folder(Path(path)):
            heaps.append(heap_of(component_files(Path(path))))
        elif Path(path).name.endswith(".index.json"):
            heaps.append(heap_of(indexed(Path(path))))
        else:
            heaps.extend(heap_of(group) for group in groups([Path(path)]))
    whole = merged(heaps)
    first = whole[0].files[0] if whole else None
    if len(whole) > 1:
        whole = _as_one(whole, tuple(families))
    return _model(whole, tuple(families), first if len(heaps) == 1 else None)


def _as_one(heaps: list[Heap], families: tuple[Family, ...]) -> list[Heap]:
    """Files of which one alone is nothing are pieces of one model if they are named alike and no name is in two of
    them."""
    pieces = [heap for heap in heaps if not _is_whole(heap, families)]
    names = [name for heap in heaps for name in heap.tensors]
    beginnings = [{name.partition(".")[0] for name in heap.tensors} for heap in heaps]
    alike = all(any(one & other for other in beginnings if other is not one) for one in beginnings)
    if not pieces or not alike or len(set(names)) < len(names):
        return heaps
    return [heap_of(tuple(file for heap in heaps for file in heap.files))]


def _is_whole(heap: Heap, families: tuple[Family, ...]) -> bool:
    try:
        return bool(_parts_of(heap, families))
    except Trouble:
        return False


def _pipeline_folder(path: Path, families: tuple[Family, ...]) -> ModelSpec:
    said = read_json(path / "model_index.json") or {}
    folders = sorted({part.folder for family in families for part in family.PARTS.values()})
    heaps = [heap_of(component_files(path / name)) for name in folders if is_folder(path / name)]
    pieces = [(heap, find_parts(heap.tensors, heap.metadata, families, folder=heap.folder)) for heap in heaps]
    evidence = [f"model_index.json says {said['_class_name']}"] if isinstance(said.get("_class_name"), str) else []
    unknown = [heap for heap, found in pieces if not found]
    if len(unknown) == len(pieces) or any(heap.folder.name in ("transformer", "unet") for heap in unknown):
        raise _stranger(unknown[0])
    evidence += [f"{heap.folder.name}: of no known kind, left alone" for heap in unknown]
    return _assembled([piece for piece in pieces if piece[1]], families, path, tuple(evidence))


def _parts_of(heap: Heap, families: tuple[Family, ...]) -> list[Found]:
    return find_parts(heap.tensors, heap.metadata, families, folder=heap.folder)


def _find(heap: Heap, families: tuple[Family, ...]) -> list[Found]:
    found = _parts_of(heap, families)
    if not found:
        raise _stranger(heap)
    return found


def _stranger(heap: Heap) -> Trouble:
    name = heap.files[0].name
    refused = understood(heap.tensors, heap.metadata, model_folder.read_object(heap.folder / "config.json")).refused
    if refused:
        return next(iter(refused.values()))
    if is_adapter(heap.tensors):
        return Trouble("not_recognised", f"{name} is a LoRA, not a model.", hint="Put it among the LoRA files.")
    for pattern, what in STRANGERS:
        if any(re.search(pattern, key) for key in heap.tensors):
            return Trouble(
                "not_recognised",
                f"{name} is {what}, which is not read.",
                hint="Take the model in the diffusers layout, if there is one.",
            )
    first = ", ".join(list(heap.tensors)[:3]) or "nothing"
    return Trouble(
        "not_recognised",
        f"{name} is no model that is known here; it begins with {first[:200]}.",
        hint="Is it complete, and of a supported family?",
        detail="\n".join(list(heap.tensors)[:200]),
    )


def _model(heaps: list[Heap], families: tuple[Family, ...], path: Path | None) -> ModelSpec:
    return _assembled([(heap, _find(heap, families)) for heap in heaps], families, path, ())


def _assembled(
    pieces: list[tuple[Heap, list[Found]]],
    families: tuple[Family, ...],
    path: Path | None,
    evidence: tuple[str, ...],
) -> ModelSpec:
    """One family for all parts: the one of the denoiser, else the first that knows them all best."""
    everything = [found for _, piece in pieces for found in piece]
    family = _family_of(everything)
    chosen: dict[str, Found] = {}
    notes = list(evidence)
    for heap, piece in pieces:
        for found in piece:
            if found.family is not family:
                continue
            name = found.spec.name
            if name in chosen:
                names = f"{chosen[name].spec.files[0].name} and {found.spec.files[0].name}"
                raise Trouble("not_recognised", f"Two files hold the {name}: {names}.", hint="Name only one of them.")
            chosen[name] = found
            notes.append(_why(found, heap))
    variant, title, by = _variant_of(chosen, family, path)
    notes += [by] if by else []
    leading = chosen.get("dit") or next(iter(chosen.values()))
    parts = {name: found.spec for name, found in chosen.items()}
    if variant is not None:
        parts["dit"] = _as_variant(parts["dit"], variant, family)
        parts = fitting(parts, variant, family)
    folder = path if path is not None and is_folder(path) else None
    scheduler = read_json(folder / "scheduler" / "scheduler_config.json") if folder else None
    return ModelSpec(
        family=family.NAME,
        title=title or leading.signature.title or family.TITLE,
        variant=variant or leading.signature.variant,
        parts=parts,
        path=path,
        missing=missing_of(parts, variant, family),
        evidence=tuple(notes),
        tokenizers=model_folder.tokenizers_in(folder, family),
        processor=model_folder.processor_in(folder),
        scheduler=scheduler or dict(family.SCHEDULER),
    )


def fitting(parts: dict[str, PartSpec], variant: str, family: Family) -> dict[str, PartSpec]:
    """Of `parts`, those that `variant` has; what else lies in the files stays there."""
    return {name: part for name, part in parts.items() if family.PARTS[name].of_variant(variant)}


def missing_of(parts: Iterable[str], variant: str | None, family: Family) -> tuple[str, ...]:
    """Parts without which `variant` (None: it cannot be told) makes no picture."""
    return tuple(
        name
        for name, part in family.PARTS.items()
        if part.needed and part.of_variant(variant or "") and name not in parts
    )


def _variant_of(chosen: dict[str, Found], family: Family, path: Path | None) -> tuple[str | None, str, str]:
    """(variant, its title, by what) of the denoiser: by its tensors, or by what lies beside it and how it is called;
    None without one."""
    if "dit" not in chosen:
        return None, "", ""
    found = chosen["dit"]
    root = path if path is not None and is_folder(path) else found.spec.files[0].parent.parent
    said = model_folder.read_object(root / "model_index.json").get("_class_name", "")
    told = family.tell_variant(found.signature.variant, str(said), found.spec.config, found.spec.files[0])
    return told or (found.signature.variant, found.signature.title, "")


def _as_variant(part: PartSpec, variant: str, family: Family) -> PartSpec:
    """`part` with the settings of its class that `variant` has, and its tensors do not show."""
    return replace(part, config={**part.config, **family.VARIANT_CONFIG.get(variant, {})})


def _family_of(found: list[Found]) -> Family:
    denoisers = [one.family for one in found if one.spec.name == "dit"]
    if denoisers:
        return denoisers[0]
    counts: dict[str, int] = {}
    for one in found:
        counts[one.family.NAME] = counts.get(one.family.NAME, 0) + 1
    return max((one.family for one in found), key=lambda family: counts[family.NAME])


def _why(found: Found, heap: Heap) -> str:
    prefix = f" under {found.prefix}" if found.prefix else ""
    scaled = f", {len(found.spec.scales)} weights are 8-bit codes times a factor" if found.spec.scales else ""
    seen = found.signature.must[0].replace("{}", "0")
    return f"{heap.files[0].name}: {found.spec.name} by {seen}{prefix}{scaled}"
