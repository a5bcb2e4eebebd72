"""The right half of Generate, as pure functions: the picture shown, its receipt, and the pictures made before."""

from __future__ import annotations

import base64
from pathlib import Path

from backend.schema.messages import Trouble
from backend.schema.untrusted import known_file, left_out_words, name_of
from studio.state.context import Studio
from studio.state.output_files import Settings, newest, newest_and_unnamed, read_settings, thumbnail
from studio.widgets.formatting import count_words, notice, safe, size_words, time_words
from studio.widgets.svg import facts

PAGE_PICTURES = 48
MODES = {"cold": "added into the weights", "hot": "beside the weights"}  # of a LoRA, as docs/lora.md tells them apart


def chosen_picture(studio: Studio, wish: str) -> Path | None:
    """The picture that `wish` names if it is still there, else the newest one."""
    chosen = known_file(wish, (studio.places.outputs,)) if wish else None
    if chosen:
        return chosen
    found = newest(studio.places.outputs, most=1)
    return found[0] if found else None


def stage(studio: Studio, picture: Path | None) -> str:
    """The picture at its own size where there is room, or what to do when there is none yet."""
    if picture is None:
        return (
            '<div class="stage empty"><p><b>No pictures yet</b></p>'
            "<p>Write what the picture shows and press Generate. The starter model answers in a second or "
            "two.</p></div>"
        )
    if thumbnail(picture, studio.places.cache) is None:
        return (
            f'<div class="stage empty"><p>{safe(name_of(picture))} cannot be read as a picture: it is damaged, or '
            "no picture at all.</p></div>"
        )
    return (
        f'<div class="stage"><a href="{studio.address(picture)}" target="_blank" title="Open at full size">'
        f'<img src="{studio.address(picture)}" alt="{safe(_alt(picture))}"></a></div>'
    )


def preview_stage(path: Path | None) -> str:
    """What can be seen of the picture in the making. It is in the page itself: its file may be gone before a browser
    came for it."""
    try:
        data = path.read_bytes() if path else b""
    except OSError:
        data = b""
    if not data:
        return '<div class="stage waiting"><span class="shimmer"></span></div>'
    address = f"data:image/webp;base64,{base64.b64encode(data).decode()}"
    return f'<div class="stage making"><img src="{address}" alt="Preview"></div>'


def _alt(picture: Path) -> str:
    try:
        return str(read_settings(picture).request.get("prompt") or picture.name)
    except Trouble:
        return picture.name


def thumbs(studio: Studio, *, shown: Path | None, most: int) -> str:
    """The newest pictures as buttons, newest first."""
    found, left = newest_and_unnamed(studio.places.outputs, most=most + 1)
    note = notice(left_out_words(left, studio.places.outputs), kind="warn") if left else ""
    if len(found) < 2:
        return note
    tiles = "".join(_thumb(studio, path, on=path == shown) for path in found[:most])
    more = '<button type="button" class="quiet" data-do="more">Show more</button>' if len(found) > most else ""
    return f'<h3 class="section">Pictures made here</h3><div class="thumbs">{tiles}</div>{more}{note}'


def _thumb(studio: Studio, path: Path, *, on: bool) -> str:
    small = thumbnail(path, studio.places.cache)
    inside = (
        f'<img loading="lazy" src="{studio.address(small)}" alt="">'
        if small
        else f"<i>{safe(name_of(path))} cannot be read</i>"
    )
    return (
        f'<button type="button" class="thumb{" on" if on else ""}" data-do="show" data-what="{safe(path)}"'
        f' aria-label="{safe(path.stem)}">{inside}</button>'
    )


def receipt(studio: Studio, picture: Path | None) -> str:
    """How the picture came about: settings, LoRAs with what they did, time and memory."""
    if picture is None:
        return ""
    try:
        settings = read_settings(picture)
    except Trouble as trouble:
        return f'<div class="receipt">{notice(str(trouble))}</div>'
    request = settings.request
    rows = [
        ("Prompt", str(request.get("prompt", ""))),
        ("Negative", str(request.get("negative_prompt", ""))),
        ("Model", str(request.get("model", ""))),
        ("Size", f"{request.get('width', '?')} × {request.get('height', '?')}"),
        ("Steps, guidance", f"{request.get('num_inference_steps', '?')}, {_plain(request.get('guidance', '?'))}"),
        ("Seed", "" if settings.seed is None else str(settings.seed)),
        ("From a picture", _start_words(request)),
        ("Edited", ", ".join(map(name_of, request["edit_images"]))),
        ("Took", time_words(settings.seconds) if settings.seconds >= 1 else f"{settings.seconds:.1f} s"),
        ("Memory", _memory_words(settings)),
    ]
    uses = "".join(_lora_line(use) for use in settings.loras)
    notes = "".join(f"<p class='caption'>{safe(note)}</p>" for note in settings.notes)
    link = f'<a class="file" href="{studio.address(picture)}" download="{safe(picture.name)}">{safe(picture.name)}</a>'
    return f'<div class="receipt">{facts(rows)}{uses}{notes}<p class="caption">{link}</p></div>'


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _start_words(request: dict) -> str:
    if not request.get("input_image"):
        return ""
    return f"{name_of(request['input_image'])}, strength {_plain(request.get('denoising_strength', '?'))}"


def _memory_words(settings: Settings) -> str:
    if not settings.measured_peak_bytes:
        return ""
    measured = f"tensors at most {size_words(settings.measured_peak_bytes)}"
    return (
        f"{measured}, predicted {size_words(settings.predicted_peak_bytes)}"
        if settings.predicted_peak_bytes
        else measured
    )


def _lora_line(use: dict) -> str:
    """One LoRA's receipt: name, strength, layers, mode; what it could not apply folds out, each with its reason."""
    applied, found, unused = use["layers_applied"], use["layers_found"], use["unused"]
    mode = MODES.get(use["mode"], use["mode"])
    words = f"strength {use['strength']:g}, {applied} of {count_words(found, 'layer')}, {mode}"
    if use["hash"]:
        words += f", {use['hash'][:10]}"
    fold = ""
    if unused:
        lines = "".join(f"<li>{safe(name)}: {safe(why)}</li>" for name, why in list(unused.items())[:40])
        fold = f"<details><summary>{count_words(len(unused), 'key')} not applied</summary><ul>{lines}</ul></details>"
    notes = "".join(f"<p class='caption'>{safe(note)}</p>" for note in use["notes"])
    return f'<div class="use"><b>{safe(use["name"] or "LoRA")}</b> <span>{safe(words)}</span>{fold}{notes}</div>'
