"""The base model of a run: which files it is made of, and its parts as modules."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from backend.catalog.family import Family
from backend.catalog.hub.find_files import find_spec
from backend.catalog.spec import ModelSpec
from backend.engine.loading import check_finite
from backend.engine.loading.load import load_part
from backend.engine.quantization.config import QuantizeConfig
from backend.engine.quantization.quantized_part import load_quantized
from backend.families import by_name
from backend.schema.messages import Trouble
from backend.schema.training.config import ModelSection
from backend.training.model import frozen_weights
from backend.training.model.frozen_weights import Kept

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class BaseModel:
    """A model's description and family, and which entry of the command line each part came from."""

    spec: ModelSpec
    family: Family
    entries: dict[str, str] = field(default_factory=dict)  # part -> entry of model_paths or model_id_with_origin_paths


def find_base_model(section: ModelSection) -> BaseModel:
    """The model that a config's `model` section names; missing files of an id are downloaded. Raises Trouble."""
    spec, entries = find_spec(section)
    named = {
        part.name: next((entry for entry, paths in entries.items() if set(part.files) <= set(paths)), "")
        for part in (spec.parts.values() if entries else ())
    }
    return BaseModel(spec=spec, family=by_name(spec.family), entries=named)


def load_parts(
    base: BaseModel,
    names: Iterable[str],
    *,
    trained: Iterable[str],
    dtype: torch.dtype,
    device: torch.device,
    kept: Mapping[str, Kept] | None = None,
    quantized: Mapping[str, QuantizeConfig] | None = None,
    before_rounding: Callable[[str, torch.nn.Module], None] | None = None,
    split_bytes: int | None = None,
    through_ram: bool = False,
    stay_in_ram: bool = False,
) -> dict[str, torch.nn.Module]:
    """Modules by part. Those in `trained` are in float32, the VAE too (it runs once per picture); the rest in `dtype`.

    `kept` says where the weights of some frozen parts lie (`frozen.keeping`; `split_bytes`: in which pieces they are
    fetched), `quantized` which are rounded to fewer bits, after `before_rounding` has been called with each such part.
    `through_ram`: a part is loaded in RAM first. `stay_in_ram`: it stays there, for whoever spreads it over several
    devices, none of which has room for all of it.
    """
    parts = {}
    for name in names:
        require_part(base, name)
        check_finite.check(base.spec.parts[name])
        if kept and name in kept:
            module = frozen_weights.place(base.spec.parts[name], kept[name], device=device, split_bytes=split_bytes)
        elif quantized and name in quantized:
            module = load_quantized(
                base.spec.parts[name],
                quantized[name],
                dtype=dtype,
                device=device,
                before=partial(before_rounding, name) if before_rounding else None,
            )
        else:
            wanted = torch.float32 if name in trained or name == "vae" else dtype
            module = load_part(
                base.spec.parts[name], dtype=wanted, device="cpu" if through_ram or stay_in_ram else device
            )
            if not stay_in_ram:
                module.to(device)
        if name in trained:
            _own_weights(module)
        base.family.prepare(name, module)
        parts[name] = module
    return parts


def require_part(base: BaseModel, name: str) -> None:
    """Raises Trouble where the model was given without the part `name`."""
    if name not in base.spec.parts:
        raise Trouble(
            "missing_part",
            f"The model {base.spec.title} has no {name} here, and this run needs it.",
            hint=f"Name its file too; there are {', '.join(base.spec.parts)}.",
        )


def _own_weights(module: torch.nn.Module) -> None:
    """Gives every weight memory of its own: mapped pages of a file are no place for weights that change."""
    for weight in module.parameters():
        weight.data = weight.data.clone()


def part_digest(base: BaseModel, name: str) -> str:
    """A hash of a part's files: all bytes of small ones; header and samples throughout of large ones."""
    require_part(base, name)
    facts = [(path, path.stat()) for path in base.spec.parts[name].files]
    return _digest(tuple((path, fact.st_size, fact.st_mtime_ns) for path, fact in facts))


@functools.lru_cache(maxsize=16)
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """The hash of files by path, size and time: every result's header holds it, and reading them all again would hold
    up its save."""
    digest = hashlib.sha256()
    for path, size, _ in files:
        digest.update(str(size).encode())
        with path.open("rb") as stream:
            if size <= 2**26:
                while piece := stream.read(2**20):
                    digest.update(piece)
                continue
            digest.update(stream.read(2**20))
            for place in range(1, 64):
                stream.seek(size * place // 64)
                digest.update(stream.read(2**16))
    return digest.hexdigest()
