"""What the Python API is given by mistake: one sentence each, and nothing is loaded for it."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from backend.pipelines import ModelConfig, QwenImagePipeline
from backend.schema.messages import Trouble

pytestmark = pytest.mark.torch
load = QwenImagePipeline.from_pretrained


@pytest.mark.parametrize(
    "call, said",
    [
        (
            lambda: ModelConfig(offload_dtpe=torch.float32),
            "ModelConfig has no setting 'offload_dtpe'. Did you mean offload_dtype?",
        ),
        (lambda: ModelConfig(*range(20)), "ModelConfig has 17 settings, not 20"),
        (lambda: ModelConfig(path=3), "ModelConfig(path=...) is 3, which is not a text or a path"),
        (lambda: ModelConfig(path=["a.safetensors", 3]), "ModelConfig(path=...) is 3"),
        (lambda: ModelConfig(path=[]), "ModelConfig(path=[]) names no file"),
        (lambda: ModelConfig(path=""), "ModelConfig(path='') names nothing"),
        (lambda: ModelConfig(model_id=3), "ModelConfig(model_id=...) is 3"),
        (
            lambda: ModelConfig(path="x", offload_device=0),
            "ModelConfig(offload_device=...) is 0, which is not a text or a torch.device",
        ),
        (lambda: ModelConfig(path="x", offload_dtype=8), "which is not a text or a torch.dtype"),
        (lambda: load(model_configs=["x"]), "model_configs holds 'x', which is no ModelConfig"),
        (lambda: load(model_configs=ModelConfig(path="x")), "which is no list of ModelConfig"),
        (lambda: load(model_configs=None), "model_configs is None, which is no list of ModelConfig"),
        (lambda: load(model_configs=[ModelConfig(path="x")], device="gpu"), "'gpu' is no device"),
        (
            lambda: load(model_configs=[ModelConfig(path="x")], compile="yes"),
            "compile is 'yes', which is neither True nor False",
        ),
    ],
)
def test_before_anything_is_loaded(call, said):
    with pytest.raises(Trouble) as caught:
        call()
    assert said in str(caught.value)


@pytest.fixture(scope="module")
def pipe(tiny_qwen):
    names = ("transformer", "text_encoder", "vae")
    return load(
        model_configs=[ModelConfig(path=tiny_qwen / name) for name in names], torch_dtype=torch.float32, device="cpu"
    )


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda pipe: pipe("a", input_image=3), "input_image is 3, which is no picture"),
        (lambda pipe: pipe("a", tiled="yes"), "tiled is 'yes'"),
        (lambda pipe: pipe("a", tiled=True, tile_size=-3), "tile_size is -3"),
        (lambda pipe: pipe("a", on_step=3), "on_step is 3, which cannot be called"),
        (lambda pipe: pipe("a", rand_device="gpu"), "'gpu' is no device"),
        (lambda pipe: pipe.load_lora(pipe.dit, 3), "load_lora needs a file or a state dict, and was given 3"),
    ],
)
def test_with_a_pipeline(pipe, call, said):
    with pytest.raises(Trouble) as caught:
        call(pipe)
    assert said in str(caught.value)


def test_a_tokenizer_that_is_none_is_said(tiny_qwen):
    for config, said in (
        (ModelConfig(path=tiny_qwen / "vae"), "holds no tokenizer"),
        (str(tiny_qwen / "tokenizer"), "is no ModelConfig"),
    ):
        with pytest.raises(Trouble, match=said):
            load(model_configs=[ModelConfig(path=tiny_qwen / "vae")], tokenizer_config=config, device="cpu")


def test_a_limit_that_nothing_comes_under_is_said(tiny_qwen, recwarn):
    load(model_configs=[ModelConfig(path=tiny_qwen / "vae")], device="cpu", vram_limit=4)
    assert [str(one.message)[:31] for one in recwarn if "vram" in str(one.message)] == [
        "vram_limit=4 has no effect: no "
    ]
    recwarn.clear()
    states = {"offload_device": "disk", "onload_device": "disk", "preparing_device": "cpu"}
    load(model_configs=[ModelConfig(path=tiny_qwen / "transformer", **states)], device="cpu", vram_limit=4)
    assert not [one for one in recwarn if "vram" in str(one.message)]


def test_memory_that_runs_out_is_one_sentence(pipe, monkeypatch):
    monkeypatch.setattr(
        pipe.pipeline.parts["dit"],
        "forward",
        lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory.")),
    )
    with pytest.raises(Trouble, match="Out of memory while drawing: cpu has") as caught:
        pipe("a", num_inference_steps=1)
    assert caught.value.kind == "out_of_memory"


def test_a_config_can_be_copied_and_sent():
    config = ModelConfig(path="x", offload_dtype=torch.bfloat16)
    assert copy.copy(config) == copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
