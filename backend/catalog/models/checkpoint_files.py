"""Files that belong together: which weight files a folder means, shards by their names or their index, and what they
hold in all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from backend.catalog.formats.duplicate_tensors import check_same
from backend.catalog.formats.read import read_header
from backend.catalog.json_files import read_json
from backend.catalog.lora.identify import PICKLES
from backend.catalog.quantization.evidence import together
from backend.catalog.spec import TensorAt
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file, is_folder

SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$")
WEIGHTS = (".safetensors", ".gguf")
VARIANTS = ("", ".bf16", ".fp16", ".fp32", ".non_ema")  # of a file's name, the plain one first


@dataclass(frozen=True)
class Heap:
    """Files that belong together (one file, or all shards of one network) and everything they hold."""

    files: tuple[Path, ...]
    folder: Path
    tensors: dict[str, TensorAt]
    metadata: dict[str, str]


def component_files(folder: Path) -> tuple[Path, ...]:
    """The weight files of one component's folder: by its index, else all shards, else the one file (the plainest
    variant)."""
    indexes = sorted(folder.glob("*.safetensors.index.json"), key=lambda found: len(found.name))
    indexes = indexes or sorted(folder.glob("*.bin.index.json"), key=lambda found: len(found.name))
    if indexes:
        return indexed(indexes[0])
    inside = sorted(found for found in folder.iterdir() if is_file(found))
    files = [found for found in inside if found.suffix in WEIGHTS] or [
        found for found in inside if found.suffix in PICKLES
    ]
    if not files:
        raise Trouble(
            "missing_file", f"{folder} holds no weights: no safetensors file in it.", hint="Download it again."
        )
    return min(groups(files), key=lambda group: (_variant(group[0]), len(group[0].name)))


def _variant(path: Path) -> int:
    stem = SHARD.match(path.stem)
    name = stem["stem"] if stem else path.stem
    return next((rank for rank, variant in enumerate(VARIANTS) if variant and name.endswith(variant)), 0)


def indexed(index: Path) -> tuple[Path, ...]:
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
    missing = [name for name in names if not is_file(index.parent / name)]
    if missing:
        raise Trouble(
            "missing_file",
            f"{index.parent.name} lacks {len(missing)} of {len(names)} files: {missing[0]} for one.",
            hint="Download the missing files.",
            detail="\n".join(missing),
        )
    return tuple(index.parent / name for name in names)


def groups(files: list[Path]) -> Iterable[tuple[Path, ...]]:
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
        missing = [shard.name for shard in shards if not is_file(shard)]
        if missing:
            raise Trouble(
                "missing_file",
                f"{path.parent} lacks {len(missing)} of {count} files of {match['stem']}: {missing[0]} for one.",
                hint="Download the missing files.",
                detail="\n".join(missing),
            )
        yield tuple(shards)


def heap_of(files: Sequence[Path]) -> Heap:
    """What `files` hold together.

    Raises Trouble("repeated") for a name that is in two of them with different values.
    """
    tensors, headers = {}, [read_header(path) for path in dict.fromkeys(files)]
    for header in headers:
        for name, at in header.tensors.items():
            if name in tensors:
                check_same(tensors[name], at)
            tensors.setdefault(name, at)
    return Heap(tuple(files), files[0].parent, tensors, together(header.metadata for header in headers))


def merged(heaps: list[Heap]) -> list[Heap]:
    """Shards that were named one by one become one heap again."""
    sets: dict[tuple, list[Heap]] = {}
    for heap in heaps:
        match = SHARD.match(heap.files[0].stem) if len(heap.files) == 1 else None
        key = (heap.folder, match["stem"]) if match else heap.files
        sets.setdefault(key, []).append(heap)
    return [
        group[0] if len(group) == 1 else heap_of(tuple(sorted(f for heap in group for f in heap.files)))
        for group in sets.values()
    ]


def walk(folder: Path) -> Iterable[Path]:
    for found in folder.iterdir():
        if is_folder(found):
            yield from (inner for inner in found.iterdir() if is_file(inner))
        elif is_file(found):
            yield found
