"""How many bytes the weights of a part are, whole and by block, in the dtypes that a plan may store them in. No torch.

Sizes come from a model's own headers, or, for a model that is not there yet, from what is published of it
(`assets/memory`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import weakref
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.catalog.quantization.methods import is_quantized
from backend.catalog.spec import ModelSpec, PartSpec
from backend.families import by_name
from backend.planner.costs import untraced_model
from backend.planner.costs.layout import DENOISERS
from backend.planner.costs.quantized_bytes import saved_bytes
from backend.schema.json_values import dicts
from backend.schema.memory_plan import DTYPE_BYTES
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS
from backend.schema.untrusted import is_folder, read_object_or_empty

MEMORY = ASSETS / "memory"

FILE_BYTES = 2  # of each number in a published model's files, which are taken to be bfloat16 throughout
NOTHING = untraced_model.Seen()
EMBEDDING = re.compile(
    r"(embed_tokens|shared|[a-z]+_embedding|embeddings?)\.weight$"
)  # tables of tokens, which are no linear layers


@dataclass(frozen=True)
class Numbers:
    """Parameters of a block: in matrices (what FP8 stores), in what stays in the computing dtype, in what stays
    float32."""

    matrix: int = 0
    rest: int = 0
    precise: int = 0

    def bytes(self, storage: str, computing: str) -> int:
        wide = DTYPE_BYTES[computing if storage.startswith("float8") else storage]
        return self.matrix * DTYPE_BYTES[storage] + self.rest * wide + self.precise * max(wide, 4)


@dataclass(frozen=True, eq=False)
class PartSizes:
    """One part: its blocks in the order in which they compute, and what lies around them."""

    name: str
    kind: str  # class of the network
    table: dict  # closed forms of its working memory, {} where none are known
    blocks: tuple[Numbers, ...]
    other: Numbers
    depths: dict[str, int] = field(default_factory=dict)  # module list -> number of blocks
    linears: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # kind of module -> (out, in, how many)
    file_bytes: int = 0  # as stored on disk
    outside: dict[str, tuple[int, int]] = field(default_factory=dict)  # linear layers around the blocks -> (out, in)
    in_file: tuple[int, ...] = ()  # bytes of each block on disk
    file_dtype: str = "bfloat16"  # what most of the file is in
    files: tuple[Path, ...] = ()
    seen: untraced_model.Seen = NOTHING  # of a network that no table knows, what its header tells

    @lru_cache(maxsize=4096)  # noqa: B019 (parts are few and live as long as their models are listed)
    def bytes(self, storage: str, computing: str) -> int:
        """All weights, blocks stored as `storage`.

        What lies around the blocks is never stored in FP8; rounding reaches all linear layers.
        """
        if is_quantized(storage):
            around = ((name, rows, columns, 1) for name, (rows, columns) in self.outside.items())
            layers = (*((name, *size) for name, size in self.linears.items()), *around)
            return self.bytes(computing, computing) - saved_bytes(storage, layers, DTYPE_BYTES[computing])
        return self.around(storage, computing) + sum(block.bytes(storage, computing) for block in self.blocks)

    def around(self, storage: str, computing: str) -> int:
        return self.other.bytes(computing if storage.startswith("float8") else storage, computing)

    @lru_cache(maxsize=4096)  # noqa: B019
    def resident_bytes(self, count: int, storage: str, computing: str) -> int:
        """Of `count` blocks, evenly spread as the engine keeps them."""
        return sum(self.blocks[index].bytes(storage, computing) for index in spread(len(self.blocks), count))

    @lru_cache(maxsize=4096)  # noqa: B019
    def largest_block(self, storage: str, computing: str) -> int:
        return max((block.bytes(storage, computing) for block in self.blocks), default=0)

    @lru_cache(maxsize=4096)  # noqa: B019
    def file_bytes_of(self, count: int, computing: str) -> int:
        """On disk, of those blocks that are fetched while `count` stay."""
        stay = set(spread(len(self.blocks), count))
        return sum(nbytes for index, nbytes in enumerate(self._in_file(computing)) if index not in stay)

    @lru_cache(maxsize=64)  # noqa: B019
    def largest_in_file(self, computing: str) -> int:
        """Bytes on disk of the largest block."""
        return max(self._in_file(computing), default=0)

    @lru_cache(maxsize=64)  # noqa: B019
    def _in_file(self, computing: str) -> tuple[int, ...]:
        return self.in_file or tuple(block.bytes(computing, computing) for block in self.blocks)

    @property
    def largest_matrix(self) -> int:
        """Numbers of the largest matrix of a block: what is cast at a time where blocks are stored in FP8."""
        return max((rows * columns for rows, columns, _ in self.linears.values()), default=0)

    @property
    @lru_cache(maxsize=256)  # noqa: B019
    def numel(self) -> int:
        return sum(one.matrix + one.rest + one.precise for one in (self.other, *self.blocks))


def spread(count: int, chosen: int) -> tuple[int, ...]:
    """`chosen` of the numbers below `count`, evenly spaced, as the engine keeps them: transfers then hide behind the
    blocks in between."""
    return tuple(index for index in range(count) if (index + 1) * chosen // count > index * chosen // count)


@dataclass(frozen=True)
class ModelSizes:
    """A model as the planner sees it."""

    family: str
    title: str
    parts: dict[str, PartSizes]
    geometry: dict  # compression, patch, video, frames_per_latent
    defaults: dict  # width, height, steps, ... of a first picture
    published: bool = False  # from what is published rather than from files
    estimating: tuple[str, ...] = ()  # parts whose working memory no table knows
    variant: str = ""
    tokenizers: dict[str, Path] = field(default_factory=dict)  # name -> folder, of those that the model has
    presumed: tuple[str, ...] = ()  # parts that were not read from files: as published
    absent: tuple[str, ...] = ()  # parts that are needed and of which nothing is known

    @property
    def file_bytes(self) -> int:
        return sum(part.file_bytes for part in self.parts.values())


def compute_dtypes(family: str) -> tuple[str, ...]:
    """The data types that networks of a family compute in without overflow, the best first: activations of some leave
    float16's range."""
    return by_name(family).COMPUTE_DTYPES


def fingerprint(kind: str, shapes: dict[str, tuple], blocks: tuple[str, ...], flags: tuple[str, ...] = ()) -> str:
    """A short word for networks alike in everything but depth.

    `shapes`: parameter name -> shape. Of the module lists `blocks` the first members alone count. `flags`: settings of
    the class that change what it computes and not what it stores.
    """
    kept = []
    for name, shape in shapes.items():
        home = next((block for block in blocks if name.startswith(f"{block}.")), None)
        if home is None or name.removeprefix(f"{home}.").partition(".")[0] == "0":
            kept.append([name, list(shape)])
    text = json.dumps([kind, sorted(kept), sorted(flags)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def published() -> dict:
    """Networks and models known by name: `assets/memory/published.json`."""
    return json.loads((MEMORY / "published.json").read_text(encoding="utf-8"))


def tables(folder: Path | None = None) -> dict[str, dict]:
    """Fingerprint -> sizes and closed forms: those that ship, then those that were traced here (in `folder`)."""
    changed = _changed(folder)
    return _tables(folder if changed else None, changed)


@lru_cache(maxsize=8)
def _tables(folder: Path | None, changed: int) -> dict[str, dict]:
    found: dict[str, dict] = {}
    for path in sorted(MEMORY.glob("*.json")) + (sorted(folder.glob("*.json")) if folder else []):
        # One that is half-written elsewhere is empty: the folder changes again when it is whole.
        for table in dicts(read_object_or_empty(path, most=2**28).get("tables"), most=10_000):
            if not isinstance(table.get("key"), str) or not isinstance(table.get("forms", {}), dict):
                continue
            found[table["key"]] = _merged(found.get(table["key"], {}), table)
    return found


def _merged(shipped: dict, traced: dict) -> dict:
    """A table with the forms of another of the same network besides."""
    if not shipped:
        return traced
    both = {**shipped, **{name: traced[name] for name in ("failed",) if name in traced}}
    both["forms"] = {**shipped["forms"], **traced.get("forms", {})}
    if "cpu" in shipped or "cpu" in traced:
        both["cpu"] = {**shipped.get("cpu", {}), **traced.get("cpu", {})}
    both["configs"] = [*shipped.get("configs", ()), *traced.get("configs", ())]
    return both


def sizes_of(model: ModelSpec | str, *, folder: Path | None = None) -> ModelSizes:
    """Sizes of a model: a spec (from its headers), or the name or id of a published one, such as "FLUX.1-dev".

    `folder`: tables traced on this machine. Raises Trouble("not_recognised") for an unknown name.
    """
    if not isinstance(model, ModelSpec):
        return _of_name(model, folder)
    kept, state = _KEPT.get(id(model)), (folder, _changed(folder))
    if kept is None or kept[0]() is not model or kept[1] != state:
        key = id(model)
        kept = _KEPT[key] = (weakref.ref(model, lambda _: _KEPT.pop(key, None)), state, _of_spec(model, folder))
    return kept[2]


def _changed(folder: Path | None) -> int:
    """When a table was added to `folder`, in nanoseconds; 0 without one."""
    try:
        return folder.stat().st_mtime_ns if folder is not None else 0
    except OSError:
        return 0


_KEPT: dict[int, tuple] = {}  # a spec's thousands of tensors are read once, not at every keystroke


def known_models() -> tuple[str, ...]:
    """Titles of the published models."""
    return tuple(
        variant["title"] for family in published()["families"].values() for variant in family["variants"].values()
    )


def _of_name(name: str, folder: Path | None) -> ModelSizes:
    wanted = name.strip().lower()
    _, slash, bare = wanted.partition("/")  # a copy under another owner is counted as what it is called
    spellings = {wanted, bare} if slash and "/" not in bare else {wanted}
    for family, facts in published()["families"].items():
        for key, variant in facts["variants"].items():
            ids = [key, variant["title"], *variant["ids"], *(one.partition("/")[2] for one in variant["ids"])]
            if not spellings.isdisjoint(one.lower() for one in ids):
                parts = {part: _published_part(family, part, said, folder) for part, said in variant["parts"].items()}
                geometry = variant.get("geometry", facts["geometry"])
                return ModelSizes(
                    family,
                    variant["title"],
                    parts,
                    geometry,
                    variant["defaults"],
                    published=True,
                    variant=variant.get("variant", ""),
                )
    close = nearest_models(name)
    nearest = f"Nearest are {', '.join(close)}. " if close else ""
    raise Trouble(
        "not_recognised",
        f"No sizes are known of a model called {name!r}.",
        hint=f"{nearest}Known by name are {_known_by_family()}; of any other give its folder or file.",
    )


def nearest_models(name: str, count: int = 3) -> tuple[str, ...]:
    """Titles of published models that are written most alike."""
    said = {}  # every way to say one -> its title
    for family in published()["families"].values():
        for key, variant in family["variants"].items():
            for one in (key, variant["title"], *variant["ids"], *(each.rpartition("/")[2] for each in variant["ids"])):
                said.setdefault(one.lower(), variant["title"])
    word = name.strip().lower()
    close = difflib.get_close_matches(word, said, n=3 * count, cutoff=0.5)
    close += difflib.get_close_matches(word.rpartition("/")[2], said, n=3 * count, cutoff=0.5)
    return tuple(dict.fromkeys(said[one] for one in close))[:count]


def _known_by_family() -> str:
    lists = (
        ", ".join(variant["title"] for variant in family["variants"].values())
        for family in published()["families"].values()
    )
    return "; ".join(lists)


def _published_part(family: str, name: str, said: dict, folder: Path | None) -> PartSizes:
    kind = said["network"].partition(":")[2]
    facts = published()["networks"][kind]
    depths: dict[str, int] = {block: _inner(said["config"], key) for block, key in facts["blocks"].items()}
    described = by_name(family).PARTS.get(name)
    if described is not None and described.taps:  # blocks above the last layer that is used are not loaded
        depths = {block: described.blocks_below_taps(depth) for block, depth in depths.items()}
    table = next(
        (one for one in tables(folder).values() if one["network"] == kind and _made_from(one, said["config"])), None
    )
    assert table is not None, f"assets/memory has no table of {kind} {said['config']}"
    blocks = [_block(table["numel"][block], number) for block, depth in depths.items() for number in range(depth)]
    other = Numbers(**_counts(table["numel"][""]))
    linears = _counted(table, depths)
    in_file = tuple(FILE_BYTES * (one.matrix + one.rest + one.precise) for one in blocks)
    around = FILE_BYTES * (other.matrix + other.rest + other.precise)
    return PartSizes(
        name,
        kind,
        table,
        tuple(blocks),
        other,
        depths,
        linears,
        file_bytes=around + sum(in_file),
        outside=_outside(table),
        in_file=in_file,
    )


def _block(numel: dict, number: int) -> Numbers:
    """The parameters of block `number` of a list, of which the first may have some that the others lack."""
    found = _counts(numel)
    more = _counts(numel["first"]) if number == 0 and "first" in numel else dict.fromkeys(found, 0)
    return Numbers(**{key: count + more[key] for key, count in found.items()})


def _inner(config: Any, key: str) -> Any:
    for piece in key.split("."):
        config = config[piece]
    return config


def _made_from(table: dict, config: dict) -> bool:
    return config in table.get("configs", ())


def _counts(numel: dict) -> dict:
    return {key: numel[key] for key in ("matrix", "rest", "precise")}


def _counted(table: dict, depths: dict[str, int]) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for home, numel in table["numel"].items():
        for name, (rows, columns) in numel["linears"].items() if home else ():
            found[f"{home}.{name}"] = (rows, columns, depths[home])
    return found


def _outside(table: dict) -> dict[str, tuple[int, int]]:
    return {name: tuple(size) for name, size in table["numel"][""]["linears"].items()}


def _of_spec(spec: ModelSpec, folder: Path | None) -> ModelSizes:
    facts = published()["families"].get(spec.family, {})
    parts = {name: _read_part(part, folder) for name, part in spec.parts.items()}
    estimating = tuple(name for name, part in parts.items() if not part.table)
    variant, whole = _variant(facts.get("variants", {}), spec, parts)
    read = set(parts)
    unread = read <= set(DENOISERS) and not spec.missing  # a family whose other parts are not read
    if whole and (unread or spec.variant in by_name(spec.family).NOT_DRAWN):
        parts |= {
            name: _published_part(spec.family, name, said, folder)
            for name, said in variant["parts"].items()
            if name not in parts
        }
    presumed = tuple(name for name in parts if name not in read)
    needed = spec.missing or (() if "vae" in parts else ("text_encoder", "vae"))
    absent = [name for name in needed if name not in parts]
    geometry = variant.get("geometry") or facts.get("geometry") or {"compression": 8, "patch": 2, "video": False}
    defaults = dict(variant.get("defaults", {}))
    if "reference_pixels" in defaults:
        both = by_name(spec.family).reference_pixels(spec.variant, _root(spec))
        defaults["reference_pixels"], defaults["seen_pixels"] = both
    return ModelSizes(
        spec.family,
        spec.title,
        parts,
        geometry,
        defaults,
        estimating=estimating,
        variant=spec.variant,
        tokenizers=spec.tokenizers,
        presumed=presumed,
        absent=tuple(absent),
    )


def _variant(variants: dict, spec: ModelSpec, parts: dict[str, PartSizes]) -> tuple[dict, bool]:
    """(the published variant that the model is one of, whether its transformer is that one's to the last block): by the
    variant that its files tell ("edit-2511"); else by its name among those whose transformer is the same, or by its
    schedule; else the first."""
    dit = parts.get("dit")
    same = {key: one for key, one in variants.items() if dit is not None and _is_of(dit, one["parts"]["dit"])}
    told = next((one for one in variants.values() if one.get("variant") and one["variant"] == spec.variant), None)
    if told is not None:
        return told, any(told is one for one in same.values())
    place = "/".join(spec.path.parts[-4:]) if spec.path is not None else ""
    words = re.sub(r"[^a-z0-9]", "", f"{place}/{spec.title}".lower())
    named = [key for key in same or variants if re.sub(r"[^a-z0-9]", "", key) in words]
    if named:
        key = max(named, key=len)
        return variants[key], key in same
    scheduled = [
        key for key, one in same.items() if one.get("scheduler") and one["scheduler"].items() <= spec.scheduler.items()
    ]
    key = next(iter((*scheduled, *same, *variants)), "")
    return variants.get(key, {}), key in same


def _is_of(part: PartSizes, said: dict) -> bool:
    """Whether `part` is the published network `said`, as deep and as wide."""
    lists = published()["networks"][part.kind]["blocks"] if part.kind in published()["networks"] else {}
    if part.kind != said["network"].rpartition(":")[2] or not _made_from(part.table, said["config"]):
        return False
    return part.depths == {block: _inner(said["config"], key) for block, key in lists.items()}


def _root(spec: ModelSpec) -> Path | None:
    if spec.processor is not None:
        return spec.processor.parent
    return spec.path if spec.path is not None and is_folder(spec.path) else None


def _read_part(part: PartSpec, folder: Path | None) -> PartSizes:
    kind = part.network.rpartition(":")[2]
    facts = published()["networks"].get(kind)
    lists = tuple(facts["blocks"]) if facts else untraced_model.block_lists(part.tensors)
    facts = facts or {}
    counts: dict[tuple[str, int], list[int]] = {}  # of a block: numbers in matrices, others, bytes in the file
    linears: dict[str, list[int]] = {}
    outside: dict[str, tuple[int, int]] = {}
    for name, at in part.tensors.items():
        home = next((block for block in lists if name.startswith(f"{block}.")), "")
        index, _, inner = name.removeprefix(f"{home}.").partition(".") if home else ("0", "", name)
        numbers = counts.setdefault((home, int(index)), [0, 0, 0])
        flat = len(at.shape) == 2 and name.endswith(".weight")
        numbers[0 if flat and home else 1] += math.prod(at.shape)
        numbers[2] += at.nbytes
        if flat and home:
            owner = f"{home}.{inner}".removesuffix(".weight")
            linears.setdefault(owner, [at.shape[0], at.shape[1], 0])[2] += 1
        elif flat and not EMBEDDING.search(name):
            outside[name.removesuffix(".weight")] = (at.shape[0], at.shape[1])
    shapes = {name: tuple(at.shape) for name, at in part.tensors.items()}
    flags = tuple(flag for flag in facts.get("flags", ()) if part.config.get(flag))
    table = tables(folder).get(fingerprint(kind, shapes, lists, flags), {})
    order, known = _in_order(counts, lists), table.get("numel", {})
    return PartSizes(
        part.name,
        kind,
        table,
        tuple(_numbers(counts[key], known.get(key[0])) for key in order),
        _numbers(counts.get(("", 0), (0, 0)), known.get("")),
        {home: sum(1 for key in counts if key[0] == home) for home in lists},
        {name: (rows, columns, count) for name, (rows, columns, count) in linears.items()},
        part.nbytes,
        outside,
        tuple(counts[key][2] for key in order),
        part.storage,
        part.files,
        seen=untraced_model.seen(shapes),
    )


def _numbers(counted, known: dict | None) -> Numbers:
    """As counted in a header; which of them stay in float32 the table of the network knows."""
    if known is not None and sum(_counts(known).values()) == sum(counted[:2]):
        return Numbers(**_counts(known))
    return Numbers(*counted[:2])


def _in_order(counts: dict, lists: tuple[str, ...]) -> list[tuple[str, int]]:
    return sorted((key for key in counts if key[0]), key=lambda key: (lists.index(key[0]), key[1]))
