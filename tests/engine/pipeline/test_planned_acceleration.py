"""What a request's ways to be faster take is what was planned: cached steps, FP8 products, and the buffer of a compiled block."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.models.identify import identify_model
from backend.engine.acceleration import fp8_matmul
from backend.engine.devices import device_memory
from backend.engine.devices.capabilities import why_no_fp8_products
from backend.engine.loading import load
from backend.engine.offload import placement
from backend.engine.pipeline.pipeline import Pipeline
from backend.engine.tracing import live_tensors
from backend.families import FAMILIES
from backend.planner.costs.layout import PartLayout
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.costs.weight_bytes import on_card
from backend.planner.plan import plan
from backend.schema.memory_plan import VramConfig
from backend.schema.paths import ASSETS
from backend.schema.request import GenerationRequest

pytestmark = pytest.mark.torch
CPU, FP8 = torch.device("cpu"), "float8_e4m3fn"
SPEC = identify_model(ASSETS / "starter", FAMILIES)


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        ("bfloat16", {"step_cache": 0.01}),
        ("bfloat16", {"fp8_products": True}),
        ("float32", {"fp8_products": True}),
    ],
    ids=["step cache", "FP8 products", "FP8 products in float32"],
)
def test_a_faster_picture_takes_what_was_planned(more, dtype):
    if "fp8_products" in more and why_no_fp8_products(CPU):
        pytest.skip(why_no_fp8_products(CPU))
    request = GenerationRequest(
        prompt="a red apple on a table", width=192, height=192, num_inference_steps=4, guidance=4.0, **more
    )
    card = replace(device_memory.probe("cpu"), dtypes=(dtype,))
    found = next(phase for phase in plan(SPEC, card, request).phases if phase.name == "denoise")
    plain = next(
        phase for phase in plan(SPEC, card, replace(request, step_cache=0.0)).phases if phase.name == "denoise"
    )
    pipeline = Pipeline(SPEC, dtype=getattr(torch, dtype), device="cpu", fp8_products=request.fp8_products)
    try:
        with live_tensors.measuring(pipeline) as peak:
            pipeline.generate(request)
    finally:
        pipeline.close()
    assert peak.by_phase["denoise"] == pytest.approx(found.live_bytes, rel=0.02)
    if request.step_cache:  # which is of the picture's tokens, not of the weights
        assert peak.by_phase["denoise"] - plain.live_bytes > 0.5 * (found.live_bytes - plain.live_bytes) > 2**17


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("storage", ["bfloat16", FP8])
def test_the_buffers_of_a_compiled_block(whole, storage):
    part, sizes = SPEC.parts["dit"], sizes_of(SPEC).parts["dit"]
    module = load.build_meta(part)
    waits = (
        {"offload_device": "disk", "onload_device": "disk"}
        if storage == "bfloat16"
        else {"offload_dtype": FP8, "onload_dtype": FP8}
    )
    placed = placement.place(
        module,
        part,
        VramConfig(**waits, preparing_dtype=storage, computation_dtype="bfloat16"),
        device="cpu",
        resident=(),
    )
    placed.set_casting(whole=whole, codes=lambda unit: frozenset())
    placed.onload()
    hidden = torch.zeros(1, 4, module.config.in_channels, dtype=torch.bfloat16)
    text = torch.zeros(1, 3, module.config.joint_attention_dim, dtype=torch.bfloat16)
    with torch.no_grad():
        module(
            hidden_states=hidden,
            encoder_hidden_states=text,
            timestep=torch.ones(1),
            img_shapes=[[(1, 2, 2)]],
            return_dict=False,
        )
    mode = "streamed" if storage == "bfloat16" else "resident"
    planned = on_card(sizes, PartLayout(mode, storage, "disk", whole=whole), True, "bfloat16")[1]
    assert placed.held_bytes()["staging"] == pytest.approx(planned, rel=0.01)
    layer = on_card(sizes, PartLayout(mode, storage, "disk"), True, "bfloat16")[1]
    assert planned > 2 * layer if whole and storage == FP8 else planned == layer > 0
    placed.close()


def test_layers_that_are_multiplied_as_codes_need_no_cast():
    sizes = sizes_of(SPEC).parts["dit"]
    kinds = [on_card(sizes, PartLayout("parked", FP8, codes=codes), True, "bfloat16") for codes in (False, True)]
    assert kinds[0][0] == kinds[1][0] and kinds[0][1] > kinds[1][1] == 0
    assert fp8_matmul.ALIGNED == 16
