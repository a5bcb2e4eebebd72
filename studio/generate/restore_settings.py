"""From the settings inside a picture back to the form: finds its model and LoRAs again, or names what is missing."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backend.catalog.hub.download import is_id
from backend.schema.paths import Places
from backend.schema.request import GenerationRequest, LoraUse
from backend.schema.untrusted import is_file, name_of
from studio.state.output_files import Settings, known_picture
from studio.state.saved_forms import config_from, read_values, write_values

SEARCH_SECONDS = 20.0
BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Restored:
    """A request as far as it can be repeated here, and a sentence for everything that cannot."""

    request: GenerationRequest
    loras: tuple[LoraUse, ...]
    missing: tuple[str, ...]


def restore(settings: Settings, *, models: Sequence[str], loras: Sequence[Path], places: Places) -> Restored:
    """The form that made a picture. `models` are the values of the model choice, `loras` the LoRA files there are.

    What a picture names is looked for among these and the pictures that are here, and nowhere else: it may be a
    stranger's.
    """
    values = dict(settings.request)
    uses = values.pop("loras", None) or []
    if settings.seed is not None:
        values["seed"] = settings.seed
    missing = []
    start = values.pop("input_image", None)
    if start:
        values["input_image"] = _here(start, places)
        if values["input_image"] is None:
            missing.append(f"The picture it started from, {name_of(start)}, is not here.")
    edited = values.pop("edit_images", None) or []
    gone = [name_of(path) for path in edited if _here(path, places) is None]
    if gone:
        missing.append(f"Of the pictures it edited, {', '.join(gone)} {'is' if len(gone) == 1 else 'are'} not here.")
    values["edit_images"] = [here for here in (_here(path, places) for path in edited) if here]
    model = str(values.pop("model", ""))
    if model:
        found_model = _model_called(model, models)
        if found_model:
            values["model"] = found_model
        if found_model not in models:
            missing.append(f"The model {name_of(model) if found_model is None else model} is not here.")
    found: list[LoraUse] = []
    for number, use in enumerate(uses):
        here, remark = find_lora(use["path"], _hash_of(number, use["path"], settings.loras), loras, places)
        if here is not None:
            found.append(LoraUse(str(here), use.get("strength", 1.0)))
        if remark:
            missing.append(remark)
    return Restored(config_from(GenerationRequest, values | {"count": 1}), tuple(found), tuple(missing))


def _hash_of(number: int, path: str, receipts: Sequence[dict]) -> str:
    """What the receipts say of the use `number` of the LoRA at `path`: its own where they are in order, for two files
    may have one name."""
    alike = [one for one in receipts[number : number + 1] if one.get("path") == path]
    alike += [one for one in receipts if one.get("path") == path]
    return str(alike[0].get("hash", "")) if alike else ""


def _here(path: object, places: Places) -> str | None:
    found = known_picture(path, places) if isinstance(path, str) else None
    return str(found) if found else None


def _model_called(model: str, models: Sequence[str]) -> str | None:
    """The choice that a picture's model is: itself, or the only one of that name; an id of no model here stays. None
    for a path to elsewhere."""
    if model in models:
        return model
    named = [value for value in models if name_of(value) == name_of(model)]
    return named[0] if len(named) == 1 else model if is_id(model) else None


def find_lora(path: str, wanted: str, loras: Sequence[Path], places: Places) -> tuple[Path | None, str]:
    """The file of `loras` that was used: by content where its hash is known, else by name. With a sentence where it is
    not the same."""
    name = name_of(path)
    alike = [file for file in loras if file.name == name]
    if not wanted:
        here = next((file for file in loras if str(file) == path), alike[0] if alike else None)
        return (here, "") if here else (None, f"The LoRA {name} is not here.")
    known = read_values(places.cache / "hashes.json")
    # The likeliest first: the same path, the same name, then all others until the time is up.
    order = sorted(dict.fromkeys(loras), key=lambda file: (str(file) != path, file.name != name))
    end = time.monotonic() + SEARCH_SECONDS
    result: tuple[Path | None, str] = (None, f"The LoRA {name} ({wanted[:10]}) is not here.")
    for file in order:
        if time.monotonic() > end:
            result = (None, f"The LoRA {name} ({wanted[:10]}) was not found within {SEARCH_SECONDS:.0f} s of looking.")
            break
        if content_hash(file, known, end=end) == wanted:
            result = (file, "")
            break
    with contextlib.suppress(OSError):  # only remembered, so that the next search is quicker
        write_values(places.cache / "hashes.json", known)
    if result[0] is None and alike:
        return None, f"The LoRA {name} has changed since: its content is not what made this picture."
    return result


def content_hash(path: Path, known: dict, *, end: float = math.inf) -> str:
    """sha256 of a regular file; `known` remembers it by path, size and time. Empty where it cannot be read, or not by
    the time `end`."""
    try:
        if not is_file(path):
            return ""
        seen = path.stat()
        key = f"{path}|{seen.st_size}|{seen.st_mtime_ns}"
        if key not in known:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
                    if time.monotonic() > end:
                        return ""
            known[key] = digest.hexdigest()
        return str(known[key])
    except (OSError, ValueError):
        return ""
