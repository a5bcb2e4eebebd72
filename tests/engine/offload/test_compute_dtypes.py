"""Weights kept in bfloat16 and computed with in float32, as on cards that are not quick in bfloat16."""

from __future__ import annotations

import math

import numpy
import pytest

torch = pytest.importorskip("torch")

from backend.catalog.models.identify import identify_model
from backend.engine.pipeline.pipeline import Pipeline
from backend.families import FAMILIES
from backend.schema.memory_plan import VramConfig
from backend.schema.paths import ASSETS
from backend.schema.request import GenerationRequest

pytestmark = pytest.mark.torch


def test_a_picture_is_that_of_float32_weights(tmp_path):
    request = GenerationRequest(prompt="a red apple", width=128, height=128, num_inference_steps=2, seed=3)
    spec, pictures, held = identify_model(ASSETS / "starter", FAMILIES), [], []
    narrow = VramConfig(*["bfloat16", "cpu"] * 3, "float32", "cpu")
    for configs in ({}, {"dit": narrow, "text_encoder": narrow}):
        pipeline = Pipeline(spec, dtype=torch.float32, device="cpu", configs=configs)
        pictures.append(numpy.asarray(pipeline.generate(request)[0]))
        placed = pipeline.placements.get("dit")
        held.append(sum(unit.raw.nbytes for unit in placed.blocks) if configs else None)
        pipeline.close()
    assert numpy.array_equal(*pictures)
    blocks = sum(
        math.prod(at.shape) for key, at in spec.parts["dit"].tensors.items() if key.startswith("transformer_blocks.")
    )
    assert held[1] == pytest.approx(2 * blocks, rel=0.01)
