"""What lies in folders of models and of LoRA files. Headers alone are read, and remembered by path, size and time."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from backend.catalog.family import Family
from backend.catalog.formats.safetensors import read_layout
from backend.catalog.lora.identify import identify_lora, lora_of
from backend.catalog.lora.metadata import THUMBNAILS
from backend.catalog.models.checkpoint_files import SHARD
from backend.catalog.models.identify import identify_model
from backend.catalog.models.scan_cache import Memory, lora_from_values, model_from_values, placed
from backend.catalog.spec import LoraSpec, ModelSpec
from backend.schema.json_values import is_printable
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file, is_folder, name_of, read_object_or_empty
from backend.system.atomic_files import not_written, write_json

LONGEST_VALUE = 48 * 1024  # of metadata kept in a listing
MARK = 32  # characters kept of a picture: enough to say that there is one
SKIPPED = ("checkpoints", "samples", "trash", "__pycache__", ".git", ".cache")
DEPTH = 6
MOST_ENTRIES, MOST_SECONDS = 100_000, 10.0  # of one folder at one look
CORRECTIONS = "lora_families.json"

__all__ = ["correct_family", "read_corrections", "scan_loras", "scan_models"]

Entry = LoraSpec | Trouble


def scan_loras(
    folders: Iterable[Path],
    families: Iterable[Family],
    cache: Path | None = None,
    *,
    corrections: Mapping[str, str] | None = None,
) -> tuple[LoraSpec | Trouble, ...]:
    """Every LoRA file in `folders` and below, by name; what cannot be read is a Trouble with its `path`.

    `cache`: the folder that remembers. `corrections`: path -> family as people have corrected it (`read_corrections`).
    """
    known = tuple(families)
    memory = Memory(cache, "loras", known)

    def look(path: Path, status: os.stat_result) -> LoraSpec | Trouble | None:
        return memory.recall(path, status, lambda: _lora(path, known), lora_from_values)

    left_out: list[Trouble] = []
    files = list(_files(folders, (".safetensors",), left_out))  # at once: its time is not that of reading them
    found = [entry for path, status in files if (entry := look(path, status)) is not None]
    memory.save()
    if corrections:
        found = [entry if isinstance(entry, Trouble) else _corrected(entry, corrections) for entry in found]
    return tuple(sorted([*found, *left_out], key=_by_name))


def _by_name(entry: LoraSpec | Trouble) -> tuple[str, str]:
    assert entry.path is not None, "an entry of a listing has its file's path"
    return entry.path.name.lower(), str(entry.path)


def lora_at(path: Path, families: tuple[Family, ...], corrections: Mapping[str, str] | None = None) -> LoraSpec:
    """One LoRA file as it is listed. Raises Trouble for one that cannot be read."""
    return _corrected(identify_lora(path, families), corrections or {})


def scan_models(
    folders: Iterable[Path], families: Iterable[Family], cache: Path | None = None
) -> tuple[ModelSpec | Trouble, ...]:
    """Every model in `folders`: those in a folder of their own (diffusers layout), then single files.

    LoRA files are passed over.
    """
    families = tuple(families)
    memory = Memory(cache, "models", families)
    found: dict[Path, ModelSpec | Trouble] = {}
    left_out: list[Trouble] = []
    for path in _model_paths(folders, left_out):
        try:
            status = (path / "model_index.json" if is_folder(path) else path).stat()
        except (OSError, ValueError):  # it went meanwhile
            continue
        entry = memory.recall(path, status, lambda path=path: _model(path, families), model_from_values)
        if entry is not None:
            found[path] = entry
    memory.save()
    return (*found.values(), *left_out)


def read_corrections(user: Path) -> dict[str, str]:
    """path -> family, as corrected by hand; kept in the folder for what belongs to the user."""
    values = read_object_or_empty(user / CORRECTIONS)
    return {path: family for path, family in values.items() if isinstance(family, str)}


def correct_family(user: Path, path: Path, family: str) -> None:
    """From now on the LoRA at `path` is for `family`; "" takes the correction back. Raises Trouble("not_written")."""
    values = read_corrections(user)
    values.pop(str(path), None)
    if family:
        values[str(path)] = family
    try:
        write_json(user / CORRECTIONS, values)
    except OSError as error:
        raise not_written("The correction", error) from None


def _corrected(entry: LoraSpec, corrections: Mapping[str, str]) -> LoraSpec:
    family = corrections.get(str(entry.path))
    if not family:
        return entry
    return replace(entry, family=family, families_possible=(family,), evidence=("corrected by hand",))


def _lora(path: Path, families: tuple[Family, ...]) -> LoraSpec:
    _check_readable(path)
    spec = lora_of(path, read_layout(path), families)
    kept = {key: value[:MARK] if key in THUMBNAILS else value for key, value in spec.metadata.items()}
    short = {key: value for key, value in kept.items() if len(value) <= LONGEST_VALUE}
    return replace(spec, metadata=short)


def _check_readable(path: Path) -> None:
    """Raises Trouble for a pipe, a device or a socket, which would be read for ever, and for a name that no page could
    give back."""
    if not is_printable(path.name):
        raise Trouble(
            "unreadable",
            f"The name of {name_of(path)} is not in UTF-8, so nothing can be done with it here.",
            hint="Rename it.",
        )
    if not is_folder(path) and not is_file(path):
        raise Trouble("unreadable", f"{name_of(path)} is no file that can be read.")


def _model(path: Path, families: tuple[Family, ...]) -> ModelSpec | None:
    _check_readable(path)
    try:
        return identify_model(path, families)
    except Trouble as trouble:
        if trouble.kind == "not_recognised" and "is a LoRA" in trouble.message:
            return None
        raise


def _files(
    folders: Iterable[Path], suffixes: tuple[str, ...], left_out: list[Trouble]
) -> Iterator[tuple[Path, os.stat_result]]:
    """Files with these suffixes in the folders and below, the nearest first, each once, whatever links there are.

    Each folder is looked through for so many entries and so long; a link to a folder in which it lies itself is not
    followed. `left_out` gets a sentence for each that is not looked through to its end.
    """
    seen: set[tuple[int, int]] = set()
    for root in map(Path, folders):
        yield from _files_of(root, suffixes, seen, left_out)


def _files_of(
    root: Path, suffixes: tuple[str, ...], seen: set[tuple[int, int]], left_out: list[Trouble]
) -> Iterator[tuple[Path, os.stat_result]]:
    above = set(_identities(Path(os.path.realpath(root))))
    count, end = 0, time.monotonic() + MOST_SECONDS
    waiting = deque([(os.fspath(root), DEPTH)])
    while waiting:
        folder, depth = waiting.popleft()
        for entry in _entries(folder):
            count += 1
            if count > MOST_ENTRIES or time.monotonic() > end:
                left_out.append(placed(_too_much(root, count), root))
                return
            try:
                status = entry.stat()
                if entry.is_dir():
                    if (status.st_dev, status.st_ino) in above:
                        left_out.append(placed(_leads_up(root, entry.name), Path(entry.path)))
                    elif depth and entry.name not in SKIPPED and _new(seen, status):
                        waiting.append((entry.path, depth - 1))
                elif entry.name.lower().endswith(suffixes) and _new(seen, status):
                    yield Path(entry.path), status
            except OSError:  # a broken link, a file that vanished
                continue


def _entries(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as found:
            return sorted(itertools.islice(found, MOST_ENTRIES + 1), key=lambda entry: entry.name)
    except OSError:
        return []


def _identities(folder: Path) -> Iterator[tuple[int, int]]:
    """Of a folder and all that it lies in."""
    for one in (folder, *folder.parents):
        try:
            status = one.stat()
        except (OSError, ValueError):
            continue
        if status.st_ino:
            yield status.st_dev, status.st_ino


def _too_much(root: Path, count: int) -> Trouble:
    return Trouble(
        "too_much",
        (
            f"There is more in {name_of(root)} than is looked through at a time: {count} files and folders, and more. "
            "What was found is listed."
        ),
        hint="Name the folder with the files itself, or take links to large folders away.",
    )


def _leads_up(root: Path, name: str) -> Trouble:
    return Trouble(
        "not_followed",
        (
            f"{name_of(name)} is a link to a folder in which {name_of(root)} itself lies, so what is there is not "
            "looked through."
        ),
        hint="Let it lead to the folder with the files, or remove it.",
    )


def _new(seen: set[tuple[int, int]], status: os.stat_result) -> bool:
    key = (status.st_dev, status.st_ino)
    if key[1] and key in seen:
        return False
    seen.add(key)
    return True


def _model_paths(folders: Iterable[Path], left_out: list[Trouble]) -> list[Path]:
    """Folders in the diffusers layout, and weight files that lie in none (of shards the first)."""
    homes: dict[Path, None] = {}
    files: dict[Path, None] = {}
    for folder in map(Path, folders):
        if is_file(folder / "model_index.json"):
            homes[folder] = None
            continue
        for path, _ in _files([folder], (".safetensors", ".gguf", "model_index.json"), left_out):
            if path.name == "model_index.json":
                homes[path.parent] = None
            elif path.suffix in (".safetensors", ".gguf"):
                shard = SHARD.match(path.stem)
                if not shard or int(shard["number"]) == 1:
                    files[path] = None
    alone = [path for path in files if not any(home in path.parents for home in homes)]
    return [*homes, *alone]
