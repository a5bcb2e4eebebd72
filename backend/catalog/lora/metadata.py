"""Facts from a LoRA's metadata.

All of it is text from strangers: it may be broken, huge, or wrong, and none of that is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from backend.schema.json_values import parse_json
from backend.schema.untrusted import read_object_or_empty

LONGEST_JSON = 4 * 2**20  # longer values are thumbnails or garbage
MOST_WORDS = 8
THUMBNAILS = ("modelspec.thumbnail", "loft.thumbnail", "thumbnail", "ss_thumbnail")  # pictures as data URLs


def table(metadata: Mapping[str, str], key: str) -> dict:
    """The JSON object under `key`, {} where there is none or it is broken."""
    text = metadata.get(key, "")
    if not text.lstrip().startswith("{") or len(text) > LONGEST_JSON:
        return {}
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def number(text: object) -> float | None:
    """A finite number, or None ("None", "Dynamic", nonsense)."""
    if not isinstance(text, str | int | float):
        return None
    try:
        value = float(text)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def alphas(metadata: Mapping[str, str]) -> tuple[float, ...]:
    """The alphas that the metadata gives; tensors may say otherwise."""
    said = {
        number(metadata.get(key)) for key in ("ss_network_alpha", "lora_alpha", "network_alpha", "alpha", "loft.alpha")
    }
    adapter = table(metadata, "lora_adapter_metadata")
    said |= {number(value) for key, value in adapter.items() if key.endswith("lora_alpha")}
    return tuple(sorted(value for value in said if value is not None))


def trigger_words(metadata: Mapping[str, str], path: Path | None = None) -> tuple[str, ...]:
    """Words that wake the LoRA, best evidence first: said outright, else the commonest tag of each training folder."""
    for key in (
        "trigger",
        "loft.trigger",
        "modelspec.trigger_phrase",
        "trigger_words",
        "trigger_word",
        "ss_trained_words",
    ):
        if metadata.get(key, "").strip():
            return _words(metadata[key])
    frequency = table(metadata, "ss_tag_frequency")
    words: dict[str, None] = {}
    for tags in frequency.values():
        if isinstance(tags, dict) and tags:
            counted = {tag: number(count) or 0.0 for tag, count in tags.items()}
            words[max(counted, key=lambda tag: counted[tag]).strip()] = None
    if not words:
        words = dict.fromkeys(_words_beside(path)) if path else {}
    return tuple(word for word in words if word)[:MOST_WORDS]


def _words(text: str) -> tuple[str, ...]:
    if text.lstrip().startswith("["):
        try:
            listed = parse_json(text[:LONGEST_JSON])
            if isinstance(listed, list):
                return tuple(str(word).strip() for word in listed if str(word).strip())[:MOST_WORDS]
        except ValueError:
            pass
    return tuple(word.strip() for word in text[:2000].split(",") if word.strip())[:MOST_WORDS]


def _words_beside(path: Path) -> tuple[str, ...]:
    """Trigger words from a description that a downloader put beside the file."""
    for name in (f"{path.stem}.civitai.info", f"{path.stem}.json"):
        said = read_object_or_empty(path.with_name(name), most=LONGEST_JSON)
        words = said.get("trainedWords") or said.get("activation text") or ()
        words = _words(words) if isinstance(words, str) else words
        if said and isinstance(words, list | tuple):
            return tuple(str(word).strip() for word in words[:MOST_WORDS])
    return ()


def is_ours(metadata: Mapping[str, str]) -> bool:
    """Whether Loft's own trainer wrote the file.

    It keeps an alpha tensor wherever the factor is not 1, so its "alpha" is no rule.
    """
    return metadata.get("software", "").startswith("Loft ")


def trainer(metadata: Mapping[str, str], dialect: str = "") -> str:
    """The program that wrote the file, as far as it says so."""
    if is_ours(metadata):
        return "Loft"
    software = table(metadata, "software").get("name") or metadata.get("software", "")
    if isinstance(software, str) and software and len(software) < 60:
        return software
    module = metadata.get("ss_network_module", "")
    if "ot_branch" in metadata or "ot_config" in metadata:
        return "OneTrainer"
    if module.startswith("networks.") and any(
        word in module for word in ("qwen", "wan", "hunyuan", "zimage", "flux_2", "kontext")
    ):
        return "musubi-tuner"
    if module:
        return "sd-scripts (LyCORIS)" if "lycoris" in module else "sd-scripts"
    if "lora_adapter_metadata" in metadata:
        return "diffusers"
    return "DiffSynth-Studio" if "adapter name kept" in dialect and not metadata else ""


def base(metadata: Mapping[str, str]) -> str:
    """The model it was trained on, by name; a path of the trainer's machine is cut to its last part."""
    for key in (
        *(("base",) if is_ours(metadata) else ()),
        "loft.base",
        "ss_sd_model_name",
        "ss_base_model_version",
        "modelspec.architecture",
        "base_model",
        "base",
    ):
        said = metadata.get(key, "").strip()
        if said and said != "None":
            said = said.replace("\\", "/")
            if key == "ss_sd_model_name":
                said = said.rsplit("/", 1)[-1]
            return said.removesuffix("/lora")[:120]
    return ""


def architecture(metadata: Mapping[str, str]) -> str:
    """What the metadata says about the family, in lower case, one text to search in."""
    keys = (
        "loft.family",
        "family",
        "ss_base_model_version",
        "modelspec.architecture",
        "ss_network_module",
        "base_model",
    )
    return " ".join(metadata.get(key, "")[:200] for key in keys).lower().strip()
