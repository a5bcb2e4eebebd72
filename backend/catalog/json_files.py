"""JSON files beside weights: config.json, model_index.json, indexes of shards."""

from __future__ import annotations

from pathlib import Path

from backend.schema import untrusted
from backend.schema.messages import Trouble


def read_json(path: Path) -> dict | None:
    """The object in a JSON file; None where there is no file. Raises Trouble("damaged") for anything else."""
    try:
        value = untrusted.read_json(path)
    except Trouble as trouble:
        if trouble.kind == "missing_file":
            return None
        raise Trouble("damaged", trouble.message, hint="Download it again.", detail=str(path)) from None
    if not isinstance(value, dict):
        raise Trouble("damaged", f"{path} is not a table of settings.", hint="Download it again.")
    return value
