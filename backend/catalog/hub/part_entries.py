"""Which parts of a model an entry of the command line means: a part's name, a file (or one shard of it), a folder, or
`id:pattern`. No torch.

`--fp8_models`, `--offload_models` and `--quant_options` name parts so. What an entry means is told by the files it
names; of a model that is not on this machine, by the folder that it names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from backend.catalog.hub.download import is_id, local_roots
from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble
from backend.schema.untrusted import exists, expanded
from backend.system.text_files import listed

Files = Mapping[str, Sequence[Path]]  # part -> its files; empty ones where they are not known


def listed_paths(text: str | None, setting: str = "model_paths") -> list[list[str]]:
    """`--model_paths`: a JSON list of files, or of lists of shards; one file alone may stand without brackets. Raises
    Trouble."""
    if not text:
        return []
    try:
        listed = parse_json(text) if text.lstrip().startswith(("[", '"')) else [text]
        if not isinstance(listed, str | list):
            raise ValueError("neither a file nor a list")
        groups = [
            [entry] if isinstance(entry, str) else list(entry)
            for entry in ([listed] if isinstance(listed, str) else listed)
        ]
        if all(isinstance(shard, str) for group in groups for shard in group):
            return groups
    except (ValueError, TypeError):
        pass
    raise Trouble("bad_value", f"--{setting} holds {text!r}, which is not a JSON list of files.", setting=setting)


def split_id(entry: str) -> tuple[str, str] | None:
    """(id, pattern) of `id:pattern`; None for what is a path: a file or folder that is there, or anything without an id
    before the colon."""
    model, colon, pattern = entry.rpartition(":")
    if not colon or not is_id(model) or exists(expanded(entry)):
        return None
    return model, pattern


def means(entry: str, parts: Files) -> set[str]:
    """The parts that `entry` means; none where it names no part of this model."""
    shards = [shard for group in listed_paths(entry) for shard in group] if entry.startswith("[") else entry.split(",")
    shards = [shard.strip() for shard in shards if shard.strip()]
    if len(shards) == 1 and shards[0] in parts:
        return {shards[0]}
    return {name for name, files in parts.items() if any(_names(shard, name, files) for shard in shards)}


def _names(shard: str, part: str, files: Sequence[Path]) -> bool:
    here = [Path(file).absolute() for file in files if exists(expanded(file))]
    if not here:
        words = "dit|transformer|unet" if part == "dit" else re.escape(part)
        return re.search(rf"(^|[/:\\])({words})([/\\.]|$)", shard) is not None
    named = split_id(shard)
    if named is None:
        path = expanded(shard).absolute()
        return (
            path in here
            or path in {file.parent for file in here}
            or path.resolve() in {file.resolve() for file in here}
        )
    model, pattern = named
    roots = [root.absolute() for root in local_roots(model)]
    return any(
        file.is_relative_to(root) and _matches(file.relative_to(root).as_posix(), pattern)
        for root in roots
        for file in here
    )


def _matches(name: str, pattern: str) -> bool:
    if pattern in ("", "./") or pattern.endswith("/"):
        return name.startswith(pattern.removeprefix("./"))
    return fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")


def parts_meant(entry: str, setting: str, parts: Files, *, known: Iterable[str] = ()) -> set[str]:
    """`means`, or a Trouble in the name of `setting`; `known`: entries that the hint names beside the parts."""
    if entry.startswith("["):
        listed_paths(entry, setting)
    found = means(entry, parts)
    if not found:
        can_be = ", ".join(dict.fromkeys([*filter(None, known), *parts]))
        raise Trouble(
            "bad_value",
            f"--{setting} names {entry!r}, which is no part of this model.",
            hint=f"It can be {can_be}.",
            setting=setting,
        )
    return found


def entries_of(text: str | None) -> tuple[str, ...]:
    """The entries of a list with commas; those inside the brackets of a JSON list of shards do not separate."""
    pieces = re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text or "")
    return tuple(piece.strip() for piece in pieces if piece.strip())


def rounding_of(text: str | None, setting: str = "--quant_options") -> list[tuple[str, str, tuple[str, ...]]]:
    """`--quant_options`: (entry, method, ends of names of layers that are left out) of each
    `MODEL:METHOD[/LAYER,LAYER]`, in their order.

    Raises Trouble for what is not of that form.
    """
    found = []
    for piece in (text or "").split(";"):
        if not piece.strip():
            continue
        model, _, how = piece.strip().rpartition(":")
        method, _, excluded = how.partition("/")
        if not model.strip() or not method.strip():
            raise Trouble(
                "bad_value",
                f"{piece.strip()!r} in {setting} is not `model:method`.",
                hint="For example dit:int8.",
                setting="quant_options",
            )
        found.append((model.strip(), method.strip(), listed(excluded)))
    return found
