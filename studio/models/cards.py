"""LoRA files and models as cards and details: pure functions from specs to HTML."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence

from backend.catalog.spec import LoraSpec, ModelSpec
from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble
from studio.models import config_from_lora
from studio.models.lora_thumbnails import picture_of
from studio.state.context import Studio
from studio.state.library import family_title, family_words, fits, fits_in_part, lora_title, model_id
from studio.widgets.formatting import count_words, notice, part_words, safe, size_words, when_words
from studio.widgets.svg import facts

MOST_CARDS = 240
MOST_METADATA = 80
TRAINING = {  # settings that are told in the details, and how they are called there
    "learning_rate": "Learning rate",
    "max_steps": "Steps",
    "num_epochs": "Epochs",
    "batch_size": "Batch size",
    "gradient_accumulation_steps": "Accumulated",
    "customized_optimizer": "Optimizer",
    "lr_scheduler": "Schedule",
    "lr_warmup_steps": "Warm-up steps",
    "max_pixels": "Pixels",
    "lora_dropout": "Dropout",
    "caption_dropout": "Caption dropout",
    "seed": "Seed",
}


def searched(found: Sequence, text: str, studio: Studio) -> list:
    """Those whose name, family, trigger words, trainer or base hold every word of `text`."""
    words = text.lower().split()
    return [spec for spec in found if all(word in _haystack(spec, studio) for word in words)]


def _haystack(spec, studio: Studio) -> str:
    if not isinstance(spec, LoraSpec):
        return f"{spec.path.name} {spec}".lower()
    parts = (
        lora_title(spec, studio),
        spec.family,
        family_title(spec.family, studio),
        spec.trainer,
        spec.base,
        *spec.trigger_words,
    )
    return " ".join(parts).lower()


def lora_cards(
    found: Sequence,
    *,
    model_family: str,
    shown: str,
    studio: Studio,
    now: float,
    some: bool = False,
    model: ModelSpec | None = None,
) -> str:
    """One card for each file, those that cannot be read last, each with its reason."""
    if not found and some:
        return '<div class="stage empty small"><p>No file matches the search.</p></div>'
    if not found:
        return (
            '<div class="stage empty"><p><b>No LoRA files</b></p>'
            f"<p>Train one, or put .safetensors files into {safe(studio.places.loras)}.</p></div>"
        )
    good = [spec for spec in found if isinstance(spec, LoraSpec)]
    bad = [entry for entry in found if not isinstance(entry, LoraSpec)]
    tiles = "".join(_card(spec, model_family, shown, studio, now, model) for spec in good[:MOST_CARDS])
    broken = "".join(_broken(entry) for entry in bad[:MOST_CARDS])
    more = ""
    if len(found) > MOST_CARDS:
        more = f'<p class="caption">The first {MOST_CARDS} of {len(found)} are shown. Search for the others.</p>'
    return f'<div class="cards">{tiles}{broken}</div>{more}'


def _card(spec: LoraSpec, model_family: str, shown: str, studio: Studio, now: float, model: ModelSpec | None) -> str:
    family = family_words(spec, studio)
    rank = "–".join(str(r) for r in sorted({spec.ranks[0], spec.ranks[-1]})) if spec.ranks else ""
    kind = f"rank {rank}" if rank else ", ".join(spec.algorithms)
    line = ", ".join(part for part in (family, kind, size_words(spec.nbytes)) if part)
    picture = picture_of(spec, studio)
    face = (
        f'<img loading="lazy" src="{picture}" alt="">'
        if picture
        else f'<span class="face">{safe(spec.path.stem[:1].upper())}</span>'
    )
    words = f'<span class="trigger">{safe(", ".join(spec.trigger_words[:3])) or "&nbsp;"}</span>'
    why = fits(spec, model_family, studio, model)
    unknown = not spec.family and not spec.families_possible and model is None
    short = "fits in part" if fits_in_part(spec, model, studio) else "unknown family" if unknown else "does not fit"
    mark = f'<span class="pill">{short}</span>' if why else ""
    meta = ", ".join(
        part for part in (spec.trainer, spec.base, when_words(spec.modified, now) if spec.modified else "") if part
    )
    return (
        f'<button type="button" class="card{" on" if str(spec.path) == shown else ""}{" dim" if why else ""}" '
        'data-do="pick" '
        f'data-what="{safe(spec.path)}" title="{safe(why)}">{face}<span '
        f'class="card-text"><b>{safe(lora_title(spec, studio))}</b>'
        f'<span>{safe(line)}</span>{words}<small title="{safe(meta)}">{safe(meta)}</small></span>{mark}</button>'
    )


def _broken(entry: Trouble) -> str:
    name = entry.path.name
    return (
        f'<div class="card broken"><span class="face">!</span><span class="card-text"><b>{safe(name)}</b>'
        f"<span>{safe(entry)}</span></span></div>"
    )


def lora_details(
    spec: LoraSpec | None, *, model_family: str, strengths: str, studio: Studio, model: ModelSpec | None = None
) -> str:
    """Everything known of one file, in words."""
    if spec is None:
        return '<div class="stage empty small"><p>Choose a LoRA to see what it is.</p></div>'
    why = fits(spec, model_family, studio, model)
    good = (
        "Fits the model chosen in Generate."
        if model is not None
        else "Made for the family of the model chosen in Generate."
    )
    verdict = notice(why, kind="warn") if why else notice(good, kind="good")
    picture = picture_of(spec, studio)
    face = f'<img class="detail-face" src="{picture}" alt="">' if picture else ""
    rows = [
        ("Family", family_words(spec, studio)),
        ("Kind", ", ".join(spec.algorithms)),
        ("Rank", ", ".join(map(str, spec.ranks))),
        ("Alpha", ", ".join(f"{alpha:g}" for alpha in spec.alphas)),
        ("Trigger words", ", ".join(spec.trigger_words)),
        ("Layers", count_words(spec.num_modules, "module")),
        ("Touches", ", ".join(spec.targets[:24])),
        ("Parts", ", ".join(part_words(part) for part in spec.components)),
        ("Trained by", spec.trainer),
        ("Base", spec.base),
        ("Layout", spec.dialect),
        ("Size", size_words(spec.nbytes)),
        ("Changed", time.strftime("%d %b %Y, %H:%M", time.localtime(spec.modified)) if spec.modified else ""),
        ("File", str(spec.path)),
        ("Known by", "; ".join(spec.evidence)),
    ]
    return (
        f'<div class="detail-head">{face}<div><h2>{safe(lora_title(spec, studio))}</h2>{verdict}</div></div>{strengths}{facts(rows)}'
        f"{_training(spec)}<details class='metadata'><summary>Metadata in the file "
        f"({len(spec.metadata)})</summary>{_metadata(spec)}</details>"
    )


def _training(spec: LoraSpec) -> str:
    """How it was trained, as far as the file tells."""
    values = config_from_lora.settings_of(spec)
    rows = [(label, values.get(name)) for name, label in TRAINING.items()]
    told = [
        (label, f"{value:g}" if isinstance(value, float) else str(value))
        for label, value in rows
        if value not in (None, "")
    ]
    return f'<h3 class="section">Training</h3>{facts(told)}' if told else ""


def _metadata(spec: LoraSpec) -> str:
    rows = [(key, _short(value)) for key, value in sorted(spec.metadata.items()) if "thumbnail" not in key]
    return facts(rows[:MOST_METADATA]) or '<p class="caption">The file carries none.</p>'


def _short(value: str) -> str:
    with contextlib.suppress(ValueError):
        value = json.dumps(parse_json(value), ensure_ascii=False)
    return value if len(value) <= 400 else value[:400] + " …"


def model_cards(found: Sequence, studio: Studio) -> str:
    """One line for each model: what it is, its parts and sizes, and what is missing."""
    lines = []
    for entry in found:
        if isinstance(entry, ModelSpec):
            parts = ", ".join(
                f"{part_words(name)} {size_words(part.nbytes)} {part.storage}" for name, part in entry.parts.items()
            )
            missing = (
                f'<span class="pill warn">missing: {safe(", ".join(entry.missing))}</span>' if entry.missing else ""
            )
            plain = entry.variant in ("", "base") or entry.variant in entry.title.lower()
            kind = f"{entry.title}{'' if plain else f', {entry.variant}'}, {size_words(entry.nbytes)}"
            lines.append(
                f'<div class="model-line"><b>{safe(model_id(entry, studio))}</b><span>{safe(kind)}</span>'
                f"<small>{safe(parts)}</small>{missing}</div>"
            )
        elif isinstance(entry, Trouble) or hasattr(entry, "trouble"):
            lines.append(f'<div class="model-line">{notice(str(getattr(entry, "trouble", entry)), kind="warn")}</div>')
    return f'<div class="model-lines">{"".join(lines)}</div>'
