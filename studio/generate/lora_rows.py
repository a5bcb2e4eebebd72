"""The LoRA rows of the Generate form: choose, strength, remove. A fixed number of rows, shown as far as they are
used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import gradio as gr

from backend.schema.request import LoraUse
from studio.widgets.field_sync import QUIET

MOST_ROWS = 8


@dataclass(frozen=True)
class LoraRows:
    """The components of the rows; `values` of all rows lie as [path, strength, path, strength, ...]."""

    boxes: tuple[gr.Row, ...]
    files: tuple[gr.Dropdown, ...]
    strengths: tuple[gr.Slider, ...]
    removes: tuple[gr.Button, ...]
    add: gr.Button
    count: gr.State

    @property
    def inputs(self) -> list:
        return [item for pair in zip(self.files, self.strengths, strict=True) for item in pair]

    @property
    def outputs(self) -> list:
        return [*self.boxes, *self.inputs, self.add, self.count]


def build(choices: Sequence[tuple[str, str]], uses: Sequence[LoraUse]) -> LoraRows:
    """Lays the rows out under the current block."""
    boxes, files, strengths, removes = [], [], [], []
    for i in range(MOST_ROWS):
        use = uses[i] if i < len(uses) else None
        with gr.Row(visible=use is not None, equal_height=True, elem_classes="lora-row") as box:
            files.append(
                gr.Dropdown(
                    choices=list(choices),
                    value=use.path if use else None,
                    show_label=False,
                    container=False,
                    scale=5,
                    min_width=180,
                    elem_id=f"lora-file-{i}",
                    filterable=True,
                    allow_custom_value=True,
                )
            )
            strengths.append(
                gr.Slider(
                    -2,
                    2,
                    value=use.strength if use else 1.0,
                    step=0.05,
                    label="Strength",
                    show_label=False,
                    container=False,
                    scale=4,
                    min_width=140,
                    elem_id=f"lora-strength-{i}",
                )
            )
            removes.append(
                gr.Button("✕", scale=0, min_width=40, size="sm", elem_classes="icon", elem_id=f"lora-remove-{i}")
            )
        boxes.append(box)
    add = gr.Button("Add a LoRA", size="sm", elem_id="lora-add", elem_classes="quiet-button")
    rows = LoraRows(tuple(boxes), tuple(files), tuple(strengths), tuple(removes), add, gr.State(len(uses)))
    _wire(rows)
    return rows


def _wire(rows: LoraRows) -> None:
    rows.add.click(
        lambda count, *values: show([*pairs(values)[:count], ("", 1.0)]),
        [rows.count, *rows.inputs],
        rows.outputs,
        **QUIET,
    )
    for i, button in enumerate(rows.removes):
        button.click(
            lambda count, *values, i=i: show([pair for j, pair in enumerate(pairs(values)[:count]) if j != i]),
            [rows.count, *rows.inputs],
            rows.outputs,
            **QUIET,
        )


def pairs(values: Sequence) -> list[tuple[str, float]]:
    return [(values[i] or "", 1.0 if values[i + 1] is None else values[i + 1]) for i in range(0, len(values), 2)]


def read(values: Sequence) -> tuple[LoraUse, ...]:
    """The LoRAs that the rows' values mean; rows without a file are left out."""
    return tuple(LoraUse(path, float(strength)) for path, strength in pairs(values) if path)


def with_lora(uses: Sequence[tuple[str, float]], path: str) -> list[tuple[str, float]]:
    """`uses` with `path` among them; one more row, or the last one where all are taken."""
    kept = [pair for pair in uses if pair[0]]
    if not path or any(pair[0] == path for pair in kept):
        return kept
    return [*kept[: MOST_ROWS - 1], (path, 1.0)]


def show(uses: Sequence[tuple[str, float]], choices: Sequence[tuple[str, str]] | None = None) -> list:
    """Updates for `LoraRows.outputs` that show `uses` (path, strength), and no more rows than these."""
    uses = list(uses)[:MOST_ROWS]
    boxes = [gr.update(visible=i < len(uses)) for i in range(MOST_ROWS)]
    fields = []
    for i in range(MOST_ROWS):
        path, strength = uses[i] if i < len(uses) else ("", 1.0)
        fields.append(gr.update(value=path or None, **({} if choices is None else {"choices": list(choices)})))
        fields.append(gr.update(value=strength))
    return [*boxes, *fields, gr.update(interactive=len(uses) < MOST_ROWS), len(uses)]
