"""Compiled blocks: the numbers of the plain ones, one graph for all blocks, prompts and sizes, wherever weights lie and whatever LoRA acts.

torch's tracer runs here for real; the graphs it finds are run by torch's eager kernels, so that the suite needs no compiler. What the
machine code makes of them is measured by `benchmarks/faster.py`.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy
import pytest
import torch
from PIL import Image

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.acceleration import compile_blocks
from backend.engine.devices import capabilities
from backend.engine.pipeline.pipeline import Pipeline
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest
from tests.families_exam_test import write_lora

pytestmark = pytest.mark.torch
REQUEST = GenerationRequest(prompt="a red apple", width=64, height=64, num_inference_steps=1)
FP8 = "float8_e4m3fn"


@pytest.fixture
def graphs(monkeypatch) -> list:
    """What was compiled, one entry a graph. The compiler forgets what other tests had compiled, so that each counts its own, whatever ran before."""
    found: list = []

    def backend(graph, inputs):
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep every line of it
    monkeypatch.setattr(compile_blocks, "BACKEND", backend)
    yield found
    torch._dynamo.reset()


def load(folder, **options) -> Pipeline:
    return Pipeline(identify_model(folder, families.FAMILIES), dtype=torch.float32, device="cpu", **options)


def both(pipeline: Pipeline, **asked) -> list:
    """The picture of plain blocks and that of compiled ones."""
    return [
        numpy.asarray(pipeline.generate(replace(REQUEST, **asked, compile=compile))[0]).tolist()
        for compile in (False, True)
    ]


def same(pipeline: Pipeline, **asked) -> bool:
    plain, ours = both(pipeline, **asked)
    return plain == ours


def test_one_graph_serves_all_blocks_prompts_and_sizes(deep_qwen, graphs):
    pipeline = load(deep_qwen)
    assert same(pipeline) and len(graphs) == 1
    assert same(pipeline, prompt="two green frogs in the snow", negative_prompt="dark") and same(pipeline, width=96)
    assert len(graphs) == 1 and "compiled" in pipeline.notes[0]
    pipeline.generate(REQUEST)
    assert all("forward" not in block.__dict__ for block in pipeline.parts["dit"].transformer_blocks)


def test_a_hot_lora_is_compiled_once_and_its_strength_rank_and_absence_never(deep_qwen, graphs, tmp_path):
    pipeline = load(deep_qwen)
    plain, _ = both(pipeline)
    path = write_lora(pipeline, tmp_path / "l.safetensors")
    receipt = pipeline.add_lora("dit", path, hot=True)
    with_lora, ours = both(pipeline)
    assert with_lora == ours != plain
    known = len(graphs)
    assert known <= 2
    pipeline.set_lora_strength(receipt, 0.3)
    assert same(pipeline) and same(pipeline, step_cache=0.5, num_inference_steps=3)
    pipeline.add_lora("dit", write_lora(pipeline, tmp_path / "m.safetensors", size=0.1), hot=True)  # twice the rank
    assert same(pipeline)
    pipeline.remove_lora(receipt)
    assert same(pipeline)
    pipeline.clear_loras()
    assert both(pipeline) == [plain, plain]
    pipeline.add_lora("dit", path, hot=False)
    assert same(pipeline) and len(graphs) == known


def test_references_of_an_edited_picture_go_through_the_graph(tiny_edit, graphs, tmp_path):
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "a.png")
    pipeline = load(tiny_edit("edit-2509"))
    assert same(pipeline, edit_images=(str(tmp_path / "a.png"),)) and len(graphs) == 1
    assert same(pipeline, edit_images=(str(tmp_path / "a.png"),) * 2) and len(graphs) == 1


@pytest.mark.parametrize("storage", ["float32", FP8])
def test_weights_that_come_from_disk_and_are_cast(deep_qwen, graphs, tmp_path, storage):
    config = VramConfig(offload_device="disk", onload_device="cpu", onload_dtype=storage, preparing_device="cpu")
    if storage == "float32":
        config = replace(config, onload_device="disk", preparing_dtype=storage)
    pipeline = load(deep_qwen, configs={"dit": config}, vram_limit_bytes=0)
    assert same(pipeline)
    receipt = pipeline.add_lora("dit", write_lora(pipeline, tmp_path / "l.safetensors"))
    assert receipt.mode == "hot" and same(pipeline) and len(graphs) <= 2
    pipeline.close()


def test_without_a_compiler_it_is_said_before_anything_is_loaded(deep_qwen, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    read = []
    with pytest.raises(Trouble, match=r"C\+\+ compiler") as caught:
        load(deep_qwen, compile=True, on_bytes=lambda *_: read.append(1))
    assert caught.value.kind == "no_compiler" and not read
    with pytest.raises(Trouble, match=r"C\+\+ compiler"):
        load(deep_qwen).generate(replace(REQUEST, compile=True))
    assert (
        "triton" in capabilities.why_no_compiler(torch.device("cuda"))
        and capabilities.why_no_compiler(torch.device("mps")) is None
    )
