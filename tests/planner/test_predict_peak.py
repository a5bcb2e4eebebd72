"""A plan carries the layout that it was made from: what the planned job takes under it is what the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend.planner import predict_peak
from backend.planner.costs.device_speed import what_if
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.plan import fixed_of, plan, work_of
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest


@pytest.mark.parametrize("dtypes", [None, ("float32",)], ids=["bfloat16", "float32 alone"])
@pytest.mark.parametrize("gib", [4, 8, 16, 24, 80])
@pytest.mark.parametrize("name", ["Qwen-Image", "FLUX.1-dev", "Qwen-Image-Edit-2509"])
def test_the_planned_job_takes_what_the_plan_says(name: str, gib: int, dtypes: tuple[str, ...] | None):
    sizes, (card, *_) = sizes_of(name), what_if(f"{gib}GiB", ram_gib=64, reserve_gib=0.6)
    card = replace(card, dtypes=dtypes or card.dtypes)
    for request in (GenerationRequest(), GenerationRequest(fp8_products=True), GenerationRequest(compile=True)):
        found = plan(sizes, card, request, Preferences())
        work, _ = work_of(request, sizes, card)
        again = predict_peak.live_bytes(found, sizes, work, fixed_of(card))
        for phase in found.phases:
            # of a model that edits, vision and text towers take turns in the plan; 3 MiB are between them here
            assert again[phase.name] == pytest.approx(phase.live_bytes, rel=0.002 if "Edit" in name else 0)
