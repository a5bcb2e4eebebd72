"""The estimate beside the buttons: drawn from a plan of the starter, on this machine and on cards that are not here."""

from __future__ import annotations

import re

import pytest

from backend.families import FAMILIES
from backend.host.engine.client import Engine
from backend.planner import history
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from studio.generate import events, tab
from studio.panels import memory_estimate
from studio.panels.memory_graph import MOST_POINTS, Use, graph, grown, watched
from studio.state.context import Studio
from studio.train import tab as train


@pytest.fixture
def studio(data):
    engine = Engine(data, fake=True)
    yield Studio(data, engine, FAMILIES)
    engine.stop()


def widths(html: str) -> list[float]:
    return [float(found) for found in re.findall(r'<i style="width:([\d.]+)%', html)]


def test_every_phase_of_a_picture_has_a_bar_within_the_card(studio):
    html = tab.plan_of(studio, GenerationRequest(), "")
    assert ">Fits<" in html and "this machine" in html
    for phase in ("Read the prompt", "Denoise", "Decode"):
        assert phase in html
    assert widths(html) and sum(widths(html)) <= 3 * 100


def test_a_what_if_card_is_planned_for_and_marked(studio):
    html = tab.plan_of(studio, GenerationRequest(), "12GiB")
    assert re.search(r'class="chip on" data-do="card" data-what="12GiB"', html)
    assert "of 12.0 GB on a 12 GB card" in html and "iB" not in re.sub(r'data-what="\w+"', "", html)


def test_what_does_not_fit_is_offered_to_be_made_smaller_and_then_fits(studio):
    large = GenerationRequest(width=8192, height=6144)
    assert memory_estimate.estimate(studio, large.model, large, what_if="2GiB").plan.verdict == "red"
    assert "Make it fit" in tab.plan_of(studio, large, "2GiB")
    smaller = events.smaller_until_it_fits(studio, large, "2GiB")
    assert memory_estimate.estimate(studio, smaller.model, smaller, what_if="2GiB").plan.verdict == "green"
    assert smaller.width % 16 == smaller.height % 16 == 0 and smaller.width > smaller.height


def test_a_size_that_the_model_refuses_is_told_beside_what_fits(studio):
    html = tab.plan_of(studio, GenerationRequest(width=256, height=256), "")
    assert ">Fits<" not in html and ">Not this size<" in html and "This model draws 128 x 128 pixels" in html
    assert "Not this size" not in tab.plan_of(studio, GenerationRequest(width=128, height=128), "")


def test_what_a_receipt_will_call_predicted_is_in_the_plan(studio):
    from backend.engine.worker.loaded_plan import computing_of, fixed_of
    from backend.planner import predict_peak
    from backend.planner.workload import work_of_request
    from studio.widgets.formatting import size_words

    request = GenerationRequest(width=128, height=128)
    sizes, card = memory_estimate.sizes_of_model(studio, request.model)[0], memory_estimate.this_card(studio)
    found = memory_estimate.estimate(studio, request.model, request, what_if="")
    alive = predict_peak.live_bytes(
        found.plan, sizes, work_of_request(request, sizes, computing=computing_of(card, sizes.family)), fixed_of(card)
    )
    assert f"Tensors are {size_words(max(alive.values()))} of it" in memory_estimate.panel(found, what_if="")


def test_settings_of_the_plan_are_offered_by_another_name_where_all_fits_without_them(studio):
    config = from_values(TrainingConfig, {"max_pixels": 16384})
    found = memory_estimate.estimate(studio, config.model.model, config, what_if="12GiB")
    assert found.plan.verdict == "green"
    html = memory_estimate.panel(found, what_if="12GiB", fit=True)
    assert "Use the plan's settings" in html and "Make it fit" not in html


def test_a_training_run_is_planned_with_its_optimizer(studio):
    html = train.plan_of(studio, from_values(TrainingConfig, {"max_pixels": 16384}), "12GiB")
    assert "Train a step" in html and "LoRA and optimizer" in html


def test_what_the_last_run_took_is_told_beside_what_was_predicted(studio):
    config = from_values(TrainingConfig, {"max_pixels": 16384})
    card, before = memory_estimate.this_card(studio), memory_estimate.answers(studio)
    assert "Last time" not in train.plan_of(studio, config, "")
    history.remember(
        studio.places.user / "measured.json",
        card,
        "qwen_image",
        kind=history.kind_of(config),
        predicted_bytes=3 * 2**30,
        measured_bytes=2**31,
    )
    assert memory_estimate.answers(studio) != before
    assert "Last time: predicted 3.0 GB, measured 2.0 GB." in train.plan_of(studio, config, "")
    assert "Last time" not in train.plan_of(studio, config, "12GiB"), "that card has measured nothing"


def test_a_model_of_which_nothing_is_known_is_no_crash(studio, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Trouble):
        memory_estimate.estimate(studio, "nobody/nothing", GenerationRequest(), what_if="")
    assert "No estimate" in tab.plan_of(studio, GenerationRequest(model="nobody/nothing"), "")


def test_the_use_graph_keeps_the_last_points_and_begins_anew_with_another_job():
    points = []
    for i in range(MOST_POINTS + 5):
        points = grown(points, float(i), 1e9)
    assert len(points) == MOST_POINTS and points[-1][0] == MOST_POINTS + 4
    seen = watched({"other": 1}, "a", Use(1.0, 5, 0, 0))
    seen = watched(seen, "a", Use(2.0, 6, 0, 0))
    assert seen["use"] == [(1.0, 5), (2.0, 6)] and seen["other"] == 1
    assert watched(seen, "b", Use(3.0, 7, 0, 0))["use"] == [(3.0, 7)]
    assert watched(seen, "", None) == {"other": 1}


def test_the_use_graph_says_what_it_shows():
    html = graph([(0.0, 1e9), (1.0, 2e9)], Use(1.0, int(2e9), 0, 2**30), predicted=3e9)
    assert "predicted peak 2.8 GB" in html and "1.9 GB in use" in html and "1.0 GB of RAM free" in html
    assert graph([(0.0, 1e9)], Use(0.0, 1, 0, 0), predicted=0) == ""


def test_a_whole_process_is_not_held_against_a_prediction_of_weights():
    html = graph([(0.0, 1e9), (1.0, 2e9)], Use(1.0, int(2e9), 0, 2**30, with_libraries=True), predicted=3e9)
    assert "predicted" not in html and "1.9 GB in use, with libraries" in html
    html = graph(
        [(0.0, 1e9), (1.0, 2e9)],
        Use(1.0, int(2e9), 0, 2**30, with_libraries=True),
        predicted=3e9,
        told={"libraries_bytes": 2**30},
    )
    assert "predicted peak 3.8 GB, both with libraries" in html and 'class="predicted"' in html


def test_what_the_worker_holds_and_what_it_uses_of_it_are_told_apart():
    told = {"allocated_bytes": 3 * 2**30, "used_bytes": 4 * 2**30}
    html = graph([(0.0, 1e9), (1.0, 5e9)], Use(1.0, int(5e9), 2**30, 2**30), predicted=6e9, told=told)
    assert "allocated 3.0 GB, reserved 4.0 GB" in html and "others 1.0 GB" in html and "predicted peak 5.6 GB" in html


def test_on_a_machine_without_a_card_the_panel_speaks_of_none(studio):
    request = GenerationRequest(width=128, height=128)
    config = from_values(TrainingConfig, {"max_pixels": 16384})
    for job, plan_of in ((request, tab.plan_of), (config, train.plan_of)):
        job = tab.for_its_model(studio, job) if job is request else job
        html = plan_of(studio, job, "", memory_estimate.asked_of(job, "", "1.5"))
        seen = " ".join([re.sub(r"<[^>]+>", " ", html), *re.findall(r'(?:title|aria-label)="([^"]*)"', html)])
        assert "Least RAM" in seen and "With 1.5 GB of RAM more free" in seen
        assert not re.search(r"\b(card|GPU|VRAM)\b", seen, re.IGNORECASE), seen


def test_an_amount_that_cannot_be_is_said_beside_the_answers(studio):
    job = tab.for_its_model(studio, GenerationRequest())
    html = tab.plan_of(studio, job, "", memory_estimate.asked_of(job, "", "-3"))
    assert "is no amount of memory" in html and "Largest picture" in html
    assert "What would fit?" in tab.plan_of(studio, job, "", "another|")


def test_a_family_that_is_not_made_here_is_said_beside_what_it_would_take(studio):
    for model in ("Wan-AI/Wan2.1-T2V-1.3B", "Qwen/Qwen-Image-Layered"):
        html = tab.plan_of(studio, GenerationRequest(model=model), "24GiB")
        assert ">Not drawn here<" in html and ">Fits<" not in html and "draws no pictures here yet" in html
    config = from_values(TrainingConfig, {"model": "Wan-AI/Wan2.1-T2V-1.3B"})
    html = train.plan_of(studio, config, "80GiB")
    assert ">Not so<" in html and "cannot be trained here" in html
