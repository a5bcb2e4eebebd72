"""A dataset as the Train tab shows it: pictures with their captions, edited without loss of what was there."""

from __future__ import annotations

import csv
import io
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backend.schema.json_values import is_printable, parse_json, printable, text
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS, Places
from backend.schema.untrusted import (
    exists,
    is_file,
    is_folder,
    known_file,
    name_of,
    read_bytes,
    read_object_or_empty,
    unnamed,
)
from backend.system.atomic_files import rename_over, replacing, write_text
from backend.system.text_files import decode_text
from studio.widgets.formatting import count_words

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.json")
EARLIER = "captions-before"  # a dated folder for each save
UNDONE = ".undone"
MOST_FILES, MOST_SECONDS = 200_000, 5.0  # of a folder that is looked through for pictures
MOST_TABLE_BYTES, MOST_CAPTION_BYTES = 64 * 2**20, 2**20
HINTS = ("name", "trigger_word", "sample_prompts")


def shipped() -> list[Path]:
    return _folders(ASSETS / "datasets")


def own(places: Places) -> list[Path]:
    return _folders(places.datasets)


def _folders(parent: Path) -> list[Path]:
    return [folder for folder in _all_folders(parent) if is_printable(folder.name)]


def _all_folders(parent: Path) -> list[Path]:
    try:
        return sorted(f for f in parent.iterdir() if not f.name.startswith(".") and is_folder(f))
    except OSError:
        return []


def choices(places: Places) -> list[tuple[str, str]]:
    """(label, folder) of the shipped sets and the user's own. One whose name no page can give back is told as such;
    choosing it finds nothing."""
    named = [(f"{f.name} (comes with Loft)", str(f)) for f in shipped()] + [(f.name, str(f)) for f in own(places)]
    bad = unnamed(folder.name for folder in _all_folders(places.datasets))
    return named + [
        (f"{name} (its name is not in UTF-8: rename the folder)", str(places.datasets / name)) for name in bad
    ]


def pictures_in(folder: Path) -> list[Path]:
    """The pictures under `folder`, as the trainer finds them. Raises Trouble where there is no folder or no picture."""
    if not str(folder).strip() or not is_folder(folder):
        raise Trouble("missing_file", f"The dataset folder {printable(folder)} does not exist.", hint="Check the path.")
    found = sorted(_pictures_below(folder))
    if not found:
        kinds = ", ".join(PICTURES[:4])
        raise Trouble("empty_dataset", f"There are no pictures in {folder}.", hint=f"Put {kinds} files there.")
    return found


def _pictures_below(folder: Path) -> Iterator[Path]:
    """Raises Trouble for a folder with more in it than a dataset has: the root of a disk takes minutes, and its files
    come and go."""
    seen, end = 0, time.monotonic() + MOST_SECONDS
    for parent, folders, files in os.walk(folder):
        here = Path(parent)
        folders[:] = [name for name in folders if is_printable(name) and not _hidden(here / name, folder)]
        seen += len(files) + len(folders)
        if seen > MOST_FILES or time.monotonic() > end:
            raise Trouble(
                "bad_value",
                f"There is more in {folder} than a dataset has: {seen} files and folders, and more.",
                hint="Choose the folder with the pictures.",
            )
        for name in files:
            path = here / name
            wanted = path.suffix.lower() in PICTURES and not name.endswith(".mask.png") and is_printable(name)
            if wanted and not _hidden(path, folder) and is_file(path):
                yield path


def unnamed_in(folder: Path) -> list[str]:
    """Pictures and folders under `folder` that are left out because of their names (`untrusted.unnamed`)."""
    end, found = time.monotonic() + MOST_SECONDS, []
    for _, folders, files in os.walk(folder):
        bad = [name for name in files if Path(name).suffix.lower() in PICTURES]
        found += unnamed(name for name in (*folders, *bad) if not name.startswith("."))
        folders[:] = [name for name in folders if is_printable(name) and not name.startswith(".") and name != EARLIER]
        if time.monotonic() > end:
            break
    return found


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") or part == EARLIER for part in path.relative_to(folder).parts)


def metadata_file(folder: Path) -> Path | None:
    """The metadata file that lies in a dataset's folder, if one does: its captions are then the ones that count."""
    return next((folder / name for name in METADATA if is_file(folder / name)), None)


@dataclass(frozen=True)
class Captioned:
    """A picture of a set with its words, and the pictures that it was edited from where the set says so."""

    picture: Path
    caption: str = ""
    edited_from: tuple[Path, ...] = ()


def table_rows(table: Path) -> list[Captioned]:
    """The samples of a metadata file, files sought beside it. Lines that are not as they should be are left out."""
    said = printable(decode_text(read_bytes(table, most=MOST_TABLE_BYTES))[0].lstrip("\ufeff"))
    if table.suffix == ".csv":
        rows = _csv_rows(said)
    elif table.suffix == ".jsonl":
        rows = [_json_or_none(line) for line in said.splitlines()]
    else:
        rows = _json_or_none(said)
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [row for row in (_captioned(row, table.parent) for row in rows) if row is not None]


def _csv_rows(said: str) -> list[dict]:
    try:
        return list(csv.DictReader(io.StringIO(said)))
    except csv.Error:  # a field of more than 128 KiB
        return []


def _captioned(row: dict, folder: Path) -> Captioned | None:
    picture = row.get("image") or row.get("file_name")
    if not isinstance(picture, str):
        return None
    prompt, edits = row.get("prompt") or "", row.get("edit_image") or []
    edits = [edits] if isinstance(edits, str) else edits if isinstance(edits, list) else []
    words = " | ".join(map(str, prompt)) if isinstance(prompt, list) else str(prompt)
    found, *edited = (known_file(str(path), (folder,)) or folder / name_of(path) for path in (picture, *edits))
    return Captioned(found, words, tuple(edited))


def samples_in(folder: Path) -> list[Captioned]:
    """What the set in `folder` trains on: the rows of its metadata file where it has one, else its pictures with their
    text files.

    Raises Trouble where there is no folder, or nothing to train on.
    """
    table = metadata_file(folder)
    if table is None:
        return [Captioned(path, read_caption(path.with_suffix(".txt"))) for path in pictures_in(folder)]
    rows = table_rows(table)
    if not rows:
        raise Trouble(
            "empty_dataset",
            f"{table.name} in {folder} names no pictures.",
            hint="A row for each picture: its file under `image`, its caption under `prompt`.",
        )
    return rows


def _json_or_none(said: str):
    try:
        return parse_json(said)
    except ValueError:
        return None


def hints(folder: Path) -> dict:
    """Settings that a set suggests in a file `loft.json` beside its pictures: trigger word, sample prompts, a name."""
    found = read_object_or_empty(folder / "loft.json")
    told = {name: text(found[name], most=20_000) for name in HINTS if text(found.get(name))}
    return {
        name: value for name, value in told.items() if not value.strip().lower().endswith(".txt")
    }  # no file of lines


def read_caption(path: Path) -> str:
    """The caption in a text file of any encoding; empty where there is none."""
    try:
        said, _ = decode_text(read_bytes(path, most=MOST_CAPTION_BYTES))
        return printable(said.lstrip("\ufeff").strip())
    except (Trouble, OSError, ValueError):
        return ""


def save(folder: Path, edits: dict[str, str], places: Places) -> tuple[Path, str]:
    """Writes edited captions (by the picture's path inside `folder`) as .txt files. Returns the dataset's folder and a
    sentence.

    A set that comes with Loft is copied to the user's datasets first. Texts that were there move to a dated folder
    beside.
    """
    known = {path.relative_to(folder).as_posix(): path for path in pictures_in(folder)}
    edits = edits if isinstance(edits, dict) else {}
    wanted = {known[name]: text(said, most=MOST_CAPTION_BYTES).strip() for name, said in edits.items() if name in known}
    wanted = {path: said for path, said in wanted.items() if read_caption(path.with_suffix(".txt")) != said}
    if not wanted:
        return folder, "No caption was changed."
    target = folder
    if folder.resolve().is_relative_to(ASSETS.resolve()):
        target = _free_name(places.datasets, folder.name)
        shutil.copytree(folder, target)
    before = _free_name(target / EARLIER, time.strftime("%Y-%m-%d_%H-%M-%S"))
    kept = 0
    for path, said in wanted.items():
        beside = (target / path.relative_to(folder)).with_suffix(".txt")
        earlier = before / beside.relative_to(target)
        earlier.parent.mkdir(parents=True, exist_ok=True)
        if is_file(beside):
            shutil.copy2(beside, earlier)
            kept += 1
        else:
            earlier.touch()  # no caption was there
        write_text(beside, said + "\n")
    words = f"{count_words(len(wanted), 'caption')} saved"
    words += f" in your own copy, {target}" if target != folder else ""
    return target, words + (f". What they said before is in {before}." if kept else ".")


def undo(folder: Path) -> tuple[list[str], str]:
    """Takes the newest save of captions in `folder` back. Returns the pictures (paths inside it) that have their words
    of before, and a sentence.

    What was saved then is kept in its place, in a folder that ends with `UNDONE`; the next call takes back the save
    before.
    """
    there = folder / EARLIER
    saves = (
        sorted(path for path in there.iterdir() if is_folder(path) and path.suffix != UNDONE)
        if is_folder(there)
        else []
    )
    if not saves:
        return [], "There is no save of captions to take back here."
    texts = {path.relative_to(saves[-1]) for path in saves[-1].rglob("*.txt") if not path.name.startswith(".")}
    for said in texts:
        _swap(folder / said, saves[-1] / said)
    saves[-1].rename(_free_name(there, saves[-1].name + UNDONE))
    names = [path.relative_to(folder) for path in pictures_in(folder)]
    return [
        name.as_posix() for name in names if name.with_suffix(".txt") in texts
    ], f"{count_words(len(texts), 'caption')} as before the last save."


def _swap(one: Path, other: Path) -> None:
    """Exchanges two files; `one` may have gone meanwhile, and is never half written."""
    aside = other.with_name(f".{other.name}.aside")
    if is_file(one):
        shutil.copy2(one, aside)
    else:
        aside.touch()
    with replacing(one, durable=False) as making:
        shutil.copy2(other, making)
    rename_over(aside, other)


def _free_name(parent: Path, name: str) -> Path:
    number, target = 1, parent / name
    while exists(target):
        number += 1
        target = parent / f"{name}-{number}"
    parent.mkdir(parents=True, exist_ok=True)
    return target


def take_upload(files: list[str], name: str, places: Places) -> tuple[Path, str]:
    """Copies uploaded pictures and captions into a new dataset folder. Returns it and a sentence."""
    wanted = [Path(f) for f in files if Path(f).suffix.lower() in (*PICTURES, ".txt", ".csv", ".json", ".jsonl")]
    num_pictures = sum(path.suffix.lower() in PICTURES for path in wanted)
    if not num_pictures:
        raise Trouble(
            "empty_dataset", "There is no picture among the files.", hint=f"Choose {', '.join(PICTURES[:4])} files."
        )
    clean = "".join(c if c.isalnum() or c in "-_ " else "-" for c in name).strip() or time.strftime("set-%Y-%m-%d")
    target = _free_name(places.datasets, clean)
    target.mkdir(parents=True)
    for path in wanted:
        shutil.copy2(path, target / path.name)
    num_texts = sum(
        is_file((target / path.name).with_suffix(".txt")) for path in wanted if path.suffix.lower() in PICTURES
    )
    return target, f"{count_words(num_pictures, 'picture')}, {num_texts} with a caption, are now in {target}."
