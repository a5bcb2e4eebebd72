"""A config class becomes controls, and the controls' values a config again. Nothing about a setting is written here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from backend.schema.messages import Trouble
from backend.schema.settings import Knob, from_values, knobs_of, to_values
from studio.widgets.formatting import choice_words

MOST_RADIO_CHOICES = 3
MOST_SLIDER_STOPS = 400
BLANK = "(default)"


def clamp_sliders() -> None:
    """Has every slider bring a typed number into its range, as its field does on leaving it; by itself Gradio's fails.

    Not a class of our own: Gradio writes a stub file beside the source of each.
    """
    gr.Slider.preprocess = _clamped


def pass_broken_pictures() -> None:
    """Has a file that is no picture reach the handler, which says so; by itself Gradio's field fails, and nothing is
    said."""
    if gr.Image.preprocess is not _as_sent:
        _as_sent.usual = gr.Image.preprocess
        gr.Image.preprocess = _as_sent


def _as_sent(image: gr.Image, payload):
    try:
        return _as_sent.usual(image, payload)
    except Exception:  # whatever Pillow says of a broken file
        if image.type != "filepath" or payload is None:
            raise
        return payload.path


def _clamped(slider: gr.Slider, payload: float | None) -> float:
    return min(max(payload or 0, slider.minimum), slider.maximum)


@dataclass(frozen=True)
class Form:
    """The controls of a config class by knob name, in the order shown."""

    cls: type
    controls: dict[str, gr.components.Component]

    @property
    def components(self) -> list[gr.components.Component]:
        return list(self.controls.values())


def title(item: Knob) -> str:
    return f"{item.label} ({item.unit})" if item.unit else item.label


def shown(item: Knob, value: object) -> object:
    """A knob's value as its control holds it."""
    if item.kind is tuple:
        return "\n".join(value or ())
    if item.choices:
        return BLANK if value is None else value
    if item.kind is str:
        return "" if value is None else value
    if item.kind is float and value is not None:
        return float(f"{value:.12g}")
    return value


def given(item: Knob, value: object) -> object:
    """A control's value as the knob wants it: an empty field of an optional knob is None."""
    if item.optional and (value is None or value == BLANK or (isinstance(value, str) and not value.strip())):
        return None
    if value is None and item.kind in (str, tuple):
        return ""
    return value


def control(item: Knob, value: object, **look) -> gr.components.Component:
    """The control that suits a knob: choices, yes or no, a slider for a narrow range, a number, or text."""
    said: dict[str, Any] = (
        dict(label=title(item), info=item.help, value=shown(item, value), elem_id=f"set-{item.name}") | look
    )
    if item.choices:
        options = ([BLANK] if item.optional else []) + list(item.choices)
        kind = gr.Radio if len(options) <= MOST_RADIO_CHOICES else gr.Dropdown
        return kind(choices=[(choice_words(option), option) for option in options], **said)
    if item.kind is bool:
        return gr.Checkbox(**said)
    if item.kind in (int, float):
        return _number(item, said)
    lines = max(item.lines, 3 if item.kind is tuple else 1)
    return gr.Textbox(**({"lines": lines, "max_lines": max(lines, 8)} | said))


def _number(item: Knob, said: dict[str, Any]) -> gr.components.Component:
    step = item.step or (1 if item.kind is int else 0)
    bounded = item.low is not None and item.high is not None and not item.optional
    if bounded and item.kind is float and not step:
        step = 0.05 if item.high - item.low <= 2 else 0.1
    coarse = (
        bounded and 0 < (item.default - item.low) * 100 < item.high - item.low
    )  # a slider could hardly hit the default
    if bounded and not coarse and (item.high - item.low) / step <= MOST_SLIDER_STOPS:
        return gr.Slider(minimum=item.low, maximum=item.high, step=step, **said)
    return gr.Number(precision=0 if item.kind is int else None, step=step or None, **said)


def sections_of(cls: type, *, skip: Sequence[str] = ()) -> dict[str, list[Knob]]:
    """The knobs that a form shows, by section title, in the order written."""
    sections: dict[str, list[Knob]] = {}
    for item in knobs_of(cls):
        if item.level != "hidden" and item.name not in skip:
            sections.setdefault(item.section, []).append(item)
    return sections


def folds(
    cls: type, config, *, skip: Sequence[str] = (), per_row: int = 2, title: str = "More"
) -> dict[str, gr.components.Component]:
    """A fold for each section under the current block: its basic knobs first, its advanced ones in a fold inside.

    `title` is the fold of what belongs to no section.
    """
    values = to_values(config)
    controls: dict[str, gr.components.Component] = {}
    for heading, knobs in sections_of(cls, skip=skip).items():
        basic = [item for item in knobs if item.level == "basic"]
        advanced = [item for item in knobs if item.level != "basic"]
        with gr.Accordion(heading or title, open=False, elem_classes="fold"):
            controls |= rows(basic, values, per_row=per_row)
            if basic and advanced:
                with gr.Accordion("More of this", open=False, elem_classes="fold inner"):
                    controls |= rows(advanced, values, per_row=per_row)
            else:
                controls |= rows(advanced, values, per_row=per_row)
    return controls


def rows(knobs: Sequence[Knob], values: dict, *, per_row: int = 2) -> dict[str, gr.components.Component]:
    """Controls for `knobs`, so many beside each other; long texts have a row for themselves."""
    made: dict[str, gr.components.Component] = {}
    pending = list(knobs)
    while pending:
        wide = _is_wide(pending[0])
        row = [pending.pop(0)]
        while not wide and pending and len(row) < per_row and not _is_wide(pending[0]):
            row.append(pending.pop(0))
        with gr.Row(equal_height=False, elem_classes="fields"):
            for item in row:
                made[item.name] = control(item, values[item.name], min_width=150)
    return made


def _is_wide(item: Knob) -> bool:
    return item.kind is tuple or item.lines > 1


def read(form: Form, values: Sequence, *, base=None):
    """The config that the controls' `values` (in the order of `form.components`) mean. Raises Trouble with all that
    cannot be."""
    known = {item.name: item for item in knobs_of(form.cls)}
    meant = {name: given(known[name], value) for name, value in zip(form.controls, values, strict=True)}
    try:
        return from_values(form.cls, meant, base=base)
    except Trouble as trouble:
        wrong = faults(form, values)
        raise (Trouble(trouble.kind, " ".join(wrong.values())) if wrong else trouble) from None


def fill(form: Form, config) -> list:
    """What the controls show for `config`, in the order of `form.components`."""
    known = {item.name: item for item in knobs_of(form.cls)}
    values = to_values(config)
    return [shown(known[name], values[name]) for name in form.controls]


def read_or_none(form: Form, values: Sequence, *, base=None):
    """As `read`, or None while the user is in the middle of typing something that is not a setting yet."""
    try:
        return read(form, values, base=base)
    except Trouble:
        return None


def faults(form: Form, values: Sequence) -> dict[str, str]:
    """A sentence for each control whose value cannot be, by knob name; the control is called as it is on the page."""
    known = {item.name: item for item in knobs_of(form.cls)}
    found = {}
    for name, value in zip(form.controls, values, strict=True):
        try:
            from_values(form.cls, {name: given(known[name], value)})
        except Trouble as trouble:
            shown_label = form.controls[name].label or known[name].label
            found[name] = str(trouble).replace(f"{known[name].label} (--{name})", shown_label)
    return found


def at_fields(form: Form, troubles: Iterable[Trouble]) -> dict[str, str]:
    """The first sentence of `troubles` for each control that one names by its `setting`; settings are called as they
    are on the page."""
    known = {item.name: item for item in knobs_of(form.cls)}
    found: dict[str, str] = {}
    for trouble in troubles:
        if trouble.setting in form.controls and trouble.setting not in found:
            found[trouble.setting] = _in_page_words(str(trouble), known)
    return found


def _in_page_words(text: str, known: dict[str, Knob]) -> str:
    """A sentence of the command line without its flags: "(--name)" goes, "--name" becomes the label."""
    text = re.sub(r" \(--\w+\)", "", text)
    return re.sub(r"--(\w+)", lambda flag: f"“{known[flag[1]].label}”" if flag[1] in known else flag[0], text)


def changes(form: Form, wanted: dict[str, object]) -> list:
    """An update for each control of those of `wanted` (values or `gr.update`s by knob name), none for the others."""
    known = {item.name: item for item in knobs_of(form.cls)}
    return [gr.skip() if name not in wanted else _update(known[name], wanted[name]) for name in form.controls]


def _update(item: Knob, value: object) -> object:
    return value if isinstance(value, dict) else shown(item, value)


def differing(form: Form, config, values: Sequence) -> dict[str, object]:
    """What `config` has otherwise than the controls' `values`, by knob name."""
    known = {item.name: item for item in knobs_of(form.cls)}
    wanted = to_values(config)
    return {
        name: wanted[name]
        for name, value in zip(form.controls, values, strict=True)
        if shown(known[name], wanted[name]) != value
    }
