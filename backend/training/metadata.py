"""Metadata files of a dataset: csv, json and jsonl tables that say which pictures belong to which words. No torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from backend.catalog.text import decode_text, listed
from backend.schema.messages import Trouble
from backend.training.extras import EDIT, read_extras


@dataclass(frozen=True)
class Row:
    """One sample: its picture and the pictures that it is edited from, as written; its captions; and what else is said of it."""

    picture: str
    captions: tuple[str, ...]
    edits: tuple[str, ...] = ()
    seed: int | None = None
    more: dict[str, int] = field(default_factory=dict)


def read_rows(path: Path, section, notes: list[str], *, edits: bool) -> Iterator[Row]:
    """The samples in a metadata file, in their order. `edits`: each must say in `edit_image` what it is edited from, else that column is not read.

    Raises Trouble for a file that is no table, and for the first row that lacks what it must have.
    """
    if not path.is_file():
        raise Trouble(
            "missing_file", f"The metadata file {path} does not exist.", hint="Check --dataset_metadata_path."
        )
    text, encoding = decode_text(path.read_bytes())
    if encoding not in ("utf-8", "utf-8-sig"):
        notes.append(f"{path.name} was read as {encoding}.")
    rows = _table(path, text.lstrip("\ufeff"))
    if not rows:
        raise Trouble(
            "empty_dataset",
            f"The metadata file {path} holds no rows.",
            hint="A row for each picture: its file under `image`, its caption under `prompt`.",
        )
    extras = listed(section.extra_inputs)
    keys = tuple(key for key in section.data_file_keys if key not in (EDIT, *extras)) or ("image",)
    for number, row in enumerate(rows, start=1):
        yield Row(
            picture=_picture(row, keys, number, path.name),
            captions=_captions(row.get("prompt"), number, path.name),
            edits=_edits(row.get(EDIT), number, path.name) if edits else (),
            seed=_seed(row.get("seed"), number, path.name),
            more=read_extras(row, tuple(name for name in extras if name != EDIT), number, path.name),
        )


def _table(path: Path, text: str) -> list[dict]:
    try:
        if path.suffix.lower() == ".csv":
            return list(csv.DictReader(io.StringIO(text, newline="")))
        if path.suffix.lower() == ".jsonl":
            rows = [
                json.loads(line) for line in text.split("\n") if line.strip()
            ]  # a caption may hold other ends of lines
        else:
            rows = json.loads(text)
    except RecursionError:
        raise Trouble("bad_metadata", f"The metadata file {path} is nested too deeply to be a table.") from None
    except (ValueError, csv.Error) as error:
        raise Trouble("bad_metadata", f"The metadata file {path} cannot be read: {error}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Trouble("bad_metadata", f"The metadata file {path} must hold a list of objects.")
    return rows


def _picture(row: dict, keys: tuple[str, ...], number: int, name: str) -> str:
    """The file in the first of the columns `keys` that says one."""
    present = [key for key in keys if key in row]
    if not present:
        raise Trouble(
            "bad_metadata",
            f"Row {number} of {name} names no picture: its columns are {', '.join(map(str, row))}.",
            hint=f"The picture's column must be called {' or '.join(keys)} (--data_file_keys).",
        )
    said = next((row[key] for key in present if row[key] not in (None, "", [])), None)
    if isinstance(said, str) and said.strip():
        return said.strip()
    if said is None or isinstance(said, str):
        raise Trouble(
            "bad_metadata",
            f"Row {number} of {name} names no picture: its {' and '.join(present)} is empty.",
            hint="Write the picture's file there, or remove the row.",
        )
    raise Trouble("bad_metadata", f"Row {number} of {name} has {said!r} under {present[0]}, which is no file's name.")


def _edits(said, number: int, name: str) -> tuple[str, ...]:
    """The files in a cell of `edit_image`: one, or a list of some."""
    if said in (None, "", []) or (isinstance(said, str) and not said.strip()):
        raise Trouble(
            "bad_metadata",
            f"Row {number} of {name} does not say which picture it is edited from: it has no {EDIT}.",
            hint=f"Every row needs one under {EDIT}; in json and jsonl it may be a list of several.",
        )
    paths = said if isinstance(said, list) else [said]
    if not all(isinstance(path, str) and path.strip() for path in paths):
        raise Trouble(
            "bad_metadata", f"The {EDIT} in row {number} of {name} is neither a file's name nor a list of them."
        )
    return tuple(path.strip() for path in paths)


def _seed(seed, number: int, name: str) -> int | None:
    if seed is None or seed == "":
        return None
    if not str(seed).strip().isdecimal() or len(str(seed)) > 20 or int(seed) >= 2**63:
        raise Trouble(
            "bad_metadata", f"The seed in row {number} of {name} is {str(seed)[:40]!r}, not a whole number below 2**63."
        )
    return int(seed)


def _captions(prompt, number: int, name: str) -> tuple[str, ...]:
    if prompt is None:
        raise Trouble("bad_metadata", f"Row {number} of {name} has no column `prompt`.")
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) for one in prompt):
        return tuple(prompt)
    raise Trouble("bad_metadata", f"The prompt in row {number} of {name} is neither text nor a list of texts.")
