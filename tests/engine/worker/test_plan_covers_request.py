"""A loaded plan is kept for what it has room for, and for nothing else: guidance, words, LoRAs, pictures, caches count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PIL import Image

from backend.catalog.models.identify import identify_model
from backend.engine.devices import device_memory
from backend.engine.tracing import live_tensors
from backend.engine.worker import commands as engine_work
from backend.engine.worker.commands import Work
from backend.engine.worker.loaded_plan import Placing, Room
from backend.families import FAMILIES
from backend.planner.costs.device_speed import what_if
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.plan import budget_of, fixed_of, plan
from backend.schema.memory_plan import GIB
from backend.schema.paths import ASSETS
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest, LoraUse

pytestmark = pytest.mark.torch
MIB = 2**20
BARE = GenerationRequest(model="Qwen-Image", prompt="a red apple", width=2048, height=2048, guidance=1.0)


def placing(model: str, gib: float, request: GenerationRequest, *, with_room: bool = True) -> Placing:
    sizes, card = sizes_of(model), what_if(f"{gib}GiB")[0]
    room = Room(sizes, fixed_of(card), budget_of(card), "bfloat16") if with_room else None
    return Placing.of(plan(sizes, card, request), request, room=room)


@pytest.mark.parametrize("with_room", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {"guidance": 4.0},
        {"guidance": 4.0, "negative_prompt": "blur " * 400},
        {"prompt": "a red apple " * 500},
        {"step_cache": 0.1},
        {"width": 2304},
        {"width": 4096, "height": 1152},
        {"loras": "file"},
        {"count": 2},
    ],
)
def test_what_is_larger_than_the_plan_is_planned_anew(more, with_room, tmp_path):
    """On 24 GiB this picture of 2048 x 2048 fills the card to 23.38 of 23.40 GiB."""
    if more.get("loras"):
        with (tmp_path / "large.safetensors").open("wb") as file:
            file.truncate(GIB // 2)
        more = {"loras": (LoraUse(str(tmp_path / "large.safetensors")),)}
    found = placing("Qwen-Image", 24, BARE, with_room=with_room)
    assert found.plan.verdict == "green" and found.covers(BARE)
    assert not found.covers(replace(BARE, **more))
    assert found.covers(replace(BARE, width=1024, prompt="", seed=7, num_inference_steps=50))


def test_a_second_picture_to_edit_is_planned_anew(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (256, 256)).save(tmp_path / name)
    one, two = (tuple(str(tmp_path / name) for name in names) for names in (["a.png"], ["a.png", "b.png"]))
    request = replace(BARE, model="Qwen-Image-Edit-2509", width=1024, height=1024, edit_images=one)
    assert not placing("Qwen-Image-Edit-2509", 12, request, with_room=False).covers(replace(request, edit_images=two))
    for gib in (8, 12, 24):
        found = placing("Qwen-Image-Edit-2509", gib, request)
        more = found._needed(replace(request, edit_images=two))
        assert found.covers(replace(request, edit_images=two)) == (max(more.values()) <= found.room.budget_bytes)


def test_what_still_fits_the_arrangement_is_no_reason_to_load_anew():
    half = replace(BARE, width=1328, height=1328)
    found = placing("Qwen-Image", 12, half)
    assert max(found._needed(half).values()) == found.plan.peak_high_bytes
    assert found.covers(replace(half, width=256, height=256, guidance=4.0))
    assert not Placing().covers(half)


class Wire:
    def say(self, *_, **__):
        pass

    def should_stop(self, _):
        return False


def test_the_worker_loads_anew_for_guidance_and_stays_within_the_budget(data, monkeypatch):
    spec = identify_model(ASSETS / "starter", FAMILIES)
    sizes, here = sizes_of(spec), replace(device_memory.probe("cpu"), dtypes=("bfloat16", "float32"), reserve_bytes=0)
    bare = GenerationRequest(model=str(ASSETS / "starter"), prompt="an apple", guidance=1.0, num_inference_steps=2)
    guided = replace(bare, guidance=3.0)

    def of_mib(mib: int) -> tuple:
        card = replace(here, total_bytes=mib * MIB, free_bytes=mib * MIB, used_by_others_bytes=0)
        room = Room(sizes, fixed_of(card), budget_of(card), "bfloat16")
        return card, Placing.of(plan(sizes, card, bare), bare, room=room)

    # blocks fill what is left, so there is none for the other half of guidance
    small, planned = next(each for each in map(of_mib, range(12, 40)) if not each[1].covers(guided))
    assert planned.plan.verdict == "green" == plan(sizes, small, guided).verdict
    monkeypatch.setattr(device_memory, "probe", lambda *_, **__: small)
    work = Work(Wire())
    monkeypatch.setattr(engine_work.download, "preferences", lambda: Preferences(device="cpu", reserve_gib=0.0))
    try:
        first = work._ensure("1", bare)
        assert work._placing.placed == planned.placed
        second = work._ensure("2", guided)
        assert second is not first and work._placing.request == guided
        with live_tensors.measuring(second) as peak:
            second.generate(guided)
        assert peak.highest_bytes <= small.total_bytes
        assert work._ensure("3", bare) is second, "a smaller one is drawn as the model lies"
    finally:
        work._close()
