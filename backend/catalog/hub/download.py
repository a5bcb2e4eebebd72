"""Where the files of a model are: here already, or brought from ModelScope or Hugging Face. No torch of its own.

    python -m backend download Qwen/Qwen-Image "transformer/*.safetensors"

Environment: DIFFSYNTH_MODEL_BASE_PATH (folder of models), DIFFSYNTH_SKIP_DOWNLOAD=true (offline),
DIFFSYNTH_DOWNLOAD_SOURCE ("modelscope" or "huggingface"); also HF_HUB_OFFLINE=1. What it leaves open the preferences
say. Offline means that no client is even imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from backend.catalog.hub.clients import CLIENTS, MARKS
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS, PROJECT, Places, places
from backend.schema.preferences import Preferences
from backend.schema.settings import from_file_text
from backend.schema.untrusted import exists, expanded, is_file, is_folder, read_bytes

SOURCES = tuple(CLIENTS)
OnBytes = Callable[[int, int], None]  # done, total
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[^/]*)?")


def resolve(
    model_id: str,
    pattern: str,
    *,
    folders: Iterable[Path] | None = None,
    source: str | None = None,
    offline: bool | None = None,
    here: Places | None = None,
    on_bytes: OnBytes | None = None,
) -> list[Path]:
    """Files of `model_id` that match `pattern`, or for a pattern that ends in "/" (or is empty) the folder itself.

    Looked for in every place of `local_roots`; what lies in none of them is downloaded into the first. Raises Trouble
    ("missing_model" offline or where no source has it, "download_failed", "disk_full", "bad_value").
    """
    _check_words(model_id, pattern)
    for root in local_roots(model_id, folders=folders, here=here):
        found = complete_matches(root, pattern)
        if found:
            return found
    wanted = f"{model_id}: {pattern or 'all files'}"
    if is_offline() if offline is None else offline:
        raise Trouble(
            "missing_model",
            f"{wanted} is not in {' or '.join(map(str, model_folders(here)))}, and downloads are switched off.",
            hint=f"Put it into {model_folders(here)[0] / model_id}, or allow downloads.",
        )
    root = model_folders(here)[0] / model_id
    download(model_id, pattern, root, source=source, on_bytes=on_bytes)
    found = complete_matches(root, pattern)
    if not found:
        raise Trouble(
            "missing_model", f"{wanted} was not found at {_source(source)}.", hint="Check the name and the pattern."
        )
    return found


def find_model(name: str, *, folders: Iterable[Path] | None = None, here: Places | None = None) -> Path:
    """The folder or file of the model called `name`: where it lies in a models folder (an id that is here already, or a
    folder without an owner), or a path. `folders`: as for `local_roots`. Raises Trouble("missing_model")."""
    if _is_inner(name):
        for root in local_roots(name, folders=folders, here=here):
            if is_folder(root) or is_file(root):
                return root
    path = expanded(name)
    if name.strip() and exists(path):
        return path
    raise Trouble(
        "missing_model",
        f"There is no model {name!r} on this machine.",
        hint=f"Put it into {model_folders(here)[0]}, or fetch it: python -m backend download {name}"
        if _ID.fullmatch(name)
        else "Choose another model.",
    )


def _is_inner(name: str) -> bool:
    """Whether `name` says a place inside a folder, and neither the folder itself nor what lies outside."""
    path = Path(name.strip())
    return bool(path.parts) and not path.is_absolute() and not path.drive and ".." not in path.parts


def model_folders(here: Places | None = None) -> list[Path]:
    """The folders that models are looked for in by name, first to last; downloads go into the first.

    That of `here`, or of LOFT_DATA or DIFFSYNTH_MODEL_BASE_PATH; `models` of the working folder, if it is there; Loft's
    own.
    """
    said = here is not None or os.environ.get("LOFT_DATA") or os.environ.get("DIFFSYNTH_MODEL_BASE_PATH")
    working = Path.cwd() / "models"
    found = [
        *([(here or places()).models] if said else []),
        *([working] if is_folder(working) else []),
        PROJECT / "models",
    ]
    return list(dict.fromkeys(folder.absolute() for folder in found))


def local_roots(model_id: str, *, folders: Iterable[Path] | None = None, here: Places | None = None) -> list[Path]:
    """Where the folder of `model_id` may lie, in the order in which they are asked. `folders`: after the usual ones;
    None for those of the preferences."""
    more = map(Path, preferences(here).model_folders) if folders is None else folders
    roots = [Path(folder) / model_id for folder in (*model_folders(here), *more)]
    owner, _, name = model_id.partition("/")
    return [*roots, ASSETS / name] if owner == "loft" else roots


def complete_matches(root: Path, pattern: str) -> list[Path]:
    """What matches `pattern` under `root`, sorted; empty where something is known to be lacking: a shard, or an
    unfinished download."""
    if not is_folder(root) or exists(_mark(root, pattern)):
        return []
    if pattern in ("", "./") or pattern.endswith("/"):
        folder = root / pattern
        return [folder] if is_folder(folder) and any(folder.iterdir()) else []
    found = sorted(path for path in root.glob(pattern) if is_file(path) and not path.name.startswith("."))
    return found if not _lacking_shards(path.name for path in found) else []


def _lacking_shards(names: Iterable[str]) -> bool:
    groups: dict[tuple, set[int]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match:
            groups.setdefault((match[1], int(match[3]), match[4]), set()).add(int(match[2]))
    return any(len(numbers) < count for (_, count, _), numbers in groups.items())


def is_id(name: str) -> bool:
    """Whether `name` looks like a model's id at a hub: owner/name."""
    return _ID.fullmatch(name) is not None and ".." not in name


def _check_words(model_id: str, pattern: str) -> None:
    if not is_id(model_id):
        raise Trouble("bad_value", f"{model_id!r} is no model id; one looks like maker/model.")
    if not _is_safe(pattern):
        raise Trouble("bad_value", f"The pattern {pattern!r} leads out of the model's folder.")


def _is_safe(name: str) -> bool:
    return not (
        name.startswith(("/", "\\", "~")) or ":" in name or ".." in PurePosixPath(name.replace("\\", "/")).parts
    )


def is_offline() -> bool:
    """Whether the environment or the preferences forbid downloads."""
    words = (os.environ.get(name, "").strip().lower() for name in ("DIFFSYNTH_SKIP_DOWNLOAD", "HF_HUB_OFFLINE"))
    return any(word in ("1", "true", "yes", "on") for word in words) or preferences().offline


def _source(source: str | None) -> str:
    """The source that was asked for, else the environment's, else the preferences'."""
    named = source or os.environ.get("DIFFSYNTH_DOWNLOAD_SOURCE") or preferences().download_source
    chosen = named.strip().lower()
    if chosen not in SOURCES:
        raise Trouble("bad_value", f"{chosen!r} is no download source; it can be {' or '.join(SOURCES)}.")
    return chosen


def preferences(here: Places | None = None) -> Preferences:
    """What the person set in this data folder; the defaults where nothing is. Raises Trouble("bad_file")."""
    try:
        return from_file_text(Preferences, read_bytes((here or places()).user / "preferences.json"))
    except Trouble as trouble:
        if trouble.kind == "missing_file":
            return Preferences()
        raise


def download(
    model_id: str, pattern: str, root: Path, *, source: str | None = None, on_bytes: OnBytes | None = None
) -> None:
    """Brings what matches `pattern` and is not yet under `root`; what an earlier try has brought is kept and
    continued."""
    source = _source(source)
    listing, fetch = CLIENTS[source]
    try:
        sizes = {name: size for name, size in listing(model_id).items() if _is_safe(name) and matches(name, pattern)}
    except Exception as error:
        raise _failed(model_id, source, error) from None
    if not sizes:
        return
    missing = {name: size for name, size in sizes.items() if not _is_here(root / name, size)}
    _check_room(root, sum(missing.values()))
    mark = _mark(root, pattern)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(pattern, encoding="utf-8")
    if missing:
        before = sum(sizes.values()) - sum(missing.values())
        tell = (lambda done: on_bytes(before + done, sum(sizes.values()))) if on_bytes else None
        try:
            fetch(model_id, root, sorted(missing), tell)
        except Exception as error:
            raise _failed(model_id, source, error) from None
    lacking = [name for name, size in sizes.items() if not _is_here(root / name, size)]
    if lacking:
        raise _failed(model_id, source, OSError(f"{lacking[0]} did not arrive whole"))
    mark.unlink()
    with contextlib.suppress(OSError):  # another pattern may still be on its way
        mark.parent.rmdir()


def matches(name: str, pattern: str) -> bool:
    """Whether the file `name` ("a/b.c") is meant by `pattern`; a star does not cross a slash."""
    if pattern in ("", "./"):
        return True
    if pattern.endswith("/"):
        return name.startswith(pattern)
    names, words = name.split("/"), pattern.split("/")
    return len(names) == len(words) and all(fnmatchcase(part, word) for part, word in zip(names, words))


def _mark(root: Path, pattern: str) -> Path:
    return root / MARKS / hashlib.sha256(pattern.encode()).hexdigest()[:16]


def _is_here(path: Path, size: int) -> bool:
    return is_file(path) and path.stat().st_size == size


def _check_room(root: Path, needed: int) -> None:
    folder = next(parent for parent in (root, *root.parents) if exists(parent))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise Trouble(
            "disk_full",
            f"{needed / 1e9:.1f} GB are to be downloaded to {root}, but only {free / 1e9:.1f} GB are free there.",
            hint="Free some space, or set DIFFSYNTH_MODEL_BASE_PATH to another disk.",
        )


def _failed(model_id: str, source: str, error: Exception) -> Trouble:
    if isinstance(error, Trouble):
        return error
    name = "ModelScope" if source == "modelscope" else "Hugging Face"
    return Trouble(
        "download_failed",
        (
            f"{model_id} could not be downloaded from {name}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}."
        ),
        hint="Is the name right, is the machine online? A second try goes on where this one ended.",
        detail=repr(error),
    )


def main(argv: list[str]) -> int:
    """`MODEL_ID [PATTERN ...]`: says where the files are, after bringing what is missing."""
    if not argv or argv[0].startswith("-"):
        print(__doc__)
        return 2
    try:
        for pattern in argv[1:] or [""]:
            for path in resolve(argv[0], pattern):
                print(path)
    except Trouble as trouble:
        print(trouble, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
