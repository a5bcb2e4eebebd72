"""The base model of a run: which files it is made of, and its parts as modules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import torch

from backend.catalog.identify import identify_files, identify_model
from backend.catalog.spec import ModelSpec
from backend.engine.load import load_part
from backend.families import FAMILIES, by_name
from backend.schema.messages import Trouble
from backend.schema.places import ASSETS, places
from backend.schema.vram import VramConfig
from backend.training import frozen

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Base:
    """A model's description and family, and which entry of the command line each part came from."""

    spec: ModelSpec
    family: ModuleType
    entries: dict[str, str] = field(default_factory=dict)  # part -> entry of model_paths or model_id_with_origin_paths


def find_base(section) -> Base:
    """The model that a config's `model` section names. Raises Trouble where files are missing or not recognised."""
    entries = _entries(section)
    if not entries:
        spec = identify_model(_model_folder(section.model), FAMILIES)
        return Base(spec=spec, family=by_name(spec.family))
    spec = identify_files(list(entries.values()), FAMILIES)
    spec = _with_neighbours(spec)
    named = {}
    for part in spec.parts.values():
        named[part.name] = next((entry for entry, paths in entries.items() if set(part.files) <= set(paths)), "")
    return Base(spec=spec, family=by_name(spec.family), entries=named)


def _with_neighbours(spec: ModelSpec) -> ModelSpec:
    """Adds the tokenizer and the schedule that lie beside parts that were named one by one."""
    for part in spec.parts.values():
        root = part.files[0].parent.parent
        schedule = root / "scheduler" / "scheduler_config.json"
        if (root / "tokenizer").is_dir():
            known = json.loads(schedule.read_text(encoding="utf-8")) if schedule.is_file() else spec.scheduler
            return replace(spec, tokenizer=spec.tokenizer or root / "tokenizer", scheduler=known)
    return spec


def tokenizer_folder(section, base: Base) -> Path | None:
    """The tokenizer that the config names, or the one beside the model."""
    if not section.tokenizer_path:
        return base.spec.tokenizer
    if ":" in section.tokenizer_path and not Path(section.tokenizer_path).exists():
        model, _, pattern = section.tokenizer_path.rpartition(":")
        return _model_folder(model) / pattern
    return Path(section.tokenizer_path)


def _entries(section) -> dict[str, list[Path]]:
    """What was written for a model's files -> those files."""
    entries: dict[str, list[Path]] = {}
    if section.model_paths:
        try:
            listed = json.loads(section.model_paths)
        except ValueError as error:
            raise Trouble("bad_value", f"Model paths (--model_paths) are not JSON: {error}.") from None
        for entry in [listed] if isinstance(listed, str) else listed:
            shards = [entry] if isinstance(entry, str) else entry
            entries[",".join(shards)] = [file for shard in shards for file in _files(Path(shard))]
    for entry in (section.model_id_with_origin_paths or "").split(","):
        if not entry.strip():
            continue
        model, _, pattern = entry.strip().rpartition(":")
        if not model:
            raise Trouble(
                "bad_value", f"{entry.strip()!r} in --model_id_with_origin_paths is not `id:pattern`.",
                hint='For example "loft/starter:transformer/*.safetensors".',
            )  # fmt: skip
        folder = _model_folder(model)
        found = sorted(folder.glob(pattern))
        if not found:
            raise Trouble("missing_file", f"{model} has no file {pattern} in {folder}.", hint="Check the pattern.")
        entries[entry.strip()] = found
    return entries


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    if not path.is_file():
        raise Trouble("missing_file", f"There is no model file {path}.", hint="Check --model_paths.")
    return [path]


def _model_folder(model: str) -> Path:
    """The folder of a model id: in the data folder, then among what ships; a path is taken as it is."""
    for candidate in (Path(model), places().models / model, ASSETS / model.rpartition("/")[2]):
        if candidate.exists():
            return candidate
    raise Trouble("missing_file", f"There is no model {model!r}.", hint=f"It was looked for in {places().models}.")


def load_parts(
    base: Base,
    names: Iterable[str],
    *,
    trained: Iterable[str],
    dtype: torch.dtype,
    device: torch.device,
    kept: Mapping[str, VramConfig] | None = None,
    through_ram: bool = False,
) -> dict[str, torch.nn.Module]:
    """Modules by part. Those in `trained` are in float32, the VAE too (it runs once per picture); the rest in `dtype`.

    `kept` says where the weights of some frozen parts lie (`frozen.keeping`). `through_ram`: a part is loaded in RAM first.
    """
    parts = {}
    for name in names:
        if name not in base.spec.parts:
            raise Trouble(
                "missing_part", f"The model {base.spec.title} has no {name} here, and this run needs it.",
                hint=f"Name its file too; there are {', '.join(base.spec.parts)}.",
            )  # fmt: skip
        if kept and name in kept:
            module = frozen.place(base.spec.parts[name], kept[name], device=device)
        else:
            wanted = torch.float32 if name in trained or name == "vae" else dtype
            module = load_part(base.spec.parts[name], dtype=wanted, device="cpu" if through_ram else device)
            module.to(device)
        if name in trained:
            _own_weights(module)
        if hasattr(base.family, "prepare"):
            base.family.prepare(name, module)
        parts[name] = module
    return parts


def _own_weights(module: torch.nn.Module) -> None:
    """Gives every weight memory of its own: mapped pages of a file are no place for weights that change."""
    for weight in module.parameters():
        weight.data = weight.data.clone()


def part_digest(base: Base, name: str) -> str:
    """A hash of a part's files: all bytes of small ones; header and samples throughout of large ones."""
    digest = hashlib.sha256()
    for path in base.spec.parts[name].files:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            if size <= 2**26:
                digest.update(file.read())
                continue
            digest.update(file.read(2**20))
            for place in range(1, 64):
                file.seek(size * place // 64)
                digest.update(file.read(2**16))
    return digest.hexdigest()
