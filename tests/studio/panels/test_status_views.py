"""What the timer draws, from snapshots and readings: in words, escaped, and only when something changed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from backend.host.engine.client import EngineSnapshot, Job
from backend.host.engine.pending_requests import Waiting
from backend.host.engine.snapshot import Answer
from backend.host.process.event_log import LossSeries
from backend.host.runs.status import Phase, Run, loss_series, read
from backend.schema.memory_plan import Card
from backend.schema.messages import Trouble, to_line
from backend.schema.request import GenerationRequest
from studio.panels import engine_status, run_status
from studio.preferences import device_fault
from studio.widgets import formatting, svg

GIB = 2**30
RUN = Run(
    folder=Path("/runs/2026-11-30_15-04_red-cat"), name="2026-11-30_15-04_red-cat", status="running", sentence="Training.",
    process=None, phase=Phase("training"), step=30, total_steps=120, epoch=1, seconds_per_step=0.5, seconds_left=45.0,
    loss=0.1234, learning_rate=1e-4, samples=(), checkpoints=(), saved=(), memory={}, trouble=None, resumed={}, notes=(), model="m",
    started_at=0.0, changed_at=0.0, revision=("running", 1, 2, 3),
)  # fmt: skip


def text(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


def test_a_run_says_what_its_tensors_took_beside_what_was_predicted():
    counted = {"ram_bytes": GIB, "measured_bytes": 3 * GIB // 2, "predicted_bytes": 2 * GIB, "phases": {}}
    said = text(run_status.head(replace(RUN, memory=counted), now=0.0))
    assert "1.0 GB RAM; tensors at most 1.5 GB, predicted 2.0 GB" in said
    assert "predicted" not in text(run_status.head(replace(RUN, memory={"ram_bytes": GIB}), now=0.0))


def test_the_strip_says_who_has_the_card():
    card = Card("cuda:0", "RTX", 12 * GIB, 9 * GIB, ram_total_bytes=32 * GIB, ram_free_bytes=20 * GIB)
    idle = text(engine_status.strip(EngineSnapshot(state="idle"), [card], []))
    assert (
        "RTX" in idle
        and "3.0 GB used, 9.0 GB free" in idle
        and "12.0 GB used, 20.0 GB free" in idle
        and "ready" in idle
    )
    assert "Training red-cat, step 30 of 120" in text(engine_status.strip(EngineSnapshot(), [card], [RUN]))
    job = Job("1", GenerationRequest(), phase="generating", step=3, steps=12)
    assert "Generating, step 3 of 12" in text(engine_status.strip(EngineSnapshot(job=job), [card], []))


def test_work_waiting_and_trouble_are_told():
    job = Job("1", GenerationRequest(count=3), phase="generating", step=3, steps=12, picture=1, seconds_left=4.2)
    waiting = Waiting("2", GenerationRequest(prompt="<b>bold</b>"), held=True)
    trouble = Trouble("died", "The engine ended.", hint="Try again.", detail="Traceback <x>")
    html = engine_status.progress_panel(EngineSnapshot(job=job, queue=(waiting,), trouble=trouble))
    said = text(html)
    assert "step 3 of 12, picture 2 of 3, 4 s left" in said and "The engine ended. Try again." in said
    assert "1 request waiting" in said and "<b>bold" not in html and "<x>" not in html


def test_waiting_requests_of_one_prompt_are_told_apart():
    same = GenerationRequest(prompt="a cat", seed=1, width=128)
    queue = (
        Waiting("1", same, submitted_at=3600.0),
        Waiting("2", replace(same, seed=2, width=192), submitted_at=3661.0),
    )
    said = text(engine_status.progress_panel(EngineSnapshot(queue=queue)))
    assert re.search(r"1 a cat \d\d:00:00, Width 128, Seed 1 .* 2 a cat \d\d:01:01, Width 192, Seed 2", said)
    said = text(engine_status.progress_panel(EngineSnapshot(queue=(queue[0], replace(queue[0], id="3")))))
    assert "Seed" not in said and "2 requests waiting" in said


def test_failed_requests_are_told_one_by_one_each_with_a_second_try():
    trouble = Trouble("died", "The engine ended.", hint="Try again.")
    failed = tuple(
        Answer(str(n), GenerationRequest(prompt=f"prompt {n}"), trouble=trouble, ended_at=60.0) for n in range(5)
    )
    html = engine_status.progress_panel(EngineSnapshot(failed=failed, trouble=trouble))
    assert html.count("The engine ended.") == 3 and "prompt 4" in html and "2 more failed" in html
    assert re.findall(r'data-do="(\w+)" data-what="(\d*)"', html)[:2] == [("again", "4"), ("dismiss", "4")]
    alone = engine_status.progress_panel(EngineSnapshot(trouble=trouble))
    assert 'data-do="dismiss"' in alone and "again" not in re.findall(r'data-do="(\w+)"', alone)


def test_runs_of_one_name_are_told_apart(data):
    rows = []
    for rank, clock in ((4, "15-04"), (8, "15-05")):
        folder = data.runs / f"2026-11-30_{clock}_red-cat"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(f'{{"name": "red-cat", "lora_rank": {rank}}}')
        rows.append(replace(RUN, folder=folder, name=folder.name, started_at=float(rank)))
    said = text(run_status.runs_list([*rows[::-1], replace(RUN, name="2026-11-30_15-04_dog")], shown=None, now=60.0))
    assert "red-cat 2 of 2, Rank 8" in said and "red-cat 1 of 2, Rank 4" in said and "dog running" in said


def test_loading_shows_bytes_and_a_cancelled_job_says_so():
    job = Job("1", GenerationRequest(), phase="loading", part="dit", done_bytes=GIB, total_bytes=4 * GIB)
    assert "Loading the transformer, 1.0 GB of 4.0 GB" in text(engine_status.progress_panel(EngineSnapshot(job=job)))
    job = replace(job, phase="cancelling")
    assert "Cancelling" in text(engine_status.progress_panel(EngineSnapshot(job=job)))


def test_a_run_is_told_in_a_line_of_facts():
    said = text(run_status.head(RUN, now=30.0))
    for part in ("red-cat", "running", "30 of 120", "0.50 s", "45 s", "0.1234", "0.0001"):
        assert part in said


def test_a_run_that_died_says_why_and_offers_to_go_on():
    died = replace(RUN, status="died", trouble=Trouble("died", "It was killed.", hint="Resume goes on."), phase=None)
    assert "It was killed. Resume goes on." in text(run_status.head(died, now=0.0))
    assert run_status.buttons(died) == {"stop": False, "kill": False, "resume": True, "use": False, "discard": True}
    assert run_status.buttons(RUN)["stop"] and not run_status.buttons(replace(RUN, status="stopping"))["stop"]
    assert not any(run_status.buttons(None).values())


def test_the_run_to_watch_is_the_wished_the_living_the_newest():
    old, live = replace(RUN, name="old", status="complete"), replace(RUN, name="live")
    newest = replace(RUN, name="newest", status="stopped")
    assert run_status.choose([newest, live, old], "old").name == "old"
    assert run_status.choose([newest, live, old], "gone").name == "live"
    assert run_status.choose([newest, old], "").name == "newest"
    assert run_status.choose([], "") is None


def test_a_curve_has_few_points_and_no_nonsense():
    points = [(float(i), 1 / (i + 1)) for i in range(5000)] + [(5000.0, float("nan")), (5001.0, float("inf"))]
    html = svg.curve(points, mean=points[::7], marks=[(2500.0, 0.5)], name="loss", said="a < b", x_end=6000)
    for run in re.findall(r'points="([^"]+)"', html):
        pairs = [tuple(map(float, pair.split(","))) for pair in run.split()]
        assert 300 < len(pairs) <= svg.MOST_POINTS
        assert all(0 <= x <= svg.CURVE_WIDTH and 0 <= y <= svg.CURVE_HEIGHT for x, y in pairs)
    assert html.count("<circle") == 1 and "a &lt; b" in html
    assert "second step" in svg.curve([(1.0, 0.5)], mean=[], name="loss")
    low = svg.curve([(1.0, 2.5), (2.0, 0.01)], mean=[(1.0, 2.5), (2.0, 1.2)], name="loss").split("text-anchor", 2)[1]
    assert '"end">0<' in low, "losses are not below nothing"
    assert "<svg" in svg.curve([(1.0, 0.5), (2.0, 0.5)], mean=[], name="loss")


def test_the_head_and_the_curve_of_a_run_tell_one_loss(tmp_path):
    for number in range(1, 481):
        line = to_line("step", step=number, total_steps=500, epoch=1, loss=1 / number, learning_rate=1e-4, seconds=0.1)
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write(line)
            file.write(to_line("validation", step=number, loss=0.25) if number % 240 == 0 else "")
    run, series = read(tmp_path), loss_series(tmp_path, points=100)
    mean = sum(1 / number for number in range(441, 481)) / 40
    assert run.loss == pytest.approx(mean) and series.means[-1] == pytest.approx(mean) and len(series.steps) <= 100
    head, curve = text(run_status.head(run, now=0.0)), text(run_status.loss_curve(run, series))
    assert f"{mean:.4g}" in head and f"Loss {mean:.4g} at step 480, the mean of the last 40 steps." in curve
    assert "0.25 at step 480" in curve and 'title="Mean of the last 40 steps' in run_status.head(run, now=0.0)


def test_the_curve_of_a_long_run_begins_where_it_can_be_seen():
    series = LossSeries((1, 2), (1.0, 0.5), (1.0, 0.75))
    for step, total, end in ((2, 100_000, 100), (400, 100_000, 2000), (400, 500, 500)):
        assert f">{end} steps<" in run_status.loss_curve(replace(RUN, step=step, total_steps=total), series)


def test_numbers_are_said_as_people_say_them():
    assert [formatting.size_words(n) for n in (0, 999, 1536, 20 * 2**20, 1.5 * GIB)] == [
        "0 B",
        "999 B",
        "1.5 KB",
        "20 MB",
        "1.5 GB",
    ]
    assert [formatting.time_words(s) for s in (0.2, 8, 125, 4800)] == ["0 s", "8 s", "2 min 05 s", "1 h 20 min"]
    assert [formatting.pace_words(s) for s in (0, 0.456, 12)] == ["–", "0.46 s", "12 s"]
    assert formatting.count_words(1, "run") == "1 run" and formatting.count_words(2, "run") == "2 runs"


def test_the_sentence_at_a_field_cannot_break_out_of_its_style():
    html = formatting.faults_style({"width": 'is "x"</style><script>\\'}, prefix="set-")
    assert (
        html.startswith("<style>#set-width::after") and html.count("<") == 4
    )  # the style and the paragraph, opened and closed
    assert formatting.faults_style({}, prefix="set-") == ""


def test_a_device_is_one_that_is_here():
    cards = (Card("cuda:0", "RTX", 12 * GIB, 9 * GIB),)
    for device in ("auto", "cpu", "cuda", "cuda:0", "xpu:0"):
        assert device_fault(device, cards) == ""
    assert device_fault("cuda:1", cards) == "There is no device 'cuda:1' here. It can be auto, cuda:0, cpu."
    for device in ("cuda:0", "gpu", "", "cuda:"):
        assert "no device" in device_fault(device, (Card("cpu", "CPU", GIB, GIB),))
