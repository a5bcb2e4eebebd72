"""One tensor twice: in two files of a model, under two prefixes, with a wrapper and without. Equal ones count once, others are refused with both names."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.catalog.models.identify import identify_model
from backend.engine.loading.load import load_part
from backend.families import FAMILIES
from backend.schema.messages import Trouble
from tests.lora_models import CASES

pytestmark = pytest.mark.torch
BASE = load_file(CASES / "models" / "tiny_qwen_image" / "diffusion_pytorch_model.safetensors")
LAYER = "transformer_blocks.0.attn.to_q"
NAMES = sorted(BASE)
MIDDLE = NAMES[len(NAMES) // 2]


def read(paths) -> dict[str, torch.Tensor]:
    return load_part(identify_model(paths, FAMILIES).parts["dit"], dtype=torch.float32).state_dict()


def is_base(paths) -> bool:
    found = read(paths)
    return found.keys() == BASE.keys() and all(torch.equal(found[name], BASE[name]) for name in BASE)


@pytest.mark.parametrize("named", ["folder", "index", "one of them", "list"])
def test_in_two_shards(named, tmp_path):
    one = {name: BASE[name] for name in NAMES if name <= MIDDLE}
    two = {name: BASE[name] for name in NAMES if name >= MIDDLE}
    files = [tmp_path / f"m-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for path, tensors in zip(files, (one, two), strict=True):
        save_file(tensors, path)
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: files[name > MIDDLE].name for name in NAMES}}))
    asked = {"folder": tmp_path, "index": index, "one of them": files[0], "list": [files]}[named]
    assert is_base(asked)
    save_file({**two, MIDDLE: two[MIDDLE] + 1}, files[1])
    with pytest.raises(Trouble) as caught:
        read(asked)
    assert all(word in caught.value.message for word in (files[0].name, files[1].name, MIDDLE))


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [("", "model.diffusion_model.", True), ("module.", "model.", False), ("", "_orig_mod.", False), ("net.", "dit.", True), ("student.", "teacher.", True)],
)  # fmt: skip
def test_under_two_prefixes(first, second, whole, tmp_path):
    path = tmp_path / "m.safetensors"
    again = BASE if whole else {f"{LAYER}.weight": BASE[f"{LAYER}.weight"]}
    one = {first + name: at for name, at in BASE.items()}
    save_file({**one, **{second + name: at.clone() for name, at in again.items()}}, path)
    assert is_base(path)
    save_file({**one, **{second + name: at + 1 for name, at in again.items()}}, path)
    with pytest.raises(Trouble, match="twice and differently"):
        read(path)


def test_the_usual_prefix_is_meant_beside_an_average(tmp_path):
    path = tmp_path / "m.safetensors"
    usual = {f"model.diffusion_model.{name}": at for name, at in BASE.items()}
    save_file({**usual, **{f"ema.{name}": at + 1 for name, at in BASE.items()}}, path)
    assert is_base(path)


@pytest.mark.parametrize("names", [("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")])
@pytest.mark.parametrize("stem", [LAYER, "lora_unet_" + LAYER.replace(".", "_")])
def test_a_lora_among_a_models_weights_is_not_left_out(names, stem, tmp_path):
    pair = {f"{stem}.{name}": torch.ones(size) for name, size in zip(names, ((4, 48), (48, 4)), strict=True)}
    save_file({**BASE, **pair}, tmp_path / "m.safetensors")
    with pytest.raises(Trouble, match="a LoRA beside its weights"):
        read(tmp_path / "m.safetensors")
