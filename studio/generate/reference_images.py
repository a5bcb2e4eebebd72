"""The pictures that an editing model works from: a row to drop files on, each to be moved or taken away.

The form holds their paths in a field that is not shown, one a line; the row is drawn from it. Only copies in the user
folder and pictures made here are taken: what the browser names is never opened from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gradio as gr

from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble
from backend.schema.paths import Places
from backend.schema.request import GenerationRequest
from backend.schema.untrusted import name_of
from studio.state.context import Studio, live
from studio.state.output_files import is_inside, is_ours, keep_input, known_picture, thumbnail
from studio.widgets.formatting import safe

MOST = 8
FIELD = "set-edit_images"

# Files that fall on the row or are chosen are sent to the studio, then named to it; a tile that is dragged onto another
# takes its place.
SCRIPT = """
const send = async (files) => {
  const row = element.querySelector(".edit-row");
  if (!row || !files.length) return;
  row.classList.add("sending");
  try {
    const sent = [];
    for (const file of files) sent.push((await upload(file)).path);
    trigger("act", {do: "add", what: JSON.stringify(sent)});
  } catch (error) {  // too large, or the studio is gone
    trigger("act", {do: "refused", what: JSON.stringify(String(error?.message ?? error))});
  } finally {
    row.classList.remove("sending");
  }
};
let dragged = null;
element.addEventListener("change", (event) => {
  if (event.target.type !== "file") return;
  send([...event.target.files]);
  event.target.value = "";
});
element.addEventListener("dragstart", (event) => { dragged = event.target.closest("[data-at]")?.dataset.at ?? null; });
element.addEventListener("dragend", () => { dragged = null; });
element.addEventListener("dragover", (event) => {
  if (!element.querySelector(".edit-row")) return;
  event.preventDefault();
  element.querySelector(".edit-row").classList.add("over");
});
for (const kind of ["dragleave", "drop"])
  element.addEventListener(kind, () => element.querySelector(".edit-row")?.classList.remove("over"));
element.addEventListener("drop", (event) => {
  event.preventDefault();
  const at = event.target.closest("[data-at]")?.dataset.at;
  if (dragged === null) send([...event.dataTransfer.files]);
  else if (at !== undefined && at !== dragged) trigger("act", {do: "move", what: JSON.stringify([Number(dragged), Number(at)])});
});
"""


def build(request: GenerationRequest) -> tuple[gr.Textbox, gr.HTML]:
    """The field with the paths, and the row."""
    paths = gr.Textbox("\n".join(request.edit_images), label="Pictures to edit", visible=False)
    return paths, live(name=FIELD, script=SCRIPT)


def row(studio: Studio, paths: Sequence[str], *, shown: bool) -> str:
    """The row as HTML, "" where the model edits nothing."""
    if not shown:
        return ""
    tiles = "".join(_tile(studio, Path(path), at, len(paths)) for at, path in enumerate(paths))
    words = "Add pictures" if paths else "Drop pictures here, or choose files"
    add = (
        (
            f'<label class="edit-add{"" if paths else " wide"}"><input type="file" accept="image/*" '
            f"multiple><b>+</b><span>{words}</span></label>"
        )
        if len(paths) < MOST
        else ""
    )
    hint = '<p class="caption">The prompt calls them Picture 1, Picture 2 and so on.</p>' if len(paths) > 1 else ""
    return f'<h3 class="section">Pictures to edit</h3><div class="edit-row">{tiles}{add}</div>{hint}'


def _tile(studio: Studio, path: Path, at: int, count: int) -> str:
    def button(words: str, do: str, what: object, sign: str, *, off: bool = False) -> str:
        return (
            f'<button type="button" data-do="{do}" data-what="{safe(json.dumps(what))}" aria-label="{words}" '
            f'title="{words}"'
            f"{' disabled' if off else ''}>{sign}</button>"
        )

    name = f"Picture {at + 1}"
    moves = ""
    if count > 1:
        moves = button(f"{name}: one to the left", "move", [at, at - 1], "‹", off=at == 0)
        moves += button(f"{name}: one to the right", "move", [at, at + 1], "›", off=at == count - 1)
    known = known_picture(path, studio.places)
    small = thumbnail(path, studio.places.cache) if known else None
    image = (
        f'<img src="{studio.address(small)}" alt="{safe(name)}" draggable="false">'
        if small
        else f"<i>{'cannot be read' if known else 'not here'}</i>"
    )
    return (
        f'<figure class="edit-tile" data-at="{at}" '
        f'draggable="true">{image}{button(f"Remove {name}", "remove", at, "✕")}'
        f"<figcaption><span>{name}</span>{moves}</figcaption></figure>"
    )


def changed(paths: Sequence[str], do: str, what: str, places: Places) -> list[str]:
    """The paths after what was done in the row. Raises Trouble for a file that is no picture."""
    paths, meant = list(paths), _meant(what)
    if do == "add" and isinstance(meant, list):
        room = MOST - len(paths)
        added = [_taken(Path(str(path)), places) for path in meant[:room]]
        return [*paths, *added]
    if do == "refused":
        raise Trouble("bad_value", f"The pictures could not be sent: {str(meant)[:300]}")
    if do == "remove" and isinstance(meant, int):
        return [path for at, path in enumerate(paths) if at != meant]
    if do == "move" and isinstance(meant, list) and len(meant) == 2 and all(at in range(len(paths)) for at in meant):
        taken = paths.pop(meant[0])
        paths.insert(meant[1], taken)
    return paths


def _meant(what: str) -> object:
    """What a browser says was done; None for what is no JSON."""
    try:
        return parse_json(what or "null")
    except (ValueError, TypeError):
        return None


def _taken(path: Path, places: Places) -> str:
    """The kept copy of a file that was sent."""
    if not is_inside(path, (places.cache / "uploads", places.user / "inputs", places.outputs)):
        raise Trouble("bad_value", f"{name_of(path)} was not sent to the studio.", hint="Choose it again.")
    return str(keep_input(path, places))


def paths_of(value: str | None) -> tuple[str, ...]:
    """The paths in the field."""
    return tuple(line for line in (value or "").splitlines() if line.strip())


def check_here(paths: Sequence[str], places: Places) -> None:
    """Raises Trouble for the first of `paths` that is not one of the studio's own files."""
    for number, path in enumerate(paths, 1):
        if not is_ours(path, places):
            raise Trouble(
                "bad_value",
                f"Picture {number}, {name_of(path)}, is not here any more.",
                hint="Remove it or add it again.",
            )
