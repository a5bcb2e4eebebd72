"""LoRA files and models as cards and details: pure functions from specs to HTML."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from backend.catalog.spec import LoraSpec, ModelSpec
from backend.schema.messages import Trouble
from studio.draw import facts
from studio.pictures import is_inside, thumbnail
from studio.shelf import family_title, fits, lora_title, model_id
from studio.studio import Studio
from studio.words import count_words, notice, safe, size_words, when_words

MOST_CARDS = 240
MOST_METADATA = 80


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
    found: Sequence, *, model_family: str, shown: str, studio: Studio, now: float, some: bool = False
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
    tiles = "".join(_card(spec, model_family, shown, studio, now) for spec in good[:MOST_CARDS])
    broken = "".join(_broken(entry) for entry in bad[:MOST_CARDS])
    more = ""
    if len(found) > MOST_CARDS:
        more = f'<p class="caption">The first {MOST_CARDS} of {len(found)} are shown. Search for the others.</p>'
    return f'<div class="cards">{tiles}{broken}</div>{more}'


def _card(spec: LoraSpec, model_family: str, shown: str, studio: Studio, now: float) -> str:
    family = family_title(spec.family, studio)
    rank = "–".join(str(r) for r in sorted({spec.ranks[0], spec.ranks[-1]})) if spec.ranks else "?"
    line = f"{family}, rank {rank}, {size_words(spec.nbytes)}"
    picture = picture_of(spec, studio)
    face = (
        f'<img src="{picture}" alt="">' if picture else f'<span class="face">{safe(spec.path.stem[:1].upper())}</span>'
    )
    words = f'<span class="trigger">{safe(", ".join(spec.trigger_words[:3]))}</span>' if spec.trigger_words else ""
    why = fits(spec, model_family, studio)
    mark = f'<span class="pill">{"does not fit" if spec.family else "unknown family"}</span>' if why else ""
    meta = ", ".join(
        part for part in (spec.trainer, spec.base, when_words(spec.modified, now) if spec.modified else "") if part
    )
    return (
        f'<button type="button" class="card{" on" if str(spec.path) == shown else ""}{" dim" if why else ""}" data-do="pick" '
        f'data-what="{safe(spec.path)}">{face}<span class="card-text"><b>{safe(lora_title(spec, studio))}</b>'
        f"<span>{safe(line)}</span>{words}<small>{safe(meta)}</small>{mark}</span></button>"
    )


def picture_of(spec: LoraSpec, studio: Studio) -> str:
    """The address of a LoRA's picture, or "": the one inside it, a sample of its run, or one of the same name beside it."""
    for key in ("modelspec.thumbnail", "thumbnail", "ss_thumbnail"):
        value = spec.metadata.get(key, "")
        if value.startswith(("data:image/png;base64,", "data:image/webp;base64,", "data:image/jpeg;base64,")):
            return safe(value)
    beside = [spec.path.with_suffix(kind) for kind in (".png", ".jpg", ".jpeg", ".webp")]
    found = next((path for path in (*_samples(spec, studio), *beside) if path.is_file()), None)
    if found is None:
        return ""
    small = thumbnail(found, studio.places.cache)
    return studio.address(small) if small != found else ""


def _samples(spec: LoraSpec, studio: Studio) -> list[Path]:
    """Sample pictures of the run that wrote the file: those of its very step first."""
    if not is_inside(spec.path, (studio.places.runs,)):
        return []
    folder = spec.path.parent / "samples"
    step = spec.metadata.get("steps", "")
    own = [folder / f"step-{int(step):06d}" / "0.png"] if step.isdigit() else []
    return [*own, *sorted(folder.glob("step-*/0.png"), reverse=True)]


def _broken(entry: Trouble) -> str:
    name = entry.path.name
    return (
        f'<div class="card broken"><span class="face">!</span><span class="card-text"><b>{safe(name)}</b>'
        f"<span>{safe(entry)}</span></span></div>"
    )


def lora_details(spec: LoraSpec | None, *, model_family: str, strengths: str, studio: Studio) -> str:
    """Everything known of one file, in words."""
    if spec is None:
        return '<div class="stage empty small"><p>Choose a LoRA to see what it is.</p></div>'
    why = fits(spec, model_family, studio)
    verdict = notice(why, kind="warn") if why else notice("Fits the model chosen in Generate.", kind="good")
    rows = [
        ("Family", family_title(spec.family, studio)),
        ("Kind", ", ".join(spec.algorithms)),
        ("Rank", ", ".join(map(str, spec.ranks))),
        ("Alpha", ", ".join(f"{alpha:g}" for alpha in spec.alphas)),
        ("Trigger words", ", ".join(spec.trigger_words)),
        ("Layers", count_words(spec.num_modules, "module")),
        ("Touches", ", ".join(spec.targets[:24])),
        ("Parts", ", ".join(spec.components)),
        ("Trained by", spec.trainer),
        ("Base", spec.base),
        ("Layout", spec.dialect),
        ("Size", size_words(spec.nbytes)),
        ("Changed", time.strftime("%d %b %Y, %H:%M", time.localtime(spec.modified)) if spec.modified else ""),
        ("File", str(spec.path)),
        ("Known by", "; ".join(spec.evidence)),
    ]
    return (
        f"<h2>{safe(lora_title(spec, studio))}</h2>{verdict}{strengths}{facts(rows)}"
        f"<details class='metadata'><summary>Metadata in the file ({len(spec.metadata)})</summary>{_metadata(spec)}</details>"
    )


def _metadata(spec: LoraSpec) -> str:
    rows = [(key, _short(value)) for key, value in sorted(spec.metadata.items()) if "thumbnail" not in key]
    return facts(rows[:MOST_METADATA]) or '<p class="caption">The file carries none.</p>'


def _short(value: str) -> str:
    with contextlib.suppress(ValueError):
        value = json.dumps(json.loads(value), ensure_ascii=False)
    return value if len(value) <= 400 else value[:400] + " …"


def model_cards(found: Sequence, studio: Studio) -> str:
    """One line for each model: what it is, its parts and sizes, and what is missing."""
    lines = []
    for entry in found:
        if isinstance(entry, ModelSpec):
            parts = ", ".join(f"{name} {size_words(part.nbytes)} {part.storage}" for name, part in entry.parts.items())
            missing = (
                f'<span class="pill warn">missing: {safe(", ".join(entry.missing))}</span>' if entry.missing else ""
            )
            kind = f"{entry.title}{f', {entry.variant}' if entry.variant else ''}, {size_words(entry.nbytes)}"
            lines.append(
                f'<div class="model-line"><b>{safe(model_id(entry, studio))}</b><span>{safe(kind)}</span>'
                f"<small>{safe(parts)}</small>{missing}</div>"
            )
        elif isinstance(entry, Trouble) or hasattr(entry, "trouble"):
            lines.append(f'<div class="model-line">{notice(str(getattr(entry, "trouble", entry)), kind="warn")}</div>')
    return f'<div class="model-lines">{"".join(lines)}</div>'
