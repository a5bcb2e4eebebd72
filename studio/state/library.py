"""What models and LoRA files there are, as the page offers them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from backend.catalog.family import Family
from backend.catalog.hub.download import find_model
from backend.catalog.lora import fit
from backend.catalog.models import capabilities as catalog_edits
from backend.catalog.models import library, model_folder
from backend.catalog.spec import LoraSpec, ModelSpec
from backend.planner.costs.model_sizes import sizes_of
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS
from backend.schema.request import GenerationRequest
from backend.schema.untrusted import is_file, is_folder
from studio.state.context import Studio

STARTER = "loft/starter"
FRESH_SECONDS = 1.0


def models(studio: Studio) -> tuple[ModelSpec | Trouble, ...]:
    """Every model in the configured folders and among the assets; what cannot be read is its Trouble.

    The folders are looked through once a second at most: one keystroke asks several times.
    """
    folders = [ASSETS / "starter", studio.places.models, *map(Path, studio.preferences().model_folders)]
    before, at, found = studio.recent.get("models", ((), 0.0, ()))
    if before != folders or time.monotonic() - at > FRESH_SECONDS:
        found = library.scan_models(folders, studio.families, studio.places.cache)
        studio.recent["models"] = (folders, time.monotonic(), found)
    return found


def loras(studio: Studio) -> tuple[LoraSpec | Trouble, ...]:
    """Every LoRA file in the configured folders and the results of runs, families as corrected by hand."""
    corrections = library.read_corrections(studio.places.user)
    return library.scan_loras(lora_folders(studio), studio.families, studio.places.cache, corrections=corrections)


def lora_folders(studio: Studio) -> list[Path]:
    """Where LoRA files are looked for; a file in one of them may be moved to the trash."""
    places = studio.places
    return [places.loras, places.runs, places.models / "train", *map(Path, studio.preferences().lora_folders)]


def model_id(spec: ModelSpec, studio: Studio) -> str:
    """How a request names a model: the starter and models in the models folder by id, others by path."""
    path = spec.path or Path()
    if path == ASSETS / "starter":
        return STARTER
    if path.is_relative_to(studio.places.models) and is_folder(path):
        return path.relative_to(studio.places.models).as_posix()
    return str(path)


def model_choices(found: Sequence[ModelSpec | Trouble], studio: Studio) -> list[tuple[str, str]]:
    """(label, value) of models that can make pictures; the starter first and always there."""
    choices = [("Starter (small, ready)", STARTER)]
    for spec in found:
        if isinstance(spec, ModelSpec) and not spec.missing and model_id(spec, studio) != STARTER:
            choices.append((f"{model_id(spec, studio)} ({spec.title})", model_id(spec, studio)))
    return choices


def lora_title(spec: LoraSpec, studio: Studio) -> str:
    """A file in a run's folder is called as the run."""
    if spec.path.is_relative_to(studio.places.runs):
        run = spec.path.parent.name.split("_", 2)[-1]
        return f"{run}, {spec.path.stem}"
    return spec.path.stem


def lora_choices(
    found: Sequence[LoraSpec | Trouble], studio: Studio, model: str | None = None
) -> list[tuple[str, str]]:
    """(label, path), the newest first. `model`: as a request calls the chosen one; what does not fit it comes last and
    says so."""
    specs = sorted((s for s in found if isinstance(s, LoraSpec)), key=lambda s: s.modified, reverse=True)
    if model is None:
        return [(lora_title(spec, studio), str(spec.path)) for spec in specs]
    known = models(studio)
    family, chosen = family_of(known, model, studio), model_of(known, model, studio)
    good, bad = [], []
    for spec in specs:
        title, path = lora_title(spec, studio), str(spec.path)
        if not fits(spec, family, studio, chosen):
            good.append((title, path))
        elif fits_in_part(spec, chosen, studio):
            good.append((f"{title} (fits in part)", path))
        else:
            bad.append((f"{title} (does not fit this model)", path))
    return [*good, *bad]


def family_of(found: Sequence[ModelSpec | Trouble], value: str, studio: Studio) -> str:
    """The family's name of the model that a request calls `value`, "" where it is not known."""
    spec = model_of(found, value, studio)
    return spec.family if spec is not None else ""


def request_defaults(found: Sequence[ModelSpec | Trouble], value: str, studio: Studio) -> dict[str, object]:
    """Size, steps and guidance that suit a model: its own where its folder says so, else its family's, be it here or
    only known by name."""
    for spec, module in _called(found, value, studio):
        return model_folder.request_defaults(spec, module)
    try:
        family = sizes_of(value).family
    except Trouble:
        return {}
    return next((module.DEFAULTS.request for module in studio.families if family == module.NAME), {})


def check_size(found: Sequence[ModelSpec | Trouble], request: GenerationRequest, studio: Studio) -> None:
    """Raises Trouble where the model of `request` is here and does not draw pictures of that size."""
    for spec, module in _called(found, request.model, studio):
        model_folder.check_size(spec, module, width=request.width, height=request.height)


def edits(found: Sequence[ModelSpec | Trouble], value: str, studio: Studio) -> bool:
    """Whether the model that a request calls `value` works from pictures; of one that is not here, as its name
    tells."""
    for spec, module in _called(found, value, studio):
        return catalog_edits.edits(spec, module)
    try:
        sizes = sizes_of(value)
    except Trouble:
        return False
    family, variant = sizes.family, sizes.variant
    return any(variant in module.EDITS for module in studio.families if family == module.NAME)


def check_edits(
    found: Sequence[ModelSpec | Trouble], request: GenerationRequest, studio: Studio, *, must: bool
) -> None:
    """Raises Trouble where the model of `request` is here and cannot work from so many pictures, or (`must`) lacks
    one."""
    for spec, module in _called(found, request.model, studio):
        catalog_edits.check(spec, module, len(request.edit_images), must=must)


def _called(found: Sequence[ModelSpec | Trouble], value: str, studio: Studio) -> list[tuple[ModelSpec, Family]]:
    """The models that a request calls `value`, each with its family: as the page lists them, else as the worker and the
    trainer look for a name or path."""
    specs = [one for one in found if isinstance(one, ModelSpec)]
    named = [spec for spec in specs if value in (model_id(spec, studio), str(spec.path))]
    if not named:
        try:
            path = find_model(value, here=studio.places).resolve()
        except (Trouble, OSError, ValueError):
            return []
        named = [spec for spec in specs if spec.path.resolve() == path]
    return [(spec, module) for spec in named for module in studio.families if spec.family == module.NAME]


def family_title(name: str, studio: Studio) -> str:
    """A family's name for people; "unknown family" for none."""
    return next((module.TITLE for module in studio.families if name == module.NAME), name or "unknown family")


def family_words(spec: LoraSpec, studio: Studio) -> str:
    """What a LoRA is for, in words: its family, or all that it may be for."""
    if spec.family or not spec.families_possible:
        return family_title(spec.family, studio)
    return " or ".join(family_title(name, studio) for name in spec.families_possible)


def other_base(spec: LoraSpec | None, model: str, studio: Studio) -> str:
    """A sentence where a LoRA was trained on a model that is here and `model`, which is chosen, is another; else ""."""
    here = [value for _, value in model_choices(models(studio), studio)]
    if spec is None or spec.base == model or spec.base not in here:
        return ""
    return f"{lora_title(spec, studio)} was trained on {spec.base}; the model chosen here is {model}."


def fits(spec: LoraSpec, family: str, studio: Studio, model: ModelSpec | None = None) -> str:
    """Why a LoRA does not fit a model of `family`, in a sentence; "" where it does or where nothing can be said.

    `model`: the very model, where it is here; then every module that the file touches has to be in it with its size.
    """
    if family and spec.family and family not in (spec.family, *spec.families_possible):
        mine = family_title(family, studio)
        return f"This is for {family_title(spec.family, studio)}; the chosen model is {mine}."
    met = _fit(spec.path, model, studio)
    if met is not None:
        return met.refused or (met.partly and f"It fits in part: {met.partly}")
    if not family or family in (spec.family, *spec.families_possible):
        return ""
    mine, possible = family_title(family, studio), [family_title(name, studio) for name in spec.families_possible]
    known = f"It may be for {' or '.join(possible)}" if possible else "It cannot be told which model this is for"
    return f"{known}; the chosen model is {mine}."


def fits_in_part(spec: LoraSpec, model: ModelSpec | None, studio: Studio) -> bool:
    """Whether the engine would take a LoRA and leave some of its modules out."""
    met = _fit(spec.path, model, studio)
    return met is not None and not met.refused and bool(met.partly)


def _fit(path: Path, model: ModelSpec | None, studio: Studio) -> fit.Fit | None:
    """How a LoRA's header meets a model's; None where there is no model or no readable file."""
    family = next((module for module in studio.families if model is not None and model.family == module.NAME), None)
    if model is None or family is None or "dit" not in model.parts:
        return None
    try:
        return fit.fit_of(path, model, family)
    except (Trouble, OSError):
        return None


def check_loras(found: Sequence[ModelSpec | Trouble], request: GenerationRequest, studio: Studio) -> None:
    """Raises Trouble where the model of `request` is here and one of its LoRAs cannot act on it."""
    corrections = library.read_corrections(studio.places.user)
    for model, module in _called(found, request.model, studio):
        for use in request.loras:
            if not use.strength or not is_file(Path(use.path)):
                continue  # a file that is missing is told by who opens it
            spec = library.lora_at(Path(use.path), studio.families, corrections)
            if spec.family and model.family not in (spec.family, *spec.families_possible):
                raise Trouble(
                    "wrong_family",
                    (
                        f"{lora_title(spec, studio)} is a LoRA for {family_title(spec.family, studio)}; the chosen "
                        "model "
                        f"is {module.TITLE}."
                    ),
                    hint="Choose another LoRA or another model, or correct its family in the library.",
                )
            if "dit" in model.parts:
                fit.check(spec.path, model, module)


def model_of(found: Sequence[ModelSpec | Trouble], value: str, studio: Studio) -> ModelSpec | None:
    """The model that a request calls `value`; None where it is not here."""
    return next((spec for spec, _ in _called(found, value, studio)), None)
