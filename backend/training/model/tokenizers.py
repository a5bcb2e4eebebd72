"""What reads words and pictures for a run's text encoder: its tokenizer and, of a model that edits, its processor of pictures."""

from __future__ import annotations

from pathlib import Path

from backend.catalog.hub.download import resolve
from backend.catalog.models import model_folder
from backend.schema.messages import Trouble
from backend.training.model.base_model import Base

# Where they come from if they lie beside none of the parts: a script names parts of several models, and says nothing of these.
USUAL = {"tokenizer": ("Qwen/Qwen-Image", "tokenizer/"), "processor": ("Qwen/Qwen-Image-Edit", "processor/")}


def tokenizer_folder(section, base: Base) -> Path:
    """The tokenizer that the config names, or the one beside the model or one of its parts. Raises Trouble where there is none."""
    return _folder("tokenizer", section.tokenizer_path, base.spec.tokenizer, base)


def processor_folder(section, base: Base) -> Path:
    """The processor in the same way."""
    return _folder("processor", section.processor_path, base.spec.processor, base)


def _folder(kind: str, named: str | None, own: Path | None, base: Base) -> Path:
    found = _named(named) if named else own or _beside(kind, base)
    if found is None and base.entries and base.spec.family == "qwen_image":
        return resolve(*USUAL[kind])[0]
    if found is None or not found.is_dir():
        raise Trouble(
            "missing_file",
            f"The {kind} of {base.spec.title} was not found ({named or found or 'there is none beside it'}).",
            hint=f"Set --{kind}_path.",
        )
    return found


def _named(text: str) -> Path:
    if Path(text).exists() or ":" not in text:
        return Path(text)
    model, _, pattern = text.rpartition(":")
    return resolve(model, pattern)[0]


def _beside(kind: str, base: Base) -> Path | None:
    """The one in the folder of any part's model, for parts that were given one by one."""
    look = model_folder.tokenizer_in if kind == "tokenizer" else model_folder.processor_in
    roots = [file.parent.parent for part in base.spec.parts.values() for file in part.files[:1]]
    return next((found for root in roots if (found := look(root)) is not None), None)
