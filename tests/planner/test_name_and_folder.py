"""Every published model, known by its name alone and as the folder that its makers publish: the same bytes, steps and seconds.

The folders hold headers of true names and shapes over holes, as diffusers and transformers save them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import shutil
from pathlib import Path

import pytest

from backend.catalog.models.identify import identify_model
from backend.families import FAMILIES, by_name
from backend.planner.costs.device_speed import what_if
from backend.planner.costs.model_sizes import published, sizes_of
from backend.planner.plan import plan
from backend.planner.workload import work_of_defaults
from backend.schema.paths import ASSETS
from backend.schema.training.config import LoraSection, MemorySection, TrainingConfig
from tests.catalog.files import write_file

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

VARIANTS = [(family, key) for family, facts in published()["families"].items() for key in facts["variants"]]
# where a part lies in a published folder, which its family does not say of parts that it does not read
FOLDERS = {"dit": "transformer", "dit2": "transformer_2", "vae": "vae"}
QWEN_EDITS = {
    "qwen-image-edit": "QwenImageEditPipeline",
    "qwen-image-edit-2509": "QwenImageEditPlusPipeline",
    "qwen-image-edit-2511": "QwenImageEditPlusPipeline",
    "qwen-image-layered": "QwenImageLayeredPipeline",
}


@functools.cache
def shapes_of(network: str, config: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names and shapes of everything that the network stores, in 16 bits."""
    where, _, kind = network.partition(":")
    made, said = getattr(importlib.import_module(where), kind), json.loads(config)
    with torch.device("meta"), _without_first_numbers():
        module = made(made.config_class(**said)) if "transformers" in where else made(**said)
    stored = module.state_dict()  # tied weights are stored once
    once = [name for name, _ in (*module.named_parameters(), *module.named_buffers()) if name in stored]
    return {name: ("BF16", tuple(stored[name].shape)) for name in once}


@contextlib.contextmanager
def _without_first_numbers():
    from transformers.modeling_utils import PreTrainedModel

    before = PreTrainedModel.init_weights
    PreTrainedModel.init_weights = lambda self: None
    try:
        yield
    finally:
        PreTrainedModel.init_weights = before


def encoder_of_qwen(parts: dict) -> tuple[dict, dict]:
    """(stored shapes, config.json) of the folder "text_encoder": language model, vision tower and output layer together."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    said = parts["text_encoder"]["config"]
    text = said.get("text_config", said)
    vision = (
        said.get("vision_config")
        or published()["families"]["qwen_image"]["variants"]["qwen-image-edit"]["parts"]["vision"]["config"]
    )
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    with torch.device("meta"), _without_first_numbers():
        module = Qwen2_5_VLForConditionalGeneration(config)
    shapes = {name: ("BF16", tuple(value.shape)) for name, value in module.state_dict().items()}
    return shapes, {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **json.loads(config.to_json_string(use_diff=False)),
    }


def write_model(root: Path, family: str, key: str) -> Path:
    """The folder of a published model."""
    variant = published()["families"][family]["variants"][key]
    parts, index = variant["parts"], {"_class_name": QWEN_EDITS.get(key, by_name(family).PIPELINE)}
    for name, said in parts.items():
        if name == "vision":
            continue  # lies with the text encoder
        if family == "qwen_image" and name == "text_encoder":
            shapes, config = encoder_of_qwen(parts)
        else:
            kind, config = said["network"].rpartition(":")[2], said["config"]
            shapes = shapes_of(said["network"], json.dumps(config))
            config = {("_class_name" if "diffusers" in said["network"] else "architectures"): kind, **config}
        folder = root / FOLDERS.get(name, name)
        write_file(
            folder / ("model.safetensors" if "encoder" in name else "diffusion_pytorch_model.safetensors"), shapes
        )
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (root / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    (root / "scheduler").mkdir()
    (root / "scheduler" / "scheduler_config.json").write_text(
        json.dumps(variant.get("scheduler", {})), encoding="utf-8"
    )
    if family == "qwen_image":
        shutil.copytree(ASSETS / "starter" / "tokenizer", root / "tokenizer")
    return root


def figures(sizes, card, speed, job) -> dict:
    """What a plan says of bytes and time."""
    found = plan(sizes, card, job, speed=speed)
    phases = {one.name: (one.live_bytes, one.peak_low_bytes, one.peak_high_bytes, one.seconds) for one in found.phases}
    return {
        "phases": phases,
        "ram": found.ram_bytes,
        "verdict": found.verdict,
        "rungs": [step.rung for step in found.steps],
    }


CASES = [pytest.param(family, key, id=key) for family, key in VARIANTS]


@pytest.mark.parametrize("family, key", CASES)
def test_a_published_folder_has_the_figures_of_its_name_to_the_byte(tmp_path: Path, family: str, key: str):
    variant = published()["families"][family]["variants"][key]
    root = write_model(tmp_path / variant["ids"][0].partition("/")[2], family, key)
    here, named = sizes_of(identify_model(root, FAMILIES)), sizes_of(variant["title"])
    assert here.defaults == named.defaults and here.geometry == named.geometry
    assert {name: part.numel for name, part in here.parts.items()} == {
        name: part.numel for name, part in named.parts.items()
    }
    training = TrainingConfig(lora=LoraSection(lora_rank=16), memory=MemorySection(use_gradient_checkpointing=True))
    for gib in (8, 24, 80):
        card, speed = what_if(f"{gib}GiB")
        for job in (work_of_defaults(here), training):
            assert figures(here, card, speed, job) == figures(named, card, speed, job)
    assert work_of_defaults(here) == work_of_defaults(named)
