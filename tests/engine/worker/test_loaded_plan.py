"""The engine does what the plan says, block by block, and takes what the plan said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backend.catalog.models.identify import identify_model
from backend.engine.devices import device_memory
from backend.engine.pipeline.pipeline import Pipeline
from backend.engine.tracing import live_tensors
from backend.engine.worker.loaded_plan import Placing
from backend.families import FAMILIES
from backend.planner.plan import plan
from backend.schema.paths import ASSETS
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest

pytestmark = pytest.mark.torch
MIB = 2**20


def test_blocks_that_stay_and_blocks_that_come_are_the_plan_s():
    spec = identify_model(ASSETS / "starter", FAMILIES)
    request = GenerationRequest(prompt="a red apple", width=128, height=128, num_inference_steps=2)
    card = replace(device_memory.probe("cpu"), dtypes=("bfloat16", "float32"), reserve_bytes=0)
    small = replace(card, total_bytes=21 * MIB, free_bytes=21 * MIB, used_by_others_bytes=0)
    found = plan(spec, small, request)
    resident, streamed = found.resident_blocks["dit"], found.streamed_blocks["dit"]
    assert found.verdict == "green" and resident and streamed, found.steps
    placing = Placing.of(found, request)
    pipeline = Pipeline(
        spec,
        dtype=torch.bfloat16,
        device="cpu",
        configs=placing.configs,
        vram_limit_bytes=placing.vram_limit_bytes,
        tiled_vae=placing.tiled_vae,
        halves_apart=placing.halves_apart,
        resident_blocks=placing.resident_blocks,
    )
    held: list[tuple[int, ...]] = []
    try:
        with live_tensors.measuring(pipeline) as peak:
            pipeline.generate(request, should_stop=lambda: held.append(pipeline.placements["dit"].resident_blocks()))
        dit = pipeline.placements["dit"]
        assert len(dit.blocks) == len(resident) + len(streamed)
    finally:
        pipeline.close()
    assert held[-1] == resident
    # while the transformer is away its rotary tables stay: 2 MiB, which no plan counts
    for phase in found.phases:
        assert peak.by_phase[phase.name] == pytest.approx(phase.live_bytes, rel=0.02, abs=2.2 * MIB), phase.name
    assert peak.highest_bytes == pytest.approx(found.peak_live_bytes, rel=0.02)
    assert peak.highest_bytes <= small.total_bytes


def test_a_script_that_takes_the_plan_keeps_its_blocks(tmp_path):
    from backend.commands.plan_report import table
    from backend.pipelines import ModelConfig, QwenImagePipeline

    spec = identify_model(ASSETS / "starter", FAMILIES)
    request = GenerationRequest(prompt="a red apple", width=128, height=128, num_inference_steps=2, guidance=1.0)
    card = replace(device_memory.probe("cpu"), dtypes=("bfloat16", "float32"), reserve_bytes=0, used_by_others_bytes=0)
    for mib in (14, 17, 21):
        found = plan(
            spec, replace(card, total_bytes=mib * MIB, free_bytes=mib * MIB), request, Preferences(allow_fp8=False)
        )
        resident, streamed = found.resident_blocks["dit"], found.streamed_blocks["dit"]
        assert found.verdict == "green" and streamed
        said = {
            name: {key: value for key, value in config.to_values().items() if value}
            for name, config in found.configs.items()
        }
        text = table(found, card)
        assert f"vram_limit={found.vram_limit_gib}" in text and all(
            f"{key}={value}" in text for key, value in said["dit"].items()
        )
        pipe = QwenImagePipeline.from_pretrained(
            device="cpu",
            vram_limit=found.vram_limit_gib,
            tokenizer_config=ModelConfig(path=ASSETS / "starter" / "tokenizer"),
            model_configs=[
                ModelConfig(path=list(part.files), **said.get(name, {})) for name, part in spec.parts.items()
            ],
        )
        try:
            held, peak = drawn(pipe.pipeline, request)
        finally:
            pipe.pipeline.close()
        assert held == resident and len(resident) + len(streamed) == 7
        assert peak.highest_bytes <= mib * MIB * 1.01


def drawn(pipeline, request):
    """(the transformer's blocks that stayed, the peak) of a picture."""
    held: list[tuple[int, ...]] = []
    with live_tensors.measuring(pipeline) as peak:
        pipeline.generate(request, should_stop=lambda: held.append(pipeline.placements["dit"].resident_blocks()))
    return held[-1], peak
