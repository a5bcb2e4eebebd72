"""Exact sizes of a model that is only a name: its listing, small files and the headers of its weights, read by range
requests.

    python -m backend headers Qwen/Qwen-Image

A few hundred kilobytes instead of forty gigabytes, and the tokenizer (some megabytes) where prompts are counted by it,
so that a name is planned as its folder is. What was read is kept in the cache folder as a model's folder whose weight
files end with their headers, beside a list of their true lengths, and serves for a month. Offline nothing is asked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backend.catalog.family import Family
from backend.catalog.formats.header import LARGEST_HEADER_BYTES, as_long_as
from backend.catalog.hub import clients, download
from backend.catalog.models import model_folder
from backend.catalog.models.checkpoint_files import SHARD
from backend.catalog.models.identify import identify_model
from backend.catalog.models.scan_cache import write_cache
from backend.catalog.spec import ModelSpec
from backend.schema.messages import Trouble, trouble_from_values
from backend.schema.paths import Places, places
from backend.schema.untrusted import read_object
from backend.system.atomic_files import rename_over

LARGEST_TOKENIZER_BYTES = 2**25
FIRST_BYTES = 2**15  # most headers of shards are shorter
KEPT_SECONDS = 30 * 86400.0
TRIED_SECONDS = 600.0  # before a name that gave nothing is asked for again
AT_ONCE = 4
MOST_FILES = 200
LISTED = "listed.json"  # what a name's folder is whole with


def known(model_id: str, families: Iterable[Family], *, here: Places | None = None) -> ModelSpec | Trouble | None:
    """The model `model_id` from what was read before, or why nothing could be; None where it has to be asked for."""
    for source in download.SOURCES:
        home = _home(model_id, source, here or places())
        said = _read(home / LISTED)
        if said is None:
            continue
        age = time.time() - said["time"]
        if "trouble" in said:
            if age < TRIED_SECONDS:
                return trouble_from_values(said["trouble"])
        elif age < KEPT_SECONDS:
            return _identified(home, said["lengths"], families)
    return None


def look(
    model_id: str, families: Iterable[Family], *, source: str | None = None, here: Places | None = None
) -> ModelSpec:
    """The model `model_id` from the headers of its files far away.

    Raises Trouble ("missing_model" offline, "download_failed", "not_recognised").
    """
    download._check_words(model_id, "")
    here = here or places()
    found = known(model_id, families, here=here)
    if isinstance(found, ModelSpec):
        return found
    if download.is_offline():
        raise Trouble(
            "missing_model",
            f"{model_id} is not on this machine, and asking for it is switched off.",
            hint="Allow downloads.",
        )
    source = download._source(source)
    home = _home(model_id, source, here)
    try:
        lengths, listed = _bring(model_id, source, home, tuple(families))
        spec = _identified(home, lengths, families)
        if _reads_prompts(spec.family, families) and _bring_tokenizer(model_id, source, home, listed):
            spec = _identified(home, lengths, families)
    except Trouble as trouble:
        _keep(home, {"time": time.time(), "trouble": trouble.to_values()})
        raise
    _keep(home, {"time": time.time(), "lengths": lengths})
    return spec


def _home(model_id: str, source: str, here: Places) -> Path:
    return folder(here) / source / model_id


def folder(here: Places) -> Path:
    """Where headers are kept. Its time changes when something new is known."""
    return here.cache / "headers"


def _keep(home: Path, said: dict) -> None:
    write_cache(home / LISTED, said)
    os.utime(home.parents[2])


def _read(path: Path) -> dict | None:
    try:
        said = read_object(path)
        return (
            said
            if isinstance(said, dict) and isinstance(said["time"], float) and ("lengths" in said or "trouble" in said)
            else None
        )
    except (Trouble, KeyError):
        return None


def _identified(home: Path, lengths: dict[str, int], families: Iterable[Family]) -> ModelSpec:
    stamp = (home / LISTED).stat().st_mtime_ns if (home / LISTED).exists() else 0
    kept = _KEPT.get(home)
    if kept is None or kept[0] != stamp or not stamp:
        with as_long_as({home / name: nbytes for name, nbytes in lengths.items()}):
            kept = _KEPT[home] = stamp, identify_model(home, families)
    return kept[1]


_KEPT: dict[Path, tuple[int, ModelSpec]] = {}  # thousands of tensors are parsed once, not at every keystroke


def _bring(
    model_id: str, source: str, home: Path, families: tuple[Family, ...]
) -> tuple[dict[str, int], dict[str, int]]:
    """Reads headers and small files into `home`; returns the true lengths of the weight files, and of all files."""
    listing, read = clients.CLIENTS[source][0], clients.READERS[source]
    try:
        sizes = {name: size for name, size in listing(model_id).items() if download._is_safe(name)}
        weights, small = _wanted(sizes, families)
        if not weights:
            raise Trouble("not_recognised", f"{model_id} has no safetensors files that could be a model's.")
        making = home.with_name(f".{home.name}.part")
        shutil.rmtree(making, ignore_errors=True)

        def bring(name: str) -> None:
            data = read(model_id, name, 0, sizes[name]) if name in small else _header(model_id, name, sizes[name], read)
            path = making / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(bring, (*weights, *small)))
    except Exception as error:
        raise download._failed(model_id, source, error) from None
    shutil.rmtree(home, ignore_errors=True)
    rename_over(making, home)
    return {name: sizes[name] for name in weights}, sizes


def _bring_tokenizer(model_id: str, source: str, home: Path, sizes: dict[str, int]) -> bool:
    """Reads the files that `tokens` counts by into `home`, all or none; whether there are any.

    A model is sized without them too.
    """
    for inside in model_folder.TOKENIZERS:
        older = [f"{inside}/{name}" for name in ("vocab.json", "merges.txt")]
        whole = [name for name in (f"{inside}/tokenizer.json",) if name in sizes] or older
        if not all(name in sizes for name in whole):
            continue
        wanted = [*whole, *(name for name in (f"{inside}/tokenizer_config.json",) if name in sizes)]
        if any(sizes[name] > LARGEST_TOKENIZER_BYTES for name in wanted):
            return False
        try:
            found = {name: clients.READERS[source](model_id, name, 0, sizes[name]) for name in wanted}
        except Exception:  # whatever a hub's client raises: prompts are guessed from their length then, as before
            return False
        for name, data in found.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(data)
        return True
    return False


def _wanted(sizes: dict[str, int], families: tuple[Family, ...]) -> tuple[list[str], list[str]]:
    """(weight files, small files): those of the folders in which a model's parts lie, else those at the top."""
    folders = {part.folder for family in families for part in family.PARTS.values()}
    inside = [name for name in sizes if name.rpartition("/")[0] in folders]
    chosen = inside or [name for name in sizes if "/" not in name]
    weights = [name for name in chosen if name.endswith(".safetensors")]
    # the names of shards say what belongs together; an index is as long as all headers, and only needed where they do
    # not
    index = (
        ()
        if all(SHARD.match(Path(name).stem) or _alone(name, weights) for name in weights)
        else (".safetensors.index.json",)
    )
    small = [name for name in (*chosen, "model_index.json", "scheduler/scheduler_config.json") if name in sizes]
    small = [name for name in dict.fromkeys(small) if name.endswith(("config.json", "model_index.json", *index))]
    return weights[:MOST_FILES], [name for name in small if sizes[name] < LARGEST_HEADER_BYTES]


def _alone(name: str, weights: list[str]) -> bool:
    return sum(other.rpartition("/")[0] == name.rpartition("/")[0] for other in weights) == 1


def _header(model_id: str, name: str, size: int, read) -> bytes:
    """The beginning of a safetensors file, up to the end of its header."""
    start = read(model_id, name, 0, min(FIRST_BYTES, size))
    length = 8 + struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
    if not 8 < length <= min(size, LARGEST_HEADER_BYTES):
        raise Trouble("damaged", f"{name} of {model_id} is no safetensors file.")
    if length > len(start):
        start += read(model_id, name, len(start), length)
    return start[:length]


def main(argv: list[str]) -> int:
    """`MODEL_ID`: says what the model's parts weigh. Also what the page starts for a name that it does not know."""
    from backend.families import FAMILIES  # what the command knows; callers of `look` hand theirs in

    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 2
    try:
        spec = look(argv[0], FAMILIES)
    except Trouble as trouble:
        print(trouble, file=sys.stderr)
        return 1
    with contextlib.suppress(BrokenPipeError):
        for name, part in spec.parts.items():
            print(f"{name}: {part.nbytes / 2**30:.3f} GiB in {len(part.files)} files, {part.storage}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


def _reads_prompts(name: str, families: Iterable[Family]) -> bool:
    """Whether the family counts a prompt's tokens by the model's own tokenizer: that file is worth fetching beside the
    headers."""
    return any(name == family.NAME and family.COUNTS_TOKENS for family in families)
