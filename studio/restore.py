"""From the settings inside a picture back to the form: finds its model and LoRAs again, or names what is missing."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backend.schema.places import Places
from backend.schema.request import GenerationRequest, LoraUse
from studio.pictures import Settings, is_ours
from studio.session import config_from, read_values, write_values

SEARCH_SECONDS = 20.0


@dataclass(frozen=True)
class Restored:
    """A request as far as it can be repeated here, and a sentence for everything that cannot."""

    request: GenerationRequest
    loras: tuple[LoraUse, ...]
    missing: tuple[str, ...]


def restore(settings: Settings, *, models: Sequence[str], loras: Sequence[Path], places: Places) -> Restored:
    """The form that made a picture. `models` are the values of the model choice, `loras` the LoRA files there are."""
    values = dict(settings.request)
    uses = values.pop("loras", None) or []
    if settings.seed is not None:
        values["seed"] = settings.seed
    missing = []
    start = values.get("input_image")
    if start and not is_ours(str(start), places):
        missing.append(f"The picture it started from, {Path(str(start)).name}, is not here.")
        values["input_image"] = None
    edited = [str(path) for path in values.get("edit_images") or ()]
    gone = [Path(path).name for path in edited if not is_ours(path, places)]
    if gone:
        missing.append(f"Of the pictures it edited, {', '.join(gone)} {'is' if len(gone) == 1 else 'are'} not here.")
    values["edit_images"] = [path for path in edited if is_ours(path, places)]
    model = str(values.get("model", ""))
    if model and model not in models and not _is_there(model):
        missing.append(f"The model {model} is not here.")
    found: list[LoraUse] = []
    hashes = {str(receipt.get("path", "")): str(receipt.get("hash", "")) for receipt in settings.loras}
    for use in uses:
        path, strength = str(use.get("path", "")), float(use.get("strength", 1.0))
        here, remark = find_lora(path, hashes.get(path, ""), loras, places)
        if here is not None:
            found.append(LoraUse(str(here), strength))
        if remark:
            missing.append(remark)
    return Restored(config_from(GenerationRequest, values | {"count": 1}), tuple(found), tuple(missing))


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def find_lora(path: str, wanted: str, loras: Sequence[Path], places: Places) -> tuple[Path | None, str]:
    """The file that was used: by content where its hash is known, else by path. With a sentence where it is not the same."""
    name = Path(path).name
    if not wanted:
        here = Path(path) if _is_there(path) else next((file for file in loras if file.name == name), None)
        return (here, "") if here else (None, f"The LoRA {name} is not here.")
    known = read_values(places.cache / "hashes.json")
    # The likeliest first: the same path, the same name, then all others until the time is up.
    order = sorted(dict.fromkeys([Path(path), *loras]), key=lambda file: (str(file) != path, file.name != name))
    end = time.monotonic() + SEARCH_SECONDS
    result: tuple[Path | None, str] = (None, f"The LoRA {name} ({wanted[:10]}) is not here.")
    for file in order:
        if time.monotonic() > end:
            result = (None, f"The LoRA {name} ({wanted[:10]}) was not found within {SEARCH_SECONDS:.0f} s of looking.")
            break
        if content_hash(file, known) == wanted:
            result = (file, "")
            break
    write_values(places.cache / "hashes.json", known)
    if result[0] is None and _is_there(path):
        return None, f"The LoRA {name} has changed since: its content is not what made this picture."
    return result


def content_hash(path: Path, known: dict) -> str:
    """sha256 of a file; `known` remembers it by path, size and time. Empty where it cannot be read."""
    try:
        seen = path.stat()
        key = f"{path}|{seen.st_size}|{seen.st_mtime_ns}"
        if key not in known:
            with path.open("rb") as file:
                known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return str(known[key])
    except OSError:
        return ""
