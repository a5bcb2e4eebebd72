"""What the page's fields can hold: a text in a text field, a number in a number's, a file that was sent where a file is.

Gradio passes on whatever a call says, and copies any file of this machine that a value names into what it serves. Handlers are written for what
a browser sends; anything else is refused here, at the door.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import gradio as gr
from gradio.utils import get_type_hints

from backend.schema.untrusted import exists, is_file, is_inside, name_of

NUMBER = (int, float)
# What a browser remembers (BrowserState) may be of an older version, and is read as such.
HELD: dict[type, tuple[type, ...]] = {
    gr.Textbox: (str,), gr.HTML: (str,), gr.Number: NUMBER, gr.Slider: NUMBER, gr.Checkbox: (bool,),
    gr.Image: (dict,), gr.File: (dict, list),
}  # fmt: skip


def check_values(fields: Sequence, values: Sequence, uploads: Path) -> None:
    """Raises ValueError for values that these fields (Gradio's components) cannot hold, and for a file that does not lie in `uploads`.

    None is what an empty field holds. A file that was sent and has been removed since passes: its handler says so.
    """
    for field, value in zip(fields, values, strict=True):
        kinds = _kinds_of(field)
        if value is not None and kinds is not None and not _is_one(value, kinds):
            called = getattr(field, "label", None) or field.get_block_name()
            raise ValueError(f"{called} does not hold {_word(value)}")
        _check_files(value, uploads)


def check_event(handler, event: object) -> dict | None:
    """What is told of an event, as the handler of it reads it. Raises ValueError for what no element of the page says."""
    wanted = event_of(handler)
    if wanted is None:
        return None
    if not isinstance(event, dict):
        raise ValueError("event_data must be an object")
    if issubclass(wanted, gr.SelectData):
        if "index" not in event or "value" not in event:
            raise ValueError("event_data must name an index and a value")
        return event
    do, what = event.get("do"), event.get("what")
    if not isinstance(do, str) or not isinstance(what, str | None):
        raise ValueError("event_data must hold texts")
    return {"do": do, "what": what}


def event_of(handler) -> type | None:
    """The kind of event data that a handler asks for by its annotations; None for none."""
    hints = get_type_hints(inspect.unwrap(handler)).values()
    return next((hint for hint in hints if isinstance(hint, type) and issubclass(hint, gr.EventData)), None)


def _kinds_of(field) -> tuple[type, ...] | None:
    """The types of values that a field can hold; None for any."""
    if isinstance(field, gr.Radio | gr.Dropdown):  # its choices may change, not what they are made of
        kinds = (str, *{type(value) for _, value in field.choices or ()})
        return (*kinds, list) if getattr(field, "multiselect", False) else kinds
    return next((kinds for kind, kinds in HELD.items() if isinstance(field, kind)), None)


def _is_one(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, list) and list in kinds and str in kinds:  # several choices
        return all(not isinstance(one, list) and _is_one(one, kinds) for one in value)
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)


def _word(value: object) -> str:
    words = {
        bool: "a truth value",
        str: "a text",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return words[type(value)]


def _check_files(value: object, uploads: Path) -> None:
    """Whatever names a file, wherever it stands in a value: Gradio looks everywhere."""
    if isinstance(value, list):
        for inner in value:
            _check_files(inner, uploads)
    elif isinstance(value, dict):
        if "path" in value and ("meta" in value or "url" in value) and not _was_sent(value["path"], uploads):
            raise ValueError(f"{name_of(value['path'])} is no file that was sent")
        for inner in value.values():
            _check_files(inner, uploads)


def _was_sent(path: object, uploads: Path) -> bool:
    # Gradio takes a relative name, and an address of another host, from elsewhere.
    named = isinstance(path, str) and Path(path).is_absolute() and is_inside(path, (uploads,))
    return named and (is_file(path) or not exists(path))
