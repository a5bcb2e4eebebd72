"""A loaded model: prompts encoded once, cancel, previews, LoRAs, parts that are missing, memory that comes back."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy
import pytest
import torch

from backend import families
from backend.catalog.models.identify import identify_files, identify_model
from backend.engine.pipeline import latent_preview
from backend.engine.pipeline.pipeline import Pipeline
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Cancelled, Trouble
from backend.schema.request import GenerationRequest

pytestmark = pytest.mark.torch
REQUEST = GenerationRequest(prompt="a red apple", width=64, height=64, num_inference_steps=3)


def load(folder, **options) -> Pipeline:
    return Pipeline(identify_model(folder, families.FAMILIES), dtype=torch.float32, device="cpu", **options)


def calls_of(module) -> list:
    seen = []
    module.register_forward_hook(lambda *_: seen.append(1))
    return seen


def values(picture) -> numpy.ndarray:
    return numpy.asarray(picture, dtype=float)


def test_prompts_are_encoded_once(tiny_qwen):
    pipeline = load(tiny_qwen)
    seen = calls_of(pipeline.parts["text_encoder"])
    first = pipeline.generate(REQUEST)[0]
    assert len(seen) == 2  # the prompt and the empty negative one
    again = pipeline.generate(REQUEST)[0]
    assert len(seen) == 2 and values(first).tolist() == values(again).tolist()


def test_a_prompt_that_is_cut_is_said(tiny_qwen):
    pipeline = load(tiny_qwen)
    pipeline.encode_prompt("a cat " * 100)
    assert not pipeline.notes
    pipeline.encode_prompt("a cat and " * 400)
    assert "512 tokens" in pipeline.notes[0]


def test_guidance_of_one_runs_no_second_half(tiny_qwen):
    pipeline = load(tiny_qwen)
    batches = []
    pipeline.parts["dit"].register_forward_hook(lambda _, __, output: batches.append(output[0].shape[0]))
    pipeline.generate(replace(REQUEST, guidance=1.0))
    pipeline.generate(REQUEST)
    assert batches == [1] * 3 + [2] * 3  # with guidance both halves go through the blocks at once


def test_cancel_stops_before_the_next_step_and_decodes_nothing(tiny_qwen):
    pipeline = load(tiny_qwen)
    steps, decoded = [], calls_of(pipeline.parts["vae"].decoder)
    with pytest.raises(Cancelled):
        pipeline.generate(REQUEST, on_step=lambda step: steps.append(step.step), should_stop=lambda: len(steps) == 2)
    assert steps == [1, 2] and not decoded


def test_each_picture_of_several_is_that_of_its_seed_alone(tiny_qwen):
    pipeline = load(tiny_qwen)
    several = pipeline.generate(replace(REQUEST, count=3, seed=7))
    alone = pipeline.generate(replace(REQUEST, seed=9))[0]
    assert values(several[2]).tolist() == values(alone).tolist() != values(several[1]).tolist()


def test_strength_of_nothing_keeps_the_picture_and_of_one_ignores_it(tiny_qwen, tmp_path):
    from PIL import Image

    pipeline = load(tiny_qwen)
    path = tmp_path / "in.png"
    Image.new("RGB", (100, 64), (200, 30, 30)).save(path)
    given = replace(REQUEST, input_image=str(path))
    assert values(pipeline.generate(replace(given, denoising_strength=0.0))[0]).shape == (64, 64, 3)
    Image.new("RGB", (100, 64), (20, 30, 200)).save(tmp_path / "other.png")
    ignored = [
        values(pipeline.generate(replace(REQUEST, input_image=str(one), denoising_strength=1.0))[0])
        for one in (path, tmp_path / "other.png")
    ]
    assert ignored[0].tolist() == ignored[1].tolist()


def test_previews_come_by_the_vae_or_by_the_learnt_map_and_near_the_end_resemble_the_picture(monkeypatch):
    from backend.schema.paths import ASSETS

    monkeypatch.setattr(latent_preview, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(latent_preview, "SHARE", 1e9)
    pipeline = load(ASSETS / "starter")
    for cells in (32, 8):
        monkeypatch.setattr(latent_preview, "DECODED_CELLS", cells)
        shown = []
        made = pipeline.generate(
            GenerationRequest(prompt="a red apple"), on_step=lambda s, shown=shown: shown.append(s.preview())
        )[0]
        assert len([one for one in shown if one is not None]) == 11 and shown[-1] is None
        small, whole = (values(one.resize((8, 8))) for one in (shown[-2], made))
        assert numpy.abs(small - whole).mean() < 25


def test_what_is_missing_is_named(tiny_qwen):
    spec = identify_files([tiny_qwen / "transformer" / "diffusion_pytorch_model.safetensors"], families.FAMILIES)
    pipeline = Pipeline(spec, dtype=torch.float32, device="cpu")
    assert set(pipeline.parts) == {"dit"}
    with pytest.raises(Trouble, match="text_encoder"):
        pipeline.generate(REQUEST)


@pytest.mark.parametrize("asked", [{"width": 72}, {"height": 8}])
def test_sizes_the_model_cannot_draw_are_refused(tiny_qwen, asked):
    with pytest.raises(Trouble, match="multiple of 16"):
        load(tiny_qwen).generate(replace(REQUEST, **asked))


def test_values_that_are_no_numbers_are_said(tiny_qwen):
    pipeline = load(tiny_qwen)
    pipeline.parts["dit"].proj_out.bias.data.fill_(float("nan"))
    with pytest.raises(Trouble) as caught:
        pipeline.generate(REQUEST)
    assert caught.value.kind == "not_finite"


def test_placed_parts_draw_the_resident_picture_and_are_parked_when_not_needed(tiny_qwen):
    resident = load(tiny_qwen).generate(REQUEST)[0]
    parked = VramConfig(offload_device="disk", onload_device="cpu", onload_dtype="float32")
    pipeline = load(tiny_qwen, configs={name: parked for name in ("dit", "text_encoder", "vae")})
    assert values(pipeline.generate(REQUEST)[0]).tolist() == values(resident).tolist()
    assert {name: placed.level for name, placed in pipeline.placements.items()} == {
        "dit": "offload",
        "text_encoder": "offload",
        "vae": "onload",
    }
    pipeline.close()


def test_out_of_memory_takes_the_next_rung_and_says_so(tiny_qwen):
    pipeline = load(tiny_qwen)
    expected, left = pipeline.generate(REQUEST)[0], [1]

    def runs_out(*_):
        if left:
            left.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    pipeline.parts["dit"].register_forward_pre_hook(runs_out)
    picture = pipeline.generate(REQUEST)[0]
    assert not left and numpy.abs(values(picture) - values(expected)).max() <= 1
    assert len(pipeline.notes) == 1 and pipeline.notes[0].startswith("Out of memory while the picture was drawn, so ")


def test_loads_and_unloads_do_not_grow(tiny_qwen):
    import psutil

    rss = []
    load(tiny_qwen).close()
    gc.freeze()  # else each collection looks through all of torch
    for _ in range(20):
        pipeline = load(tiny_qwen)
        pipeline.generate(replace(REQUEST, width=32, height=32, num_inference_steps=1))
        pipeline.close()
        del pipeline
        gc.collect()
        rss.append(psutil.Process().memory_info().rss)
    gc.unfreeze()
    assert rss[-1] - rss[4] < 8 * 2**20, [value >> 20 for value in rss]
