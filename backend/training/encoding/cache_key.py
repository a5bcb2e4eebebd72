"""What an encoding depends on beside its picture or its words: the encoder's weights and how they are kept, what reads
for it, and the code.

Encodings are shared between runs by a key that holds all of it, so that a run whose encoder is stored in FP8,
quantized, merged with a LoRA or read by another tokenizer takes over none that it would not have made itself, bit for
bit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from backend.catalog.quantization.methods import METHODS
from backend.catalog.spec import PartSpec
from backend.engine.quantization.config import QuantizeConfig
from backend.schema.paths import places
from backend.schema.untrusted import exists, is_file, read_object_or_empty
from backend.system.atomic_files import write_text
from backend.training.encoding.encoding_cache import key_of
from backend.training.model.base_model import BaseModel, require_part
from backend.training.model.frozen_weights import Kept

LIBRARIES = ("torch", "transformers", "diffusers", "tokenizers", "pillow", "numpy")
CODE = (  # modules, and packages with all of theirs, by which an encoding is made, beside the family's own
    "backend.images.orientation",
    "backend.families._shared",
    "backend.engine.loading",
    "backend.engine.quantization",
    "backend.engine.pipeline.image_tensors",
    "backend.training.encoding.encoding_cache",
    "backend.training.encoding.conditioning",
    "backend.dataset.crops",
    "backend.dataset.reference_images",
)
READERS = 4  # threads that hash files


def encoder_key(
    base: BaseModel,
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kept: Kept | None = None,
    quantized: QuantizeConfig | None = None,
    adapter: Path | None = None,
) -> str:
    """A hash of everything of the part `name` that its results depend on: weights (every byte), what was understood of
    their files, class and configuration, storage and arithmetic, a LoRA that is merged into it, and the code and
    libraries that compute.

    Raises Trouble where the model has no such part.
    """
    require_part(base, name)
    part = base.spec.parts[name]
    return key_of(
        name,
        base.spec.family,
        base.spec.variant,
        *_read_as(part),
        *content_digests(part.files),
        str(torch.float32 if name == "vae" else dtype),
        device.type,
        *_stored(kept, quantized),
        *(content_digests([adapter]) if adapter else ()),
        _code(base),
    )


def _read_as(part: PartSpec) -> tuple[str, ...]:
    """The network, and which bytes of which file (by its number) are taken for which of its parameters, and as what."""
    number = {file: str(place) for place, file in enumerate(part.files)}
    tables = [
        {
            name: (number.get(at.file, at.file.name), at.dtype, at.shape, at.start, at.swapped)
            for name, at in table.items()
        }
        for table in (part.tensors, part.scales)
    ]
    return part.network, json.dumps([part.config, *tables], sort_keys=True, default=str)


def _stored(kept: Kept | None, quantized: QuantizeConfig | None) -> tuple[object, ...]:
    """How weights are rounded. Where they wait changes no result as long as every state is the computing one or the
    file's own."""
    if quantized:
        assert quantized.method is not None
        return (
            "quantized",
            quantized.method,
            *sorted(quantized.exclude_modules or ()),
            *_versions([package] if (package := METHODS[quantized.method].package) else []),
        )
    if kept is None:
        return ()
    states = kept.states.to_values()
    rounded = {states[f"{state}_dtype"] for state in ("offload", "onload", "preparing")} - {
        None,
        states["computation_dtype"],
    }
    return ("kept", json.dumps(states, sort_keys=True), kept.resident_blocks) if rounded else ()


def folder_digest(folder: Path) -> str:
    """A hash of the names and bytes of all files in a folder: a tokenizer's, a processor's."""
    files = sorted(path for path in folder.rglob("*") if is_file(path) and not path.name.startswith("."))
    return key_of(*(path.relative_to(folder).as_posix() for path in files), *content_digests(files))


def content_digests(files: Iterable[Path]) -> list[str]:
    """The sha256 of every file, all bytes of it; remembered in the cache folder by path, size and times."""
    index, files = places().cache / "weights.json", [Path(file) for file in files]
    known = _read_index(index)
    facts = {file: _facts(file) for file in files}
    missing = [file for file in files if known.get(str(file.absolute()), [])[:-1] != facts[file]]
    with ThreadPoolExecutor(READERS) as pool:
        found = dict(zip(missing, pool.map(_sha256, missing), strict=True))
    if found:
        fresh = {str(file.absolute()): [*facts[file], digest] for file, digest in found.items()}
        index.parent.mkdir(parents=True, exist_ok=True)
        write_text(index, json.dumps({**_read_index(index), **fresh}, ensure_ascii=False), durable=True)
    return [found[file] if file in found else known[str(file.absolute())][-1] for file in files]


def _facts(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_index(index: Path) -> dict[str, list]:
    known = read_object_or_empty(index)
    return {
        path: entry for path, entry in known.items() if isinstance(entry, list) and entry and isinstance(entry[-1], str)
    }


def _code(base: BaseModel) -> str:
    """A hash of the code that encodes, and the libraries' versions."""
    return key_of(*map(_source_digest, sorted({base.family.__name__, *CODE})), *_versions(LIBRARIES))


@functools.cache
def _source_digest(name: str) -> str:
    """Of a module's source, of a package's all; of its name where there is none to read (then the versions tell)."""
    found = importlib.util.find_spec(name)
    folders = found.submodule_search_locations if found else None
    files = sorted(path for folder in folders for path in Path(folder).glob("*.py")) if folders else []
    if not folders and found and found.origin:
        files = [Path(found.origin)]
    texts = [path.read_bytes() for path in files if exists(path)]
    return hashlib.sha256(b"".join(texts)).hexdigest() if texts else name


@functools.cache
def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} none"


def _versions(packages: Iterable[str]) -> list[str]:
    return [_version(package) for package in packages]
