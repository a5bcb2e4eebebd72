"""Presets of the training form: `assets/presets/*.json`, each only what differs from the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.schema.json_values import printable, text
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS, Places
from backend.schema.settings import from_values, to_values
from backend.schema.training.config import TrainingConfig
from backend.schema.untrusted import is_folder, read_object

FOLDER: Path = ASSETS / "presets"
# What a preset never touches: it says how to train, not what and where. Every setting that leads to a file, a model or
# another machine is here, for a preset may be a stranger's.
KEPT = (
    "dataset_base_path", "dataset_metadata_path", "data_file_keys", "extra_inputs", "name", "trigger_word", "output_path", "sample_prompts",
    "sample_edit_images", "model", "model_paths", "model_id_with_origin_paths", "tokenizer_path", "processor_path", "regularisation_path",
    "prior_prompts", "lora_checkpoint", "preset_lora_path", "preset_lora_model", "resume_from_checkpoint", "enable_tensorboard_log",
    "enable_wandb_log", "wandb_project", "enable_swanlab_log", "swanlab_project",
)  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A named set of training settings; `about` is one sentence for people."""

    name: str
    title: str
    about: str
    values: dict


OWN = ""  # the name of settings that are no preset's


def choices(places: Places) -> list[tuple[str, str]]:
    """(title, name) of every preset, and of what is none."""
    return [(preset.title, preset.name) for preset in presets(places)] + [("Own settings", OWN)]


def presets(places: Places | None = None) -> list[Preset]:
    """Every preset that can be read: the shipped ones by file name, then the user's own in `user/presets`."""
    folders = [FOLDER] + ([places.user / "presets"] if places else [])
    found = [read_preset(path) for folder in folders if is_folder(folder) for path in sorted(folder.glob("*.json"))]
    return [preset for preset in found if preset is not None]


def read_preset(path: Path) -> Preset | None:
    """The preset in a file; `title` and `about` may stand beside the settings. None for a file that holds none."""
    try:
        values = read_object(path)
    except Trouble:
        return None
    named = printable(path.stem)
    title = text(values.pop("title", ""), most=200) or named.replace("-", " ").replace("_", " ").capitalize()
    about = text(values.pop("about", ""), most=2000)
    inner = values.pop("values", None)
    return Preset(named, title, about, inner if isinstance(inner, dict) else values)


def apply(preset: Preset, config: TrainingConfig) -> TrainingConfig:
    """`config` with the preset's settings over the defaults; what is trained, its name and its prompts stay.

    Raises Trouble where the preset names a setting that is none.
    """
    kept = {name: value for name, value in to_values(config).items() if name in KEPT}
    try:
        return from_values(TrainingConfig, {**preset.values, **kept})
    except Trouble as trouble:
        raise Trouble(
            trouble.kind, f"The preset {preset.title!r} cannot be used. {trouble.message}", hint=trouble.hint
        ) from None


def matching(config: TrainingConfig, found: list[Preset]) -> str:
    """The name of the first preset whose settings `config` has, all of them, else `OWN`."""
    values = to_values(config)
    return next((preset.name for preset in found if _holds(values, preset)), OWN)


def _holds(values: dict, preset: Preset) -> bool:
    try:
        wanted = to_values(from_values(TrainingConfig, preset.values))
    except Trouble:
        return False
    return all(values[name] == wanted[name] for name in preset.values if name not in KEPT)
