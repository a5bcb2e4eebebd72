"""Cached steps: off is exact, near steps run the first block only, each picture and each half of guidance for itself, and it is said."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.acceleration import first_block_cache
from backend.engine.pipeline.pipeline import Pipeline
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest

pytestmark = pytest.mark.torch
STEPS = 4
REQUEST = GenerationRequest(prompt="a red apple", width=64, height=64, num_inference_steps=STEPS, seed=3)
ALWAYS = 1e9  # a threshold under which every step after the first is near


def load(folder, **options) -> Pipeline:
    return Pipeline(identify_model(folder, families.FAMILIES), dtype=torch.float32, device="cpu", **options)


def draw(pipeline: Pipeline, **asked) -> list:
    return [numpy.asarray(one).tolist() for one in pipeline.generate(replace(REQUEST, **asked))]


def calls_of(pipeline: Pipeline) -> list[int]:
    """Counts per block, filled as it draws."""
    counts = [0] * len(pipeline.parts["dit"].transformer_blocks)

    def counted(index):
        def hook(*_):
            counts[index] += 1

        return hook

    for index, block in enumerate(pipeline.parts["dit"].transformer_blocks):
        block.register_forward_pre_hook(counted(index))
    return counts


def test_near_steps_run_the_first_block_only_and_it_is_said(deep_qwen):
    pipeline = load(deep_qwen)
    exact = draw(pipeline)
    counts = calls_of(pipeline)
    cached = draw(pipeline, step_cache=ALWAYS)
    assert counts == [STEPS, 1, 1, 1] and cached != exact
    assert pipeline.notes == [
        "Step cache 1e+09: 3 of 4 passes reused what an earlier one computed; the picture is close to the exact one, not the same."
    ]
    assert draw(pipeline) == exact and counts == [2 * STEPS, 1 + STEPS, 1 + STEPS, 1 + STEPS]
    assert type(pipeline.parts["dit"].transformer_blocks) is torch.nn.ModuleList


def test_steps_that_are_not_near_are_computed_as_ever(deep_qwen):
    pipeline = load(deep_qwen)
    assert draw(pipeline, step_cache=1e-6) == draw(pipeline)
    assert "no step was close enough" in pipeline.notes[0]


def test_every_picture_and_every_half_is_for_itself(deep_qwen):
    pipeline = load(deep_qwen)
    assert draw(pipeline, step_cache=ALWAYS, count=2)[1] == draw(pipeline, step_cache=ALWAYS, seed=4)[0]
    apart = load(deep_qwen, halves_apart=True)
    counts = calls_of(apart)
    halves = draw(apart, step_cache=ALWAYS)
    assert counts == [2 * STEPS, 2, 2, 2]
    together = draw(pipeline, step_cache=ALWAYS)
    assert numpy.abs(numpy.array(halves, float) - numpy.array(together, float)).max() <= 1


def test_skipped_blocks_are_not_fetched(deep_qwen):
    disk = VramConfig(offload_device="disk", onload_device="disk", preparing_device="disk")
    pipeline = load(deep_qwen, configs={"dit": disk}, vram_limit_bytes=0)
    placed = pipeline.placements["dit"]
    moved = []
    for threshold in (0.0, ALWAYS):
        before = placed.moved_bytes
        draw(pipeline, step_cache=threshold, num_inference_steps=10)
        moved.append(placed.moved_bytes - before)
    assert moved[1] < 0.3 * moved[0], moved  # one pass of ten, and what had been begun to be fetched
    pipeline.close()


def test_a_guess_is_half_way_to_the_line_through_the_last_two():
    kept = first_block_cache.Kept()
    for kept.call, value in ((1, 2.0), (2, 6.0)):
        kept.renew(torch.zeros(1), (torch.tensor([value]),))
        kept.call += 1
    assert kept.guess()[0].item() == 8.0
    kept.call = 4
    assert kept.guess()[0].item() == 10.0
    assert first_block_cache._near(torch.ones(2, 3), torch.ones(2, 3), 0.0)
    assert not first_block_cache._near(
        torch.tensor([[1.0], [1.3]]), torch.ones(2, 1), 0.2
    )  # one half of two is not near


def test_where_it_cannot_apply_it_is_said(tiny_qwen):
    with pytest.raises(Trouble, match="only 2"):
        draw(load(tiny_qwen), step_cache=0.1)
    with pytest.raises(Trouble, match="cannot be cached"):
        first_block_cache.StepCache(SimpleNamespace(TITLE="Another", CACHED_BLOCKS=()), torch.nn.Module(), 0.1)
