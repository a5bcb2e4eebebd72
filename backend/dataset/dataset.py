"""What a dataset holds: pictures, their captions and sizes, read from folders and metadata files. No torch."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from backend.dataset.captions import check_caption, with_trigger
from backend.dataset.metadata import read_rows
from backend.images.orientation import shown_size
from backend.schema.json_values import is_printable, whole
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file, is_folder, left_out_words, read_object_or_empty, unnamed
from backend.system.text_files import listed, read_text

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif")
MASK_SUFFIX = ".mask.png"
READERS = 4  # threads that measure files

MOST_INDEX_BYTES = 2**28  # of what is remembered of pictures: a million of them


class FileEntry(NamedTuple):
    """What the index file remembers of a picture file; `digest` is its sha256 in hex ("" where it was not read)."""

    nbytes: int
    mtime_ns: int  # st_mtime_ns: an entry counts for as long as size and time are these
    width: int  # pixels, as shown (EXIF orientation applied)
    height: int
    digest: str


@dataclass(frozen=True)
class Picture:
    """A picture that samples begin from: where it is, how large it is in the file (pixels), and the sha256 of the
    file."""

    path: Path
    width: int = 0
    height: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Item:
    """One picture: where it is, what it is called, how large it is in the file (pixels) and what it counts."""

    path: Path
    captions: tuple[str, ...]
    width: int = 0
    height: int = 0
    digest: str = ""  # sha256 of the file
    mask: Path | None = None
    weight: float = 1.0  # how often it is shown against the others
    prior: bool = False  # drawn by the untouched model
    seed: int | None = None  # of the noise that a teacher drew it from
    steps: int | None = None  # in which a student is to draw it
    edits: tuple[Picture, ...] = ()  # what it is edited from, for a model that edits

    @property
    def files(self) -> tuple[Path, ...]:
        """Every picture file that it is read from."""
        return (self.path, *(one.path for one in self.edits), *([self.mask] if self.mask else []))


@dataclass(frozen=True)
class Dataset:
    """Items in the order of their files, and sentences about what was unusual."""

    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()
    broken: tuple[tuple[Path, str], ...] = field(default=())


def read_dataset(
    section,
    *,
    trigger: str = "",
    index: Path | None = None,
    edits: bool = False,
    sizes_only: dict[str, FileEntry] | None = None,
) -> Dataset:
    """The dataset that a config's `dataset` section names.

    `index` is a JSON file that remembers sizes and digests by path, size and time. `edits`: every sample is edited from
    pictures, in the column `edit_image`; otherwise that column is not read. `sizes_only`: only headers of pictures are
    read, so there are no digests; what was found is remembered in it. Raises Trouble for a missing or empty folder, a
    metadata file without the right columns, and (unless `skip_broken_pictures`) a picture that cannot be read.
    """
    bases = listed(section.dataset_base_path)
    metadata = listed(section.dataset_metadata_path)
    if not bases and not metadata:
        raise Trouble(
            "no_dataset", "No dataset folder is given.", hint="Set --dataset_base_path to a folder of pictures."
        )
    if metadata and bases and len(metadata) != len(bases):
        raise Trouble(
            "bad_value",
            f"There are {len(bases)} dataset folders but {len(metadata)} metadata files.",
            hint="Give one metadata file for each folder, or none.",
        )
    weights = _weights(section.dataset_weights, max(len(bases), len(metadata)))
    items: list[Item] = []
    notes: list[str] = []
    for number, weight in enumerate(weights):
        base = Path(bases[number]) if bases else Path(metadata[number]).parent
        if not is_folder(base):
            words = "is a file" if is_file(base) else "does not exist"
            raise Trouble(
                "missing_file", f"The dataset folder {base} {words}.", hint="Check the path (--dataset_base_path)."
            )
        if metadata:
            found = _from_metadata(Path(metadata[number]), base, section, notes, edits=edits)
        elif edits:
            raise Trouble(
                "no_edit_image",
                f"Nothing says which pictures those in {base} are edited from.",
                hint=(
                    "Give a metadata file with the columns image, prompt and edit_image "
                    f"(--dataset_metadata_path){_tables_in(base)}."
                ),
            )
        else:
            found = _from_folder(base, notes)
        items += [_finished(item, weight, trigger, section.masked_loss) for item in found]
    return _measured(items, notes, index, skip_broken=section.skip_broken_pictures, sizes_only=sizes_only)


def read_folder(base: Path, *, prior: bool = False, sizes_only: dict[str, FileEntry] | None = None) -> Dataset:
    """A plain folder of captioned pictures, for pictures that are trained along. `sizes_only` as for `read_dataset`."""
    notes: list[str] = []
    if not is_folder(base):
        raise Trouble("missing_file", f"The folder {base} does not exist.", hint="Check --regularisation_path.")
    items = [replace(item, prior=prior) for item in _from_folder(base, notes)]
    return _measured(items, notes, None, skip_broken=False, sizes_only=sizes_only)


def _weights(text: str | None, count: int) -> list[float]:
    parts = listed(text)
    if not parts:
        return [1.0] * count
    try:
        weights = [float(part) for part in parts]
    except ValueError:
        raise Trouble("bad_value", f"Dataset weights (--dataset_weights) are {text!r}, not numbers.") from None
    if len(weights) != count or any(not 0 < weight <= 1000 for weight in weights):
        raise Trouble("bad_value", f"There are {count} datasets but the weights are {text!r}; each must be above 0.")
    return weights


def _finished(item: Item, weight: float, trigger: str, masked: str) -> Item:
    captions = tuple(with_trigger(caption, trigger) for caption in item.captions)
    mask = item.path.with_name(item.path.stem + MASK_SUFFIX) if masked == "file" else None
    if mask is not None and not is_file(mask):
        mask = None
    return replace(item, captions=captions, mask=mask, weight=weight)


def _from_folder(base: Path, notes: list[str]) -> Iterator[Item]:
    paths, texts, bad = _listing(base)
    if bad:
        notes.append(left_out_words(bad, base))
    if not paths:
        raise Trouble(
            "empty_dataset", f"There are no pictures in {base}.", hint=f"Put {', '.join(SUFFIXES[:4])} files there."
        )
    without = 0
    for path in paths:
        beside = path.with_suffix(".txt")
        caption, encoding = read_text(beside) if os.path.normcase(beside) in texts else ("", "utf-8")
        check_caption(caption, f"The caption {beside.name}")
        without += not caption
        if encoding not in ("utf-8", "utf-8-sig"):
            notes.append(f"{beside.name} was read as {encoding}.")
        yield Item(path=path, captions=(caption,))
    if without:
        notes.append(f"{without} of {len(paths)} pictures in {base.name} have no caption.")


def _listing(base: Path) -> tuple[list[Path], set[str], list[str]]:
    """The pictures in `base` and the folders below it in their order, the paths of the text files, and what has a name
    that is not in UTF-8, which nothing written about a run could hold. What begins with a dot is none of them."""
    pictures, texts, bad = [], set(), []
    for folder, inner, names in os.walk(base):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        bad += unnamed(inner)
        inner[:] = [name for name in inner if is_printable(name)]
        for name in sorted(names):
            suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122  # ten thousand names
            if suffix == ".txt":
                texts.add(os.path.normcase(Path(folder, name)))
            elif suffix in SUFFIXES and not name.startswith(".") and not name.endswith(MASK_SUFFIX):
                if is_printable(name):
                    pictures.append(Path(folder, name))
                else:
                    bad += unnamed([name])
    return sorted(pictures), texts, bad


def _tables_in(base: Path) -> str:
    """Words about files in a dataset's folder that may be what is looked for."""
    found = sorted(
        path.name
        for path in base.iterdir()
        if path.suffix.lower() in (".csv", ".json", ".jsonl") and path.name != "loft.json"
    )
    return f"; there is {' and '.join(found[:3])}" if found else ""


def _from_metadata(path: Path, base: Path, section, notes: list[str], *, edits: bool) -> Iterator[Item]:
    for row in read_rows(path, section, notes, edits=edits):
        pictures = tuple(Picture(base / name) for name in row.edits)
        yield Item(path=base / row.picture, captions=row.captions, edits=pictures, seed=row.seed, steps=row.steps)


def _measured(
    items: list[Item],
    notes: list[str],
    index: Path | None,
    *,
    skip_broken: bool,
    sizes_only: dict[str, FileEntry] | None = None,
) -> Dataset:
    known = _read_index(index) if sizes_only is None else sizes_only
    paths = list(dict.fromkeys(path for item in items for path in item.files))
    measure = _measure if sizes_only is None else _measure_size
    found = dict(zip(paths, _entries(paths, known, until_broken=not skip_broken, measure=measure)))
    errors = {path: entry for path, entry in found.items() if isinstance(entry, OSError)}
    entries = {path: entry for path, entry in found.items() if not isinstance(entry, OSError)}
    used: dict[str, FileEntry] = {}
    good: list[Item] = []
    broken: list[tuple[Path, str]] = []
    for item in items:
        lost = next((path for path in item.files if path in errors), None)
        if lost is not None:
            if not skip_broken:
                raise _broken(lost, errors[lost]) from None
            broken.append((lost, str(errors[lost])))
            continue
        used |= {str(path.absolute()): entries[path] for path in item.files}
        entry = entries[item.path]
        edits = tuple(_picture(one.path, entries[one.path]) for one in item.edits)
        good.append(replace(item, width=entry.width, height=entry.height, digest=entry.digest, edits=edits))
    if not good:
        raise Trouble("empty_dataset", f"None of the {len(items)} pictures can be read.")
    if sizes_only is not None:
        sizes_only |= used
    notes += [f"{path.name} cannot be read and is left out: {why}." for path, why in broken]
    if index is not None and used != known:
        _write_index(index, {**known, **used})
    return Dataset(items=tuple(good), notes=tuple(notes), broken=tuple(broken))


def _picture(path: Path, entry: FileEntry) -> Picture:
    return Picture(path, entry.width, entry.height, entry.digest)


def _broken(path: Path, error: OSError) -> Trouble:
    if isinstance(error, FileNotFoundError) or error.errno == errno.ENAMETOOLONG:
        return Trouble(
            "missing_file", f"The picture {path} does not exist.", hint="Correct its name where it is given."
        )
    why = "it is empty or no picture" if isinstance(error, UnidentifiedImageError) else error
    return Trouble(
        "broken_picture",
        f"The picture {path} cannot be read ({why}).",
        hint="Replace or remove it, or set --skip_broken_pictures.",
    )


def measure(paths: Iterable[Path]) -> tuple[Picture, ...]:
    """Pictures that belong to no dataset, with their sizes and digests.

    Raises Trouble for the first that cannot be read.
    """
    found = []
    for path in paths:
        entry = _measure(path)
        if isinstance(entry, OSError):
            raise _broken(path, entry)
        found.append(_picture(path, entry))
    return tuple(found)


def _entries(
    paths: list[Path],
    known: dict[str, FileEntry],
    *,
    until_broken: bool,
    measure: Callable[[Path], FileEntry | OSError],
) -> list[FileEntry | OSError]:
    """What is to be known of each picture file, or why it cannot be.

    `until_broken`: the list ends with the first that cannot.

    Files that are not known yet are read by several threads, for reading and hashing let each other run.
    """
    remembered = [_known(path, known) for path in paths]
    missing = [number for number, entry in enumerate(remembered) if entry is None]
    pool = ThreadPoolExecutor(READERS)
    try:
        for number, entry in zip(missing, pool.map(measure, [paths[number] for number in missing])):
            remembered[number] = entry
            if until_broken and isinstance(entry, OSError):
                return [one for one in remembered[: number + 1] if one is not None]
    finally:
        pool.shutdown(cancel_futures=True)
    return [entry for entry in remembered if entry is not None]


def _known(path: Path, known: dict[str, FileEntry]) -> FileEntry | OSError | None:
    try:
        status = path.stat()
    except OSError as error:
        return error
    except ValueError as error:  # a name that no file can have
        return FileNotFoundError(str(error))
    if not stat.S_ISREG(status.st_mode):  # a pipe would be read for ever
        return OSError("it is no file")
    entry = known.get(str(path.absolute()))
    return entry if entry is not None and entry[:2] == (status.st_size, status.st_mtime_ns) else None


def _measure(path: Path) -> FileEntry | OSError:
    """[bytes, time, width, height, sha256] of a picture file; the header only is decoded, of a mask all: it is not
    encoded before training."""
    try:
        status, data = path.stat(), path.read_bytes()
        with Image.open(io.BytesIO(data)) as picture:
            width, height = shown_size(picture)
            if path.name.endswith(MASK_SUFFIX):
                picture.load()
    except OSError as error:
        return error
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return OSError(str(error).rstrip("."))
    return FileEntry(status.st_size, status.st_mtime_ns, width, height, hashlib.sha256(data).hexdigest())


def _measure_size(path: Path) -> FileEntry | OSError:
    """As `_measure`, without the digest: of a large set of pictures only headers are read."""
    try:
        status = path.stat()
        with Image.open(path) as picture:
            width, height = shown_size(picture)
    except OSError as error:
        return error
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return OSError(str(error).rstrip("."))
    return FileEntry(status.st_size, status.st_mtime_ns, width, height, "")


def _read_index(index: Path | None) -> dict[str, FileEntry]:
    known = read_object_or_empty(index, most=MOST_INDEX_BYTES) if index is not None else {}
    return {path: FileEntry(*entry) for path, entry in known.items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    """Whether a remembered entry is as `_measure` makes it."""
    if not isinstance(entry, list) or len(entry) != 5 or not isinstance(entry[4], str):
        return False
    return all(whole(number, high=2**63 - 1) is not None for number in entry[:4])


def _write_index(index: Path, entries: dict[str, FileEntry]) -> None:
    from backend.system.atomic_files import write_text

    index.parent.mkdir(parents=True, exist_ok=True)
    write_text(index, json.dumps(entries, ensure_ascii=False), durable=True)
