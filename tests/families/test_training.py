"""Every family that draws trains: LoRA and whole model, with every way to need less memory, gone on with as if never stopped; and what was
trained is drawn with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

from backend import families
from backend.catalog.models.identify import identify_lora, identify_model
from backend.engine.pipeline.pipeline import Pipeline
from backend.schema.request import GenerationRequest
from tests.tiny_models import MAKERS

pytestmark = pytest.mark.torch
each = pytest.mark.parametrize(
    "family", [name for name in MAKERS if name != "qwen_image"]
)  # whose runs are in tests/training


def same(a: Path, b: Path) -> bool:
    first, second = load_file(a), load_file(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def draw(pipeline: Pipeline) -> numpy.ndarray:
    request = GenerationRequest(prompt="a ball", width=64, height=64, num_inference_steps=2, seed=1)
    return numpy.asarray(pipeline.generate(request)[0], dtype=float)


@each
def test_a_lora_trains_goes_on_bit_for_bit_and_is_drawn_with(family, tiny, run_training, tmp_path: Path, events):
    model = tiny(MAKERS[family].__name__)
    flags = ("--batch_size", 2, "--save_steps", 2, "--sample_prompts", "a ball", "--sample_inference_steps", 1)
    assert run_training(tmp_path / "whole", *flags, "--max_steps", 4, model=model) == 0
    assert run_training(tmp_path / "halves", *flags, "--max_steps", 2, model=model) == 0
    again = ("--max_steps", 4, "--resume_from_checkpoint", "latest")
    assert run_training(tmp_path / "halves", *flags, *again, model=model) == 0
    assert same(tmp_path / "whole" / "step-4.safetensors", tmp_path / "halves" / "step-4.safetensors")
    assert list((tmp_path / "whole" / "samples").rglob("*.png"))
    losses = [event["loss"] for event in events(tmp_path / "whole") if event["event"] == "step"]
    assert len(losses) == 4 and all(numpy.isfinite(losses))
    path = tmp_path / "whole" / "step-4.safetensors"
    spec = identify_lora(path, families.FAMILIES)
    assert spec.family == family and spec.num_modules
    pipeline = Pipeline(identify_model(model, families.FAMILIES), dtype=torch.float32, device="cpu")
    before = draw(pipeline)
    drawn = {}
    for hot in (False, True):
        receipt = pipeline.add_lora("dit", path, strength=8.0, hot=hot)
        assert receipt.layers_applied == receipt.layers_found == spec.num_modules
        drawn[hot] = draw(pipeline)
        pipeline.clear_loras()
    assert numpy.abs(drawn[False] - before).max() > 0
    assert numpy.abs(drawn[True] - drawn[False]).max() <= 2


@each
def test_the_whole_transformer_trains_and_loads_again(family, tiny, run_training, tmp_path: Path):
    model = tiny(MAKERS[family].__name__)
    flags = ("--max_steps", 2, "--trainable_models", "dit", "--lora_base_model", "", "--save_dtype", "float32")
    assert run_training(tmp_path / "run", *flags, model=model) == 0
    trained, stored = load_file(tmp_path / "run" / "step-2.safetensors"), identify_model(model, families.FAMILIES)
    assert trained.keys() == stored.parts["dit"].tensors.keys()
    spec = identify_model([tmp_path / "run" / "step-2.safetensors", model / "vae"], families.FAMILIES)
    assert spec.family == family and "dit" in spec.parts


WAYS = {
    "checkpointing": ("--use_gradient_checkpointing",),
    "checkpoints in RAM": ("--use_gradient_checkpointing", "--use_gradient_checkpointing_offload"),
    "FP8 storage": ("--fp8_models", "dit,text_encoder"),
    "int8": ("--quant_options", "dit:int8"),
    "streamed": ("--offload_models", "dit"),
}


@each
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_need_less_memory_train_alike(family, way, tiny, run_training, tmp_path: Path, events):
    model = tiny(MAKERS[family].__name__)
    losses = []
    exactly = ("--max_steps", 2, "--mixed_precision", "no")  # in bfloat16 sums of gradients depend on their order
    for name, flags in (("plain", ()), ("way", WAYS[way])):
        assert run_training(tmp_path / name, *exactly, *flags, model=model) == 0
        losses.append([event["loss"] for event in events(tmp_path / name) if event["event"] == "step"])
    exact = way.startswith("checkpoint") or way == "streamed"
    assert losses[0] == losses[1] if exact else numpy.allclose(*losses, rtol=0.1)


@each
def test_two_stages_are_one_run(family, tiny, run_training, tmp_path: Path):
    """Split training: encodings first, the transformer alone afterwards."""
    model = tiny(MAKERS[family].__name__)
    assert run_training(tmp_path / "one", "--max_steps", 2, model=model) == 0
    assert run_training(tmp_path / "data", "--task", "sft:data_process", model=model) == 0
    stage = ("--task", "sft:train", "--max_steps", 2)
    assert run_training(tmp_path / "two", *stage, model=model, dataset=tmp_path / "data") == 0
    assert same(tmp_path / "one" / "step-2.safetensors", tmp_path / "two" / "step-2.safetensors")


@each
def test_results_say_what_they_are(family, tiny, run_training, tmp_path: Path):
    from safetensors import safe_open

    assert run_training(tmp_path / "run", "--max_steps", 1, model=tiny(MAKERS[family].__name__)) == 0
    with safe_open(tmp_path / "run" / "step-1.safetensors", "pt") as file:
        said = file.metadata()
    assert said["family"] == family and json.loads(said["config"])
