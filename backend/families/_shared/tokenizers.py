"""Tokenizers from a model's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file

BPE_FILES = ("tokenizer.json", "vocab.json")  # one of them, of tokenizers by byte pairs


def load_from(folder: Path, kind: type, *, files: Sequence[str] = BPE_FILES, name: str = "tokenizer") -> Any:
    """The tokenizer of class `kind` in `folder`. Raises Trouble("missing_file") where none of `files` is there:
    transformers would make one that knows no word. `name`: what its folder is called in a model's."""
    if not any(is_file(Path(folder) / file) for file in files):
        raise Trouble(
            "missing_file",
            f"{folder} holds no tokenizer: no {' and no '.join(files)}.",
            hint=f"Name the model's folder {name}/.",
        )
    # Prompts are few and short. The library's pool of threads gains nothing, and where no thread can be made any
    # more it never answers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return kind.from_pretrained(folder, local_files_only=True)  # pyright: ignore[reportAttributeAccessIssue]
