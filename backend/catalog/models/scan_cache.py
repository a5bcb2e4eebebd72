"""What was found out about files, remembered by their path, size and time in one JSON file."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from backend.catalog.family import Family
from backend.catalog.spec import LoraSpec, ModelSpec, Packed, PartSpec, TensorAt
from backend.schema.json_values import printable
from backend.schema.messages import Trouble, trouble_from_values
from backend.schema.typed_fields import checked
from backend.schema.untrusted import name_of, read_object_or_empty
from backend.system.atomic_files import write_json

MOST_MEMORY_BYTES = 2**29
VERSION = 6  # of what is remembered: raised when recognition changes
Spec = TypeVar("Spec", LoraSpec, ModelSpec)
PLACES = ("path", "processor")  # fields of a ModelSpec that are paths


class Memory:
    """Answers by path, size and time, in one file; forgotten when the families or the version change."""

    def __init__(self, cache: Path | None, name: str, families: tuple[Family, ...]):
        self.path = None if cache is None else cache / f"{name}.json"
        self.key = [VERSION, *(family.NAME for family in families)]
        self.known = _read(self.path, self.key) if self.path else {}
        self.seen: dict[str, dict] = {}
        self.changed = False

    def recall(
        self,
        path: Path,
        status: os.stat_result,
        look: Callable[[], Spec | None],
        rebuild: Callable[[dict, Path], Spec],
    ) -> Spec | Trouble | None:
        """The cached answer for `path` if its size and mtime are those it was read at, else that of `look()`.

        A Trouble that `look` raises is an answer too, and cached. `rebuild` makes a spec of its cached values.
        """
        name, stamp = os.fspath(path), [status.st_size, status.st_mtime_ns]
        kept = self.known.get(name)
        if isinstance(kept, dict) and kept.get("stamp") == stamp:
            try:
                answer = _rebuilt(kept, path, rebuild)
                self.seen[name] = kept
                return answer
            except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                pass  # not as it was written: looked at anew
        self.changed = True
        try:
            answer = look()
            values = {"spec": _values(answer)} if answer is not None else {"none": True}
        except Trouble as trouble:
            answer, values = placed(trouble, path), {"trouble": trouble.to_values()}
        except Exception as error:  # whatever a stranger has put into a file is no reason to hide the others
            traceback.print_exc()
            why = Trouble("unreadable", f"{name_of(path)} cannot be read: {printable(error)[:200]}.")
            answer, values = placed(why, path), {"trouble": why.to_values()}
        self.seen[name] = {"stamp": stamp, **values}
        return answer

    def save(self) -> None:
        if self.path is None or not (self.changed or len(self.seen) != len(self.known)):
            return
        write_cache(self.path, {"key": self.key, "files": self.seen})
        _KEPT[self.path] = (_stamp(self.path), self.key, self.seen)


_KEPT: dict[Path, tuple] = {}  # the last reading of each memory file, so that a page drawn again parses nothing


def _read(path: Path, key: list) -> dict[str, dict]:
    stamp = _stamp(path)
    kept = _KEPT.get(path)
    if kept is not None and stamp is not None and kept[0] == stamp and kept[1] == key:
        return kept[2]
    values = read_object_or_empty(path, most=MOST_MEMORY_BYTES)
    files = values.get("files") if values.get("key") == key else None
    if not isinstance(files, dict):
        return {}
    _KEPT[path] = (stamp, key, files)
    return files


def forget() -> None:
    """Drops what this process holds of the memory files; they are read again when next needed."""
    _KEPT.clear()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def write_cache(path: Path, values: dict) -> None:
    """`write_json` for what can be computed again: where the folder takes no file, only time is lost."""
    with contextlib.suppress(OSError, ValueError):
        write_json(path, values)


def _rebuilt(kept: dict, path: Path, rebuild: Callable[[dict, Path], Spec]) -> Spec | Trouble | None:
    if isinstance(kept.get("trouble"), dict):
        return placed(trouble_from_values(kept["trouble"]), path)
    return None if "none" in kept else rebuild(kept["spec"], path)


def placed(trouble: Trouble, path: Path) -> Trouble:
    trouble.path = path
    return trouble


def _values(spec: LoraSpec | ModelSpec) -> dict:
    """A spec as JSON can hold it."""
    if isinstance(spec, LoraSpec):
        return {one.name: getattr(spec, one.name) for one in fields(spec) if one.name != "path"}
    parts = {name: _part_values(part) for name, part in spec.parts.items()}
    plain = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name != "parts"}
    places = {name: str(getattr(spec, name) or "") for name in PLACES}
    tokenizers = {name: str(folder) for name, folder in spec.tokenizers.items()}
    return {**plain, "parts": parts, "tokenizers": tokenizers, **places}


def lora_from_values(values: dict, path: Path) -> LoraSpec:
    """The spec that was remembered. Raises one of several errors where the values are of other types."""
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return checked(LoraSpec(path=path, **plain))


def _part_values(part: PartSpec) -> dict:
    files = list(part.files)
    places = {file: number for number, file in enumerate(files)}

    def rows(tensors: Mapping[str, TensorAt]) -> list:
        return [[name, *row(at)] for name, at in tensors.items()]

    def row(at: TensorAt) -> list:
        values = [places.get(at.file, str(at.file)), at.key, at.dtype, at.shape, at.start, at.end, at.swapped]
        if at.packed is None:
            return values
        made = at.packed
        pieces = [[role, *row(piece)] for role, piece in made.pieces]
        return [*values, [made.form, pieces, made.settings, made.whole, made.rows]]

    plain = {key: value for key, value in asdict(replace(part, tensors={}, scales={})).items() if key != "folder"}
    return {
        **plain,
        "files": [str(file) for file in files],
        "tensors": rows(part.tensors),
        "scales": rows(part.scales),
        "folder": str(part.folder or ""),
    }


def _part_from_values(values: dict) -> PartSpec:
    files = [Path(file) for file in values.pop("files")]

    def tensors(rows: list) -> dict[str, TensorAt]:
        return {name: tensor(*row) for name, *row in rows}

    def tensor(file, key, dtype, shape, start, end, swapped, made=None) -> TensorAt:
        path = files[file] if isinstance(file, int) else Path(file)
        return TensorAt(path, key, dtype, tuple(shape), start, end, swapped, None if made is None else packed(*made))

    def packed(form, pieces, settings, whole, rows) -> Packed:
        return Packed(
            form,
            tuple((role, tensor(*row)) for role, *row in pieces),
            tuple((name, value) for name, value in settings),
            tuple(whole),
            None if rows is None else tuple(rows),
        )

    folder = values.pop("folder")
    weights, scales = tensors(values.pop("tensors")), tensors(values.pop("scales"))
    return checked(PartSpec(**values, tensors=weights, scales=scales, folder=Path(folder) if folder else None))


def model_from_values(values: dict, path: Path) -> ModelSpec:
    values = dict(values)
    parts = {name: _part_from_values(dict(part)) for name, part in values.pop("parts").items()}
    places: dict[str, Any] = {name: Path(found) if (found := values.pop(name)) else None for name in PLACES}
    tokenizers = {name: Path(folder) for name, folder in values.pop("tokenizers").items()}
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return checked(ModelSpec(parts=parts, tokenizers=tokenizers, **places, **plain))
