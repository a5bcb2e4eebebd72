"""Which files the `model` section of a training run means: a model by its name, or files one by one. No torch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from backend.catalog.hub.download import find_model, resolve
from backend.catalog.hub.part_entries import listed_paths, split_id
from backend.catalog.models import model_folder
from backend.catalog.models.identify import identify_files, identify_model
from backend.catalog.spec import ModelSpec
from backend.families import FAMILIES, by_name
from backend.schema.messages import Trouble
from backend.schema.training.config import ModelSection
from backend.schema.untrusted import exists, is_file, is_folder
from backend.system.text_files import listed

Entries = dict[str, list[Path]]  # what was written for files -> those files


def names_files(section: ModelSection) -> bool:
    """Whether files are named one by one, instead of `model`."""
    return bool(listed_paths(section.model_paths) or listed(section.model_id_with_origin_paths))


def find_spec(section: ModelSection, *, offline: bool | None = None) -> tuple[ModelSpec, Entries]:
    """The model that the section names, and of files that are named one by one what was written for them. Missing files
    of an id are downloaded, unless it is `offline` (None: as the environment and the preferences say). Raises
    Trouble."""
    entries = entries_of_section(section, offline=offline)
    if not entries:
        return identify_model(find_model(section.model), FAMILIES), {}
    return spec_of_files(tuple(tuple(files) for files in entries.values())), entries


def spec_of_files(groups: tuple[tuple[Path, ...], ...]) -> ModelSpec:
    """The model of which each group of files is a part; remembered for as long as none of them changes."""
    return _identified(groups, tuple(file.stat().st_mtime_ns for group in groups for file in group))


@lru_cache(maxsize=8)  # a form asks at every keystroke
def _identified(groups: tuple[tuple[Path, ...], ...], changed: tuple[int, ...]) -> ModelSpec:
    spec = identify_files([list(group) for group in groups], FAMILIES)
    return model_folder.completed(spec, by_name(spec.family))


def entries_of_section(section: ModelSection, *, offline: bool | None = None) -> Entries:
    """What was written for a model's files -> those files; {} where none are named one by one. Raises Trouble."""
    entries: Entries = {}
    for shards in listed_paths(section.model_paths):
        entries[",".join(shards)] = [file for shard in shards for file in _files(Path(shard))]
    for entry in listed(section.model_id_with_origin_paths):
        named = split_id(entry)
        if named is not None:
            entries[entry] = resolve(*named, offline=offline)
        elif exists(Path(entry)):
            entries[entry] = _files(Path(entry))
        else:
            raise Trouble(
                "missing_file" if ":" not in entry else "bad_value",
                f"{entry!r} in --model_id_with_origin_paths is neither `id:pattern` nor a file or folder that is there.",
                hint='For example "loft/starter:transformer/*.safetensors".',
                setting="model_id_with_origin_paths",
            )
    return entries


def _files(path: Path) -> list[Path]:
    if is_folder(path):
        return sorted(path.glob("*.safetensors"))
    if not is_file(path):
        raise Trouble(
            "missing_file", f"There is no model file {path}.", hint="Check --model_paths.", setting="model_paths"
        )
    return [path]
