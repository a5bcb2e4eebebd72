"""Metadata files of a dataset: csv, json and jsonl tables that say which pictures belong to which words. No torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backend.dataset.captions import check_caption
from backend.dataset.extra_inputs import read_steps
from backend.planner.rules.input_rules import EDIT
from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file, read_bytes
from backend.system.text_files import decode_text, listed

MOST_TABLE_BYTES = 2**29  # a million rows of captions


@dataclass(frozen=True)
class Row:
    """One sample: its picture and the pictures that it is edited from, as written; its captions; and what else is said
    of it."""

    picture: str
    captions: tuple[str, ...]
    edits: tuple[str, ...] = ()
    seed: int | None = None
    steps: int | None = None  # in which a student is to draw it (direct distillation)


def read_rows(path: Path, section, notes: list[str], *, edits: bool) -> Iterator[Row]:
    """The samples in a metadata file, in their order.

    `edits`: each must say in `edit_image` what it is edited from, else that column is not read.

    Raises Trouble for a file that is no table, and for the first row that lacks what it must have.
    """
    if not is_file(path):
        raise Trouble(
            "missing_file", f"The metadata file {path} does not exist.", hint="Check --dataset_metadata_path."
        )
    text, encoding = decode_text(read_bytes(path, most=MOST_TABLE_BYTES))
    if encoding not in ("utf-8", "utf-8-sig"):
        notes.append(f"{path.name} was read as {encoding}.")
    rows = _table(path, text.replace("\ufeff", ""), notes)
    if not rows:
        raise Trouble(
            "empty_dataset",
            f"The metadata file {path} holds no rows.",
            hint="A row for each picture: its file under `image`, its caption under `prompt`.",
        )
    extras = listed(section.extra_inputs)
    keys = tuple(key for key in section.data_file_keys if key not in (EDIT, *extras)) or ("image",)
    empty: list[int] = []
    for number, row in enumerate(rows, start=1):
        picture = _picture(row, keys, number, path.name)
        captions = _captions(row.get("prompt"), number, path.name)
        if not all(caption.strip() for caption in captions):
            empty.append(number)
        yield Row(
            picture=picture,
            captions=captions,
            edits=_edits(row.get(EDIT), number, path.name) if edits else (),
            seed=_seed(row.get("seed"), number, path.name),
            steps=read_steps(row, tuple(name for name in extras if name != EDIT), number, path.name),
        )
    if empty:
        some = (
            f"Row {empty[0]}" if len(empty) == 1 else f"{len(empty)} of {len(rows)} rows (row {empty[0]} is the first)"
        )
        notes.append(f"{some} of {path.name} {'has' if len(empty) == 1 else 'have'} an empty caption.")


def _table(path: Path, text: str, notes: list[str]) -> list[dict]:
    try:
        if path.suffix.lower() == ".csv":
            return _csv_rows(path.name, text, notes)
        if path.suffix.lower() == ".jsonl":
            return _jsonl_rows(path.name, text)
        rows = parse_json(text, pairs=_object)
    except ValueError as error:
        raise Trouble("bad_metadata", f"The metadata file {path} cannot be read: {error}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Trouble("bad_metadata", f"The metadata file {path} must hold a list of objects.")
    return rows


def _csv_rows(name: str, text: str, notes: list[str]) -> list[dict]:
    """The rows of a table with commas, each with as many cells as the table has columns: a row with more is a caption
    with a comma and no quotes, of which nothing is to be cut off. Raises Trouble with the row."""
    reader, rows = csv.reader(io.StringIO(text, newline=""), strict=True), []
    header: list[str] = []
    began = 1
    try:
        for cells in reader:
            line, began = began, reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = _header(name, cells)
                continue
            rows.append(_row(name, header, cells, number=len(rows) + 1, line=line))
    except csv.Error as error:
        raise Trouble(
            "bad_metadata",
            f"{name} cannot be read as a table at its line {began}: {error}.",
            hint="Quotes have to be closed, and doubled inside a quoted cell.",
        ) from None
    nameless = [place for place, column in enumerate(header, start=1) if not column]
    if rows and nameless:
        notes.append(f"Column {nameless[0]} of {name} has no name and is not read.")
    return rows


def _header(name: str, cells: list[str]) -> list[str]:
    header = [cell.strip() for cell in cells]
    twice = next((column for column in header if column and header.count(column) > 1), None)
    if twice:
        raise Trouble("bad_metadata", f"{name} has two columns called {twice}.", hint="Rename or remove one of them.")
    return header


def _row(name: str, header: list[str], cells: list[str], *, number: int, line: int) -> dict:
    where = f"Row {number} of {name} (line {line})"
    beyond = [cell for cell in cells[len(header) :] if cell.strip()]
    # Only a first column may be nameless: the index that pandas writes. Any other holds what was cut off.
    beyond += [cell for column, cell in list(zip(header, cells, strict=False))[1:] if not column and cell.strip()]
    if beyond:
        raise Trouble(
            "bad_metadata",
            f"{where} has more cells than the table has columns: {beyond[0].strip()[:60]!r} belongs to none.",
            hint='A caption with a comma has to stand in quotes: "a red fox, sitting in snow".',
        )
    if len(cells) < len(header):
        raise Trouble(
            "bad_metadata",
            f"{where} has {len(cells)} of the table's {len(header)} cells.",
            hint="Write every cell, empty ones too, and put captions that go on over several lines in quotes.",
        )
    return {column: cell for column, cell in zip(header, cells, strict=False) if column}


def _jsonl_rows(name: str, text: str) -> list[dict]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # a caption may hold other ends of lines
        if not line.strip():
            continue
        try:
            row = parse_json(line, pairs=_object)
        except json.JSONDecodeError as error:
            raise Trouble(
                "bad_metadata", f"Line {number} of {name} cannot be read: {error.msg} at column {error.colno}."
            ) from None
        except ValueError as error:
            raise Trouble("bad_metadata", f"Line {number} of {name} cannot be read: {error}.") from None
        if not isinstance(row, dict):
            raise Trouble("bad_metadata", f"Line {number} of {name} is no object: every line must hold one.")
        rows.append(row)
    return rows


def _object(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object; ValueError where a name stands in it twice, of which one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return found


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
    captions = (prompt,) if isinstance(prompt, str) else tuple(prompt) if isinstance(prompt, list) else ()
    if captions and all(isinstance(one, str) for one in captions):
        for caption in captions:
            check_caption(caption, f"The prompt in row {number} of {name}")
        return captions
    raise Trouble("bad_metadata", f"The prompt in row {number} of {name} is neither text nor a list of texts.")
