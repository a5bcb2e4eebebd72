"""What a folder or a file is: a model and its parts (`identify_model`, `identify_files`), or a LoRA (`identify_lora`).

Headers alone are read. What cannot be told is said (`Trouble("not_recognised")`), never guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from backend.catalog.header import read_header
from backend.catalog.lora_kind import PICKLES, identify_lora, is_adapter
from backend.catalog.parts import Found, find_parts, read_json
from backend.catalog.spec import ModelSpec, TensorAt
from backend.schema.messages import Trouble

__all__ = ["identify_files", "identify_lora", "identify_model"]

SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$")
WEIGHTS = (".safetensors", ".gguf")
VARIANTS = ("", ".bf16", ".fp16", ".fp32", ".non_ema")  # of a file's name, the plain one first

STRANGERS = (  # what else there is, by a name that only it has
    (r"(?:^|\.)(?:control_model|controlnet_\w+|control_layers)\.", "a ControlNet"),
    (r"(?:^|\.)qweight$", "stored as SVDQuant (nunchaku) or GPTQ"),
    (r"(?:^|\.)distilled_guidance_layer\.", "Chroma"),
    (r"(?:^|\.)individual_token_refiner\.", "HunyuanVideo"),
    (r"(?:^|\.)input_blocks\.0\.0\.weight$", "a Stable Diffusion checkpoint in its original layout"),
    (r"(?:^|\.)emb_params$|^string_to_param\.", "a textual inversion"),
)
PathLike = str | os.PathLike


@dataclass(frozen=True)
class Heap:
    """Files that belong together (one file, or all shards of one network) and everything they hold."""

    files: tuple[Path, ...]
    folder: Path
    tensors: dict[str, TensorAt]
    metadata: dict[str, str]


def identify_model(path: PathLike | Sequence[PathLike], families: Iterable[ModuleType]) -> ModelSpec:
    """The model in a folder, a file or a list of files. Troubles: "not_recognised", "damaged", "missing_file"."""
    if isinstance(path, list | tuple):
        return identify_files(path, families)
    path = Path(path)
    if not path.exists():
        raise Trouble("missing_file", f"There is no file or folder {path}.", hint="Check the path.")
    if path.is_file():
        return identify_files([path], families)
    components = {part.folder for family in families for part in family.PARTS.values()}
    if any((path / name).is_dir() for name in components):
        return _pipeline_folder(path, tuple(families))
    if (path / "config.json").is_file():
        return _model([_heap(_component_files(path))], tuple(families), path)
    files = sorted(found for found in _walk(path) if found.suffix in WEIGHTS)
    if not files:
        raise Trouble("not_recognised", f"{path} holds no model: no safetensors and no GGUF file in it.")
    return _model([_heap(group) for group in _groups(files)], tuple(families), path)


def identify_files(paths: Iterable[PathLike | Sequence[PathLike]], families: Iterable[ModuleType]) -> ModelSpec:
    """The model whose parts lie in `paths` (each a file, a component's folder, or a list of shards); any subset of parts."""
    heaps = []
    for path in paths:
        if isinstance(path, list | tuple):
            heaps.append(_heap(tuple(Path(shard) for shard in path)))
        elif Path(path).is_dir():
            heaps.append(_heap(_component_files(Path(path))))
        elif Path(path).name.endswith(".index.json"):
            heaps.append(_heap(_indexed(Path(path))))
        else:
            heaps.extend(_heap(group) for group in _groups([Path(path)]))
    merged = _merged(heaps)
    first = merged[0].files[0] if merged else None
    if len(merged) > 1:
        merged = _as_one(merged, tuple(families))
    return _model(merged, tuple(families), first if len(heaps) == 1 else None)


def _merged(heaps: list[Heap]) -> list[Heap]:
    """Shards that were named one by one become one heap again."""
    groups: dict[tuple, list[Heap]] = {}
    for heap in heaps:
        match = SHARD.match(heap.files[0].stem) if len(heap.files) == 1 else None
        key = (heap.folder, match["stem"]) if match else heap.files
        groups.setdefault(key, []).append(heap)
    return [
        group[0] if len(group) == 1 else _heap(tuple(sorted(f for heap in group for f in heap.files)))
        for group in groups.values()
    ]


def _as_one(heaps: list[Heap], families: tuple[ModuleType, ...]) -> list[Heap]:
    """Files of which one alone is nothing are pieces of one model if they are named alike and no name is in two of them."""
    pieces = [heap for heap in heaps if not _is_whole(heap, families)]
    names = [name for heap in heaps for name in heap.tensors]
    beginnings = [{name.partition(".")[0] for name in heap.tensors} for heap in heaps]
    alike = all(any(one & other for other in beginnings if other is not one) for one in beginnings)
    if not pieces or not alike or len(set(names)) < len(names):
        return heaps
    return [_heap(tuple(file for heap in heaps for file in heap.files))]


def _is_whole(heap: Heap, families: tuple[ModuleType, ...]) -> bool:
    try:
        return bool(_parts_of(heap, families))
    except Trouble:
        return False


def _walk(folder: Path) -> Iterable[Path]:
    for found in folder.iterdir():
        if found.is_dir():
            yield from (inner for inner in found.iterdir() if inner.is_file())
        elif found.is_file():
            yield found


def _pipeline_folder(path: Path, families: tuple[ModuleType, ...]) -> ModelSpec:
    said = read_json(path / "model_index.json") or {}
    folders = sorted({part.folder for family in families for part in family.PARTS.values()})
    heaps = [_heap(_component_files(path / name)) for name in folders if (path / name).is_dir()]
    pieces = [(heap, find_parts(heap.tensors, heap.metadata, families, folder=heap.folder)) for heap in heaps]
    evidence = [f"model_index.json says {said['_class_name']}"] if isinstance(said.get("_class_name"), str) else []
    unknown = [heap for heap, found in pieces if not found]
    if len(unknown) == len(pieces) or any(heap.folder.name in ("transformer", "unet") for heap in unknown):
        raise _stranger(unknown[0])
    evidence += [f"{heap.folder.name}: of no known kind, left alone" for heap in unknown]
    return _assembled([piece for piece in pieces if piece[1]], families, path, tuple(evidence))


def _component_files(folder: Path) -> tuple[Path, ...]:
    """The weight files of one component's folder: by its index, else all shards, else the one file (the plainest variant)."""
    indexes = sorted(folder.glob("*.safetensors.index.json"), key=lambda found: len(found.name))
    indexes = indexes or sorted(folder.glob("*.bin.index.json"), key=lambda found: len(found.name))
    if indexes:
        return _indexed(indexes[0])
    inside = sorted(found for found in folder.iterdir() if found.is_file())
    files = [found for found in inside if found.suffix in WEIGHTS] or [
        found for found in inside if found.suffix in PICKLES
    ]
    if not files:
        raise Trouble(
            "missing_file", f"{folder} holds no weights: no safetensors file in it.", hint="Download it again."
        )
    groups = list(_groups(files))
    return min(groups, key=lambda group: (_variant(group[0]), len(group[0].name)))


def _variant(path: Path) -> int:
    stem = SHARD.match(path.stem)
    name = stem["stem"] if stem else path.stem
    return next((rank for rank, variant in enumerate(VARIANTS) if variant and name.endswith(variant)), 0)


def _indexed(index: Path) -> tuple[Path, ...]:
    """The shards that an index names; one that is missing is named."""
    said = read_json(index)
    if said is None:
        raise Trouble("missing_file", f"There is no file {index}.", hint="Check the path.")
    weights = said.get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise Trouble("damaged", f"{index.name} has no usable weight_map.", hint="Download it again.")
    names = sorted(set(weights.values()))
    if any(Path(name).name != name for name in names):
        raise Trouble("damaged", f"{index.name} names files outside its folder.", hint="Download it again.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise Trouble(
            "missing_file",
            f"{index.parent.name} lacks {len(missing)} of {len(names)} files: {missing[0]} for one.",
            hint="Download the missing files.",
            detail="\n".join(missing),
        )
    return tuple(index.parent / name for name in names)


def _groups(files: list[Path]) -> Iterable[tuple[Path, ...]]:
    """Single files, and for every shard all shards of its set; a missing one is named."""
    done = set()
    for path in files:
        match = SHARD.match(path.stem)
        if not match:
            yield (path,)
            continue
        if (path.parent, match["stem"]) in done:
            continue
        done.add((path.parent, match["stem"]))
        count = int(match["count"])
        if not 0 < count <= 10_000:
            raise Trouble("damaged", f"{path.name} says it is one of {count}.", hint="Check the file's name.")
        shards = [
            path.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}{path.suffix}")
            for number in range(1, count + 1)
        ]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise Trouble(
                "missing_file",
                f"{path.parent} lacks {len(missing)} of {count} files of {match['stem']}: {missing[0]} for one.",
                hint="Download the missing files.",
                detail="\n".join(missing),
            )
        yield tuple(shards)


def _heap(files: Sequence[Path]) -> Heap:
    tensors, metadata = {}, {}
    for path in files:
        header = read_header(path)
        tensors.update(header.tensors)
        metadata.update(header.metadata)
    return Heap(tuple(files), files[0].parent, tensors, metadata)


def _parts_of(heap: Heap, families: tuple[ModuleType, ...]) -> list[Found]:
    return find_parts(heap.tensors, heap.metadata, families, folder=heap.folder)


def _find(heap: Heap, families: tuple[ModuleType, ...]) -> list[Found]:
    found = _parts_of(heap, families)
    if not found:
        raise _stranger(heap)
    return found


def _stranger(heap: Heap) -> Trouble:
    name = heap.files[0].name
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


def _model(heaps: list[Heap], families: tuple[ModuleType, ...], path: Path | None) -> ModelSpec:
    return _assembled([(heap, _find(heap, families)) for heap in heaps], families, path, ())


def _assembled(
    pieces: list[tuple[Heap, list[Found]]],
    families: tuple[ModuleType, ...],
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
    missing = tuple(name for name, part in family.PARTS.items() if part.needed and name not in chosen)
    leading = chosen.get("dit") or next(iter(chosen.values()))
    folder = path if path is not None and path.is_dir() else None
    tokenizer = folder / "tokenizer" if folder and (folder / "tokenizer").is_dir() else None
    scheduler = read_json(folder / "scheduler" / "scheduler_config.json") if folder else None
    return ModelSpec(
        family=family.NAME,
        title=leading.signature.title or family.TITLE,
        variant=leading.signature.variant,
        parts={name: found.spec for name, found in chosen.items()},
        path=path,
        missing=missing,
        evidence=tuple(notes),
        tokenizer=tokenizer,
        scheduler=scheduler or dict(getattr(family, "SCHEDULER", {})),
    )


def _family_of(found: list[Found]) -> ModuleType:
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
