"""What the Train tab draws of a run that is computing: its use of memory, and what was predicted for it."""

from __future__ import annotations

import sys

import gradio as gr
import pytest

from backend.families import FAMILIES
from backend.host.engine.client import Engine
from backend.host.process import processes
from backend.host.runs import status
from backend.schema.memory_plan import Card
from backend.schema.messages import to_line
from backend.system import process_record
from studio.panels.memory_graph import Use
from studio.state.context import Studio
from studio.train import tab as train

CHOICE = {"run": "", "card": ""}


@pytest.fixture
def live_run(data, tmp_path):
    """A folder in which a process computes a run of the starter."""
    folder = data.runs / "2026-11-30_15-04-05_cat"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model": "loft/starter", "max_pixels": 16384}')
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = processes.start(argv, log=tmp_path / "log.txt", mark=status.mark(folder))
    (folder / "process.json").write_text(process_record.record_text(process))
    (folder / "events.jsonl").write_text(
        to_line("memory", ram_bytes=2**30, libraries_bytes=2**29) + to_line("memory", ram_bytes=2**30)
    )
    yield folder
    processes.end_tree(process, grace_seconds=0)


def head_of(data, *, with_libraries: bool) -> str:
    """The head after two readings of what the run uses."""
    studio = Studio(data, Engine(data, fake=True), FAMILIES)
    with gr.Blocks():
        tab = train.build(studio)
    seen: dict = {}
    for when in (1.0, 2.0):
        out, seen = train.view(studio, tab, CHOICE, seen, Use(when, 2**30, 0, 2**32, with_libraries=with_libraries))
    return out[0]


def test_a_run_is_drawn_with_its_prediction_as_a_line(data, live_run):
    html = head_of(data, with_libraries=False)
    assert 'class="predicted"' in html and "predicted peak" in html and "1.0 GB in use" in html


def test_on_a_cpu_the_line_stands_on_what_the_process_holds_beside_its_tensors(data, live_run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    html = head_of(data, with_libraries=True)
    assert 'class="predicted"' in html and "in use, predicted peak" in html and "both with libraries" in html
    (live_run / "config.json").write_text('{"model": "nobody/nothing"}')
    assert "predicted" not in head_of(data, with_libraries=False), "nothing is known of that model"


def test_a_machine_with_several_cards_may_train_on_all_of_them(data, monkeypatch):
    def offered() -> bool:
        with gr.Blocks() as page:
            train.build(Studio(data, Engine(data, fake=True), FAMILIES))
        return any(
            getattr(block, "elem_id", None) == "knob-devices" or getattr(block, "label", "") == "Devices"
            for block in page.blocks.values()
        )

    assert not offered()
    cards = tuple(
        Card(name="RTX 4090", device=f"cuda:{number}", total_bytes=24 * 2**30, free_bytes=23 * 2**30)
        for number in range(2)
    )
    monkeypatch.setattr(train.gpu_probe, "probe", lambda **_: cards)
    assert offered()
