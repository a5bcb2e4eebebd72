"""The pictures of a dataset with their captions in text fields."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from backend.images.orientation import in_rgb
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file, is_folder, left_out_words
from studio.state.output_files import NO_PICTURE
from studio.train.dataset_captions import Captioned, metadata_file, samples_in, unnamed_in
from studio.widgets.formatting import count_words, notice, safe

PAGE = 24
MOST_SOURCES = 3
THUMB_PIXELS = 112
GREY = (
    "data:image/svg+xml;utf8,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 1 1'>"
    "<rect width='1' height='1' fill='gray'/></svg>"
)


# What was typed is kept until another set is shown, also over pages that are turned and sets that moved.
SCRIPT = """
const typed = new Map();
let shown = "";
element.loftTyped = () => ({set: shown, edits: Object.fromEntries(typed)});
element.addEventListener("input", (event) => {
  const field = event.target.closest("[data-field]");
  if (field) typed.set(field.dataset.field, field.value);
});
const drawn = () => {
  const head = element.querySelector("[data-set]");
  if (!head) return;
  if (head.dataset.set !== shown && head.dataset.was !== shown) typed.clear();
  shown = head.dataset.set;
  for (const name of JSON.parse(head.dataset.undone || "[]")) typed.delete(name);
  head.removeAttribute("data-undone");
  // The page may keep a field and change only its text; what was typed there for another picture would still be seen.
  for (const field of element.querySelectorAll("textarea")) field.value = typed.get(field.dataset.field) ?? field.defaultValue;
};
new MutationObserver(drawn).observe(element, {childList: true, subtree: true, characterData: true, attributeFilter: ["data-undone"]});
drawn();
"""


def editor(folder: Path, *, page: int, was: str = "", undone: Sequence[str] = ()) -> str:
    """One page of the dataset in `folder`. Thumbnails are inline, for the folder itself is not served.

    `was` is the folder of the same set before it was copied: what was typed there and not saved yet belongs here. Of
    the pictures that are `undone` it is forgotten.
    """
    try:
        found = samples_in(folder)
    except Trouble as trouble:
        return notice(str(trouble), kind="bad") + _left_out(folder)
    pages = -(-len(found) // PAGE)
    page = min(max(page, 0), pages - 1)
    table = metadata_file(folder)
    left = "" if table else _left_out(folder)
    tiles = "".join(_tile(sample, folder, fixed=table is not None) for sample in found[page * PAGE : (page + 1) * PAGE])
    words = count_words(len(found), "picture") + (f", captions from {table.name}" if table else "")
    words += ", each with what it was edited from" if any(sample.edited_from for sample in found) else ""
    save = "" if table else '<button type="button" class="quiet" data-do="save" data-collect>Save captions</button>'
    undo = (
        ""
        if table
        else (
            '<button type="button" class="quiet" data-do="undo" data-collect title="Captions as before the last '
            'save">Undo</button>'
        )
    )
    gone = safe(
        json.dumps([time.time_ns(), *undone] if undone else [])
    )  # never what it was before, or the page would leave it as it is
    return (
        f'<div class="editor-head" data-set="{safe(folder)}" data-was="{safe(was)}" '
        f'data-undone="{gone}"><b>{safe(words)}</b>{_turn(page, pages)}{save}{undo}</div>{left}<div '
        f'class="captions">{tiles}</div>'
    )


def _left_out(folder: Path) -> str:
    left = unnamed_in(folder) if is_folder(folder) else []
    return notice(left_out_words(left, folder), kind="warn") if left else ""


def _turn(page: int, pages: int) -> str:
    if pages == 1:
        return ""

    def button(words: str, to: int) -> str:
        off = "" if 0 <= to < pages else " disabled"
        return f'<button type="button" class="quiet" data-do="page" data-what="{to}"{off}>{words}</button>'

    return f'<span class="turn">{button("Earlier", page - 1)} {page + 1} of {pages} {button("Later", page + 1)}</span>'


def _tile(sample: Captioned, folder: Path, *, fixed: bool) -> str:
    """Picture and caption, behind the pictures that it was edited from. `fixed`: the caption stands in a table and is
    not edited here."""
    path = sample.picture
    field = "readonly" if fixed else f'data-field="{safe(path.relative_to(folder).as_posix())}"'
    before = "".join(_image(source) for source in sample.edited_from[:MOST_SOURCES])
    more = f"<small>+{len(sample.edited_from) - MOST_SOURCES}</small>" if len(sample.edited_from) > MOST_SOURCES else ""
    sources = (
        f'<span class="sources">{before}{more}</span><span class="becomes" title="is edited to">→</span>'
        if before
        else ""
    )
    return (
        f'<label class="captioned{" edited" if before else ""}">{sources}{_image(path)}'
        f'<textarea rows="3" {field} placeholder="No caption" aria-label="Caption of '
        f'{safe(path.name)}">{safe(sample.caption)}</textarea>'
        "</label>"
    )


def _image(path: Path) -> str:
    return f'<img src="{thumb_data(path)}" alt="" title="{safe(path.name)}">'


def thumb_data(path: Path) -> str:
    """A small picture as a data address; a grey square where the file is no picture."""
    if not is_file(path):
        return GREY
    try:
        with Image.open(path) as picture:
            picture.draft("RGB", (THUMB_PIXELS * 2, THUMB_PIXELS * 2))
            small = in_rgb(picture)
        small.thumbnail((THUMB_PIXELS, THUMB_PIXELS))
        buffer = io.BytesIO()
        small.save(buffer, "WEBP", quality=80)
        return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
    except NO_PICTURE:
        return GREY
