"""What is predicted of a job and what is measured of it are the same bytes: those of live tensors, phase by phase."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from backend.catalog.models.identify import identify_model
from backend.engine.devices import device_memory
from backend.engine.pipeline.pipeline import Pipeline
from backend.engine.tracing import live_tensors
from backend.families import FAMILIES
from backend.planner import predict_peak
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.plan import fixed_of, plan
from backend.planner.workload import work_of_request
from backend.schema.paths import ASSETS
from backend.schema.request import GenerationRequest

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def starter():
    return identify_model(ASSETS / "starter", FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_every_phase_of_the_starter_takes_what_was_predicted(starter, dtype, guidance):
    request = GenerationRequest(
        prompt="a red apple on a table", width=160, height=128, num_inference_steps=2, guidance=guidance
    )
    card = replace(device_memory.probe("cpu"), dtypes=(dtype,))
    found = plan(starter, card, request)
    pipeline = Pipeline(starter, dtype=getattr(torch, dtype), device="cpu")
    try:
        with live_tensors.measuring(pipeline) as peak:
            pipeline.generate(request)
    finally:
        pipeline.close()
    assert {phase.name for phase in found.phases} == set(peak.by_phase)
    for phase in found.phases:
        assert phase.live_bytes == pytest.approx(peak.by_phase[phase.name], rel=0.02), phase.name
    assert peak.highest_bytes == pytest.approx(found.peak_live_bytes, rel=0.005)
    sizes = sizes_of(starter)
    again = predict_peak.live_bytes(found, sizes, work_of_request(request, sizes, computing=dtype), fixed_of(card))
    assert again == {phase.name: phase.live_bytes for phase in found.phases}


def test_every_phase_of_an_edit_takes_what_was_predicted(tmp_path):
    """The starter's networks, its vision tower among them, as a model that edits: two pictures of other shapes than the result."""
    folder = shutil.copytree(ASSETS / "starter", tmp_path / "edit")
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "QwenImageEditPlusPipeline", "_reference_pixels": 256 * 256})
    )
    Qwen2VLImageProcessorPil().save_pretrained(folder / "processor")
    files = tuple(str(tmp_path / f"{number}.png") for number in range(2))
    for file, shape in zip(files, ((300, 200), (80, 240)), strict=True):
        Image.linear_gradient("L").resize(shape).save(file)
    request = GenerationRequest(prompt="make it red", width=160, height=128, num_inference_steps=2, edit_images=files)
    spec, card = identify_model(folder, FAMILIES), replace(device_memory.probe("cpu"), dtypes=("bfloat16",))
    found, sizes = plan(spec, card, request), sizes_of(spec)
    assert not sizes.estimating and {phase.name for phase in found.phases} == {"text", "encode", "denoise", "decode"}
    pipeline = Pipeline(spec, dtype=torch.bfloat16, device="cpu")
    with live_tensors.measuring(pipeline) as peak:
        pipeline.generate(request)
    tokens = len(pipeline.encode_prompt(request.prompt, [Image.open(file) for file in files])["embeds"])
    work = replace(work_of_request(request, sizes), text_tokens=tokens + 64)  # words are guessed, pictures counted
    predicted = predict_peak.live_bytes(found, sizes, work, fixed_of(card))
    predicted["decode"] = max(
        predicted["decode"], predicted.pop("encode")
    )  # what the autoencoder does is measured as one phase
    assert predicted.keys() == peak.by_phase.keys()
    for phase, measured in peak.by_phase.items():
        assert predicted[phase] == pytest.approx(measured, rel=0.02), phase


def test_what_was_there_before_is_not_counted_and_what_is_dropped_is():
    kept = torch.zeros(1000)
    measure = live_tensors.Measure({}, CPU)
    measure.phase("one")
    view = kept.view(10, 100).t()
    first = torch.zeros(2**18)
    del first
    second = torch.zeros(2**16) + view.sum()
    measure.phase("")
    assert measure.by_phase == {"one": 2**20}
    measure.phase("two")
    third = torch.zeros(2**16)
    measure.end()
    assert measure.by_phase["two"] == second.nbytes + third.nbytes and measure.highest_phase == "one"
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_known_job_is_not_looked_at():
    measure = live_tensors.Measure({}, CPU, known_bytes=5)
    measure.phase("one")
    torch.zeros(100)
    measure.end()
    assert measure.highest_bytes == 5 and not measure.by_phase
