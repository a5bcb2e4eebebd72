"""What the plan has set in a form, so that choosing another model takes it back."""

from __future__ import annotations

import json
from collections.abc import Sequence

from backend.schema.json_values import parse_json
from backend.schema.settings import knobs_of
from studio.widgets.form import Form, shown


def noted(form: Form, wanted: dict[str, object], values: Sequence, model: str, before: str) -> str:
    """As text, for the browser to remember: the model, and what of `wanted` the controls' `values` did not have, as
    [set, was].

    `before`: what was noted for an earlier plan; what that has set, and nobody since, goes back to what was there
    before both.
    """
    known, was = {item.name: item for item in knobs_of(form.cls)}, _read(before)
    found = {name: pair for name, pair in was.get("set", {}).items() if name in form.controls}
    for name, value in zip(form.controls, values, strict=True):
        if name in wanted and shown(known[name], wanted[name]) != value:
            old = found[name][1] if name in found and found[name][0] == value else value
            found[name] = [shown(known[name], wanted[name]), old]
    return json.dumps({"model": model, "set": found})


def taken_back(form: Form, values: Sequence, model: str, note: str) -> dict[str, object]:
    """The settings, by name, that were set for another model than `model` and are still so, as they were before."""
    read = _read(note)
    if not read or read["model"] == model:
        return {}
    now = dict(zip(form.controls, values, strict=True))
    return {name: was for name, (given, was) in read["set"].items() if name in now and now[name] == given}


def _read(note: str) -> dict:
    """Empty for a note that was not made here, or by an older version."""
    try:
        read = parse_json(note)
        return read if isinstance(read["model"], str) and all(len(pair) == 2 for pair in read["set"].values()) else {}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
