"""What the timer draws, from snapshots and readings: in words, escaped, and only when something changed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from backend.host.engine import EngineSnapshot, Job
from backend.host.queue import Waiting
from backend.host.run import Phase, Run
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest
from backend.schema.vram import Card
from studio import draw, engine_view, run_view, words
from studio.preferences import device_fault

GIB = 2**30
RUN = Run(
    folder=Path("/runs/2026-11-30_15-04_red-cat"), name="2026-11-30_15-04_red-cat", status="running", sentence="Training.",
    process=None, phase=Phase("training"), step=30, total_steps=120, epoch=1, seconds_per_step=0.5, seconds_left=45.0,
    loss=0.1234, learning_rate=1e-4, samples=(), checkpoints=(), saved=(), memory={}, trouble=None, resumed={}, notes=(), model="m",
    started_at=0.0, changed_at=0.0, revision=("running", 1, 2, 3),
)  # fmt: skip


def text(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


def test_the_strip_says_who_has_the_card():
    card = Card("cuda:0", "RTX", 12 * GIB, 9 * GIB, ram_total_bytes=32 * GIB, ram_free_bytes=20 * GIB)
    idle = text(engine_view.strip(EngineSnapshot(state="idle"), [card], []))
    assert "RTX" in idle and "3.0 GB used, 9.0 GB free" in idle and "12.0 GB used, 20.0 GB free" in idle and "ready" in idle
    assert "Training red-cat, step 30 of 120" in text(engine_view.strip(EngineSnapshot(), [card], [RUN]))
    job = Job("1", GenerationRequest(), phase="generating", step=3, steps=12)
    assert "Generating, step 3 of 12" in text(engine_view.strip(EngineSnapshot(job=job), [card], []))


def test_work_waiting_and_trouble_are_told():
    job = Job("1", GenerationRequest(count=3), phase="generating", step=3, steps=12, picture=1, seconds_left=4.2)
    waiting = Waiting("2", GenerationRequest(prompt="<b>bold</b>"), held=True)
    trouble = Trouble("died", "The engine ended.", hint="Try again.", detail="Traceback <x>")
    html = engine_view.progress_panel(EngineSnapshot(job=job, queue=(waiting,), trouble=trouble))
    said = text(html)
    assert "step 3 of 12, picture 2 of 3, 4 s left" in said and "The engine ended. Try again." in said
    assert "1 request waiting" in said and "<b>bold" not in html and "<x>" not in html


def test_loading_shows_bytes_and_a_cancelled_job_says_so():
    job = Job("1", GenerationRequest(), phase="loading", part="dit", done_bytes=GIB, total_bytes=4 * GIB)
    assert "Loading the image network, 1.0 GB of 4.0 GB" in text(engine_view.progress_panel(EngineSnapshot(job=job)))
    job = replace(job, phase="cancelling")
    assert "Cancelling" in text(engine_view.progress_panel(EngineSnapshot(job=job)))


def test_a_run_is_told_in_a_line_of_facts():
    said = text(run_view.head(RUN, now=30.0))
    for part in ("red-cat", "running", "30 of 120", "0.50 s", "45 s", "0.1234", "0.0001"):
        assert part in said


def test_a_run_that_died_says_why_and_offers_to_go_on():
    died = replace(RUN, status="died", trouble=Trouble("died", "It was killed.", hint="Resume goes on."), phase=None)
    assert "It was killed. Resume goes on." in text(run_view.head(died, now=0.0))
    assert run_view.buttons(died) == {"stop": False, "kill": False, "resume": True, "use": False, "discard": True}
    assert run_view.buttons(RUN)["stop"] and not run_view.buttons(replace(RUN, status="stopping"))["stop"]
    assert not any(run_view.buttons(None).values())


def test_the_run_to_watch_is_the_wished_the_living_the_newest():
    old, live = replace(RUN, name="old", status="complete"), replace(RUN, name="live")
    newest = replace(RUN, name="newest", status="stopped")
    assert run_view.choose([newest, live, old], "old").name == "old"
    assert run_view.choose([newest, live, old], "gone").name == "live"
    assert run_view.choose([newest, old], "").name == "newest"
    assert run_view.choose([], "") is None


def test_a_curve_has_few_points_and_no_nonsense():
    points = [(float(i), 1 / (i + 1)) for i in range(5000)] + [(5000.0, float("nan")), (5001.0, float("inf"))]
    html = draw.curve(points, x_name="step", y_name="loss", x_end=6000)
    for run in re.findall(r'points="([^"]+)"', html):
        pairs = [tuple(map(float, pair.split(","))) for pair in run.split()]
        assert len(pairs) <= draw.MOST_POINTS
        assert all(0 <= x <= draw.CURVE_WIDTH and 0 <= y <= draw.CURVE_HEIGHT for x, y in pairs)
    assert "second step" in draw.curve([(1.0, 0.5)], x_name="step", y_name="loss")
    low = draw.curve([(1.0, 2.5), (2.0, 0.01)], x_name="step", y_name="loss").split("text-anchor", 2)[1]
    assert '"end">0<' in low, "losses are not below nothing"
    assert "<svg" in draw.curve([(1.0, 0.5), (2.0, 0.5)], x_name="step", y_name="loss")


def test_numbers_are_said_as_people_say_them():
    assert [words.size_words(n) for n in (0, 999, 1536, 20 * 2**20, 1.5 * GIB)] == ["0 B", "999 B", "1.5 KB", "20 MB", "1.5 GB"]
    assert [words.time_words(s) for s in (0.2, 8, 125, 4800)] == ["0 s", "8 s", "2 min 05 s", "1 h 20 min"]
    assert [words.pace_words(s) for s in (0, 0.456, 12)] == ["–", "0.46 s", "12 s"]
    assert words.count_words(1, "run") == "1 run" and words.count_words(2, "run") == "2 runs"


def test_the_sentence_at_a_field_cannot_break_out_of_its_style():
    html = words.faults_style({"width": 'is "x"</style><script>\\'}, prefix="set-")
    assert html.startswith("<style>#set-width::after") and html.count("<") == 4  # the style and the paragraph, opened and closed
    assert words.faults_style({}, prefix="set-") == ""


def test_a_device_is_one_that_is_here():
    cards = (Card("cuda:0", "RTX", 12 * GIB, 9 * GIB),)
    for device in ("auto", "cpu", "cuda", "cuda:0", "xpu:0"):
        assert device_fault(device, cards) == ""
    assert device_fault("cuda:1", cards) == "There is no device 'cuda:1' here. It can be auto, cuda:0, cpu."
    for device in ("cuda:0", "gpu", "", "cuda:"):
        assert "no device" in device_fault(device, (Card("cpu", "CPU", GIB, GIB),))
