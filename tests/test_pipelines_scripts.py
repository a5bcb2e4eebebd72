"""Scripts for DiffSynth-Studio, only the import changed: models of the working folder, settings that mean what they mean there, or a sentence."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys

import pytest

from backend.catalog.hub import download
from backend.schema.messages import Trouble
from backend.schema.paths import PROJECT
from tests.test_pipelines import STATES, load, write_lora

pytestmark = pytest.mark.torch

NO_NETWORK = """
import socket
def refused(*_, **__):
    raise AssertionError("the network was asked")
socket.socket.connect = socket.getaddrinfo = refused
"""
FAQ = """
from backend.pipelines import QwenImagePipeline, ModelConfig
import torch
pipe = QwenImagePipeline.from_pretrained(
    torch_dtype=torch.bfloat16,
    device="cpu",
    model_configs=[
        ModelConfig(model_id="Qwen/Qwen-Image", origin_file_pattern="transformer/diffusion_pytorch_model*.safetensors"),
        ModelConfig(model_id="Qwen/Qwen-Image", origin_file_pattern="text_encoder/model*.safetensors"),
        ModelConfig(model_id="Qwen/Qwen-Image", origin_file_pattern="vae/diffusion_pytorch_model.safetensors"),
    ],
    tokenizer_config=ModelConfig(model_id="Qwen/Qwen-Image", origin_file_pattern="tokenizer/"),
)
pipe.load_lora(pipe.dit, ModelConfig(model_id="own/lora", origin_file_pattern="model.safetensors"))
pipe("a cat", seed=0, num_inference_steps=1).save("image.jpg")
"""


def test_a_script_finds_the_models_of_its_working_folder(tiny_qwen, tmp_path):
    (tmp_path / "models" / "Qwen").mkdir(parents=True)
    (tmp_path / "models" / "Qwen" / "Qwen-Image").symlink_to(tiny_qwen)
    write_lora(load(tiny_qwen), tmp_path / "models" / "own" / "lora" / "model.safetensors")
    env = {name: value for name, value in os.environ.items() if name != "LOFT_DATA"} | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK + FAQ], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "image.jpg").is_file()


def test_the_order_of_the_folders_of_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, working = PROJECT / "models", tmp_path / "models"
    monkeypatch.delenv("LOFT_DATA")
    assert download.model_folders() == [own]
    working.mkdir()
    assert download.model_folders() == [working, own]
    monkeypatch.setenv("LOFT_DATA", str(tmp_path / "data"))
    assert download.model_folders() == [tmp_path / "data" / "models", working, own]
    monkeypatch.setenv("DIFFSYNTH_MODEL_BASE_PATH", str(tmp_path / "base"))
    assert download.model_folders() == [tmp_path / "base", working, own]
    for folder in (tmp_path / "base", working):
        (folder / "a" / folder.name).mkdir(parents=True)
        (folder / "a" / folder.name / "x.safetensors").touch()
        assert download.find_model(f"a/{folder.name}") == folder / "a" / folder.name
        assert download.resolve(f"a/{folder.name}", "*.safetensors") == [folder / "a" / folder.name / "x.safetensors"]


def test_sizes_are_rounded_up_and_said_and_steps_are_thirty(tiny_qwen, tmp_path):
    pipe = load(tiny_qwen)
    with pytest.warns(UserWarning, match="width 50 is no multiple of 16 and was rounded up to 64"):
        assert pipe("a cat", seed=0, num_inference_steps=1, width=50, height=48).size == (64, 48)
    assert len(pipe.notes) == 1 and "width 50" in pipe.notes[0]
    with pytest.raises(Trouble, match="--width"):
        pipe("a cat", width=-3)
    from backend.pipelines import ModelConfig, QwenImagePipeline

    shutil.copytree(tiny_qwen / "transformer", tmp_path / "transformer")  # without what the model says of itself
    bare = QwenImagePipeline.from_pretrained(device="cpu", model_configs=[ModelConfig(path=tmp_path / "transformer")])
    assert bare.defaults["num_inference_steps"] == 30 and bare.defaults["width"] == 1328


@pytest.mark.parametrize("states", ["resident", "streamed from disk"])
def test_state_dicts_are_read_and_go_into_resident_parts(tiny_qwen, states):
    import torch

    from backend.pipelines import load_state_dict

    pipe = load(tiny_qwen, states=STATES[states])
    found = load_state_dict(
        tiny_qwen / "transformer" / "diffusion_pytorch_model.safetensors", torch_dtype=torch.float32
    )
    assert pipe.dit.vram_management_enabled == (states != "resident")
    if states == "resident":
        pipe.dit.load_state_dict({name: tensor + 1 for name, tensor in found.items()})
        assert all(tensor.equal(found[name] + 1) for name, tensor in pipe.dit.state_dict().items())
    else:
        with pytest.raises(Trouble, match=r"ModelConfig\(path="):
            pipe.dit.load_state_dict(found)


def test_state_dicts_that_cannot_be_read_are_said(tiny_qwen, tmp_path):
    from backend.pipelines import load_state_dict

    (tmp_path / "a.safetensors").write_bytes(b"no weights")
    file = tiny_qwen / "vae" / "diffusion_pytorch_model.safetensors"
    for given in ("nowhere.safetensors", tmp_path / "a.safetensors", [file, file], tmp_path / "a.gguf"):
        with pytest.raises(Trouble):
            load_state_dict(given)


def test_a_computing_dtype_of_8_bits_names_the_switch(tiny_qwen):
    with pytest.raises(Trouble, match=r"fp8_products=True"):
        load(tiny_qwen, states={"computation_dtype": "float8_e4m3fn"})


def test_a_text_encoder_whose_heads_cannot_be_told_is_refused_by_a_sentence():
    from backend.families.qwen_image.files import config_from_shapes

    attention = {f"layers.0.self_attn.{name}_proj.weight": (rows, 48) for name, rows in (("q", 48), ("k", 16))}
    shapes = {"embed_tokens.weight": (99, 48), "layers.0.mlp.gate_proj.weight": (96, 48), **attention}
    with pytest.raises(Trouble, match=r"config\.json"):
        config_from_shapes("text_encoder", shapes)


def levels(pipe, steps: int, size: int, **said) -> list[float]:
    """The noise levels that a picture's network is called with, and 0."""
    seen, predict = [], pipe.family.predict

    def noted(parts, x, sigma, *rest, **more):
        seen.append(float(sigma.flatten()[0]))
        return predict(parts, x, sigma, *rest, **more)

    pipe.pipeline.family = _With(pipe.family, predict=noted)
    try:
        pipe("a cat", seed=0, num_inference_steps=steps, width=size, height=size, cfg_scale=1, **said)
    finally:
        pipe.pipeline.family = pipe.family
    return seen


class _With:
    """A family with some of its functions replaced."""

    def __init__(self, family, **functions):
        self.__dict__.update(vars(family), **functions)


def shifted(mu: float, steps: int, end: float | None) -> list[float]:
    """s' = e^mu / (e^mu + 1/s - 1) over s = 1, 1 - 1/N, ...; with `end`, stretched so that the last level is that (flow_match.py of
    DiffSynth-Studio 2.1.12)."""
    found = [math.exp(mu) / (math.exp(mu) + 1 / (1 - step / steps) - 1) for step in range(steps)]
    scale = 1.0 if end is None else (1 - found[-1]) / (1 - end)
    return [1 - (1 - level) / scale for level in found]


def test_a_schedule_of_ones_own_and_the_distilled_models(tiny_qwen):
    from backend.pipelines import FlowMatchScheduler

    pipe = load(tiny_qwen)
    own = levels(pipe, 4, 64)
    slope = (0.9 - 0.5) / (8192 - 256)
    assert own == pytest.approx(shifted(0.5 + slope * (4 * 4 - 256), 4, 0.02), abs=1e-5)
    assert levels(pipe, 3, 64, exponential_shift_mu=math.log(2.5)) == pytest.approx(
        shifted(math.log(2.5), 3, 0.02), abs=1e-5
    )
    assert levels(pipe, 4, 64) == own
    pipe.scheduler = FlowMatchScheduler("Qwen-Image-Lightning")
    for size in (64, 96):
        assert levels(pipe, 4, size) == pytest.approx(shifted(math.log(3), 4, None), abs=1e-5)
    pipe.scheduler = FlowMatchScheduler("Qwen-Image")
    assert levels(pipe, 4, 64) == own
    for wrong in ("FLUX.1", None):
        with pytest.raises(Trouble, match="no schedule here"):
            FlowMatchScheduler(wrong)
    with pytest.raises(Trouble, match="which is no number"):
        pipe("a cat", exponential_shift_mu="large")


@pytest.mark.parametrize("name", ["ControlNetInput", "UnifiedDataset", "QwenImageUnit_Image2LoRAEncode", "merge_lora"])
def test_names_that_there_is_nothing_for_are_one_sentence(name):
    with pytest.raises(Trouble, match=f"{name} is not there"):
        exec(f"from backend.pipelines import {name}")
    with pytest.raises(ImportError):
        exec("from backend.pipelines import Nonsense")
