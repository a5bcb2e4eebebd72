"""Locate the tokenizers and, for image editing models, the image processor of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from backend.catalog.hub.download import resolve
from backend.catalog.models import model_folder
from backend.schema.messages import Trouble
from backend.schema.training.config import ModelSection
from backend.schema.untrusted import exists, is_folder
from backend.training.model.base_model import BaseModel


def tokenizer_folders(section: ModelSection, base: BaseModel) -> dict[str, Path]:
    """Name -> folder of each of the family's tokenizers: the one that the config names, of the first, or those beside
    the model or one of its parts. Raises Trouble where there is none."""
    first = next(iter(base.family.TOKENIZERS))
    return {
        name: _folder(
            "tokenizer",
            section.tokenizer_path if name == first else None,
            base.spec.tokenizers.get(name) or _beside(base, partial(model_folder.tokenizer_in, name=described.folder)),
            described.usual,
            base,
        )
        for name, described in base.family.TOKENIZERS.items()
    }


def processor_folder(section: ModelSection, base: BaseModel) -> Path:
    """The processor in the same way."""
    usual = base.family.EDITS[base.spec.variant].usual_processor
    own = base.spec.processor or _beside(base, model_folder.processor_in)
    return _folder("processor", section.processor_path, own, usual, base)


def _folder(kind: str, named: str | None, own: Path | None, usual: tuple, base: BaseModel) -> Path:
    found = _named(named) if named else own
    if found is None and base.entries and usual:
        return resolve(*usual)[0]
    if found is None or not is_folder(found):
        raise Trouble(
            "missing_file",
            f"The {kind} of {base.spec.title} was not found ({named or found or 'there is none beside it'}).",
            hint=f"Set --{kind}_path.",
        )
    return found


def _named(text: str) -> Path:
    if exists(Path(text)) or ":" not in text:
        return Path(text)
    model, _, pattern = text.rpartition(":")
    return resolve(model, pattern)[0]


def _beside(base: BaseModel, look: Callable[[Path], Path | None]) -> Path | None:
    """What `look` finds in the folder of any part's model, for parts that were given one by one."""
    roots = [file.parent.parent for part in base.spec.parts.values() for file in part.files[:1]]
    return next((found for root in roots if (found := look(root)) is not None), None)
