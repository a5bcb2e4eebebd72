"""Odd checkpoints through the Python API: what they carry along, factors that are no numbers, shards that are missing, another family's."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.pipelines import ModelConfig, QwenImagePipeline
from backend.schema.messages import Trouble
from tests.lora_models import CASES

pytestmark = pytest.mark.torch
MODELS = CASES / "models"
FILE = "diffusion_pytorch_model.safetensors"


def opened(path):
    return QwenImagePipeline.from_pretrained(
        torch_dtype=torch.float32, device="cpu", model_configs=[ModelConfig(path=str(path))], tokenizer_config=None
    )


def weights() -> dict[str, torch.Tensor]:
    return load_file(MODELS / "tiny_qwen_image" / FILE)


def test_what_a_file_carries_along_is_left_alone(tmp_path):
    extra = {"foo.bar": torch.ones(3), "v_pred": torch.ones(()), "transformer_blocks.0.attn.to_q.mark": torch.ones(1)}
    save_file(weights() | extra, tmp_path / FILE)
    loaded, expected = opened(tmp_path / FILE).dit.state_dict(), weights()
    assert set(loaded) == set(expected) and all(torch.equal(loaded[key], value) for key, value in expected.items())


def test_a_factor_that_is_no_number(tmp_path):
    tensors, layer = weights(), "transformer_blocks.0.attn.to_q"
    tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].to(torch.float8_e4m3fn)
    save_file(tensors | {f"{layer}.scale_weight": torch.tensor(float("nan"))}, tmp_path / FILE)
    with pytest.raises(Trouble, match="scale"):
        opened(tmp_path / FILE)


def test_a_shard_that_its_folders_index_names_is_missing(tmp_path):
    names = sorted(weights())
    save_file({name: weights()[name] for name in names[::2]}, tmp_path / "one.safetensors")
    places = {name: ("one" if number % 2 == 0 else "two") + ".safetensors" for number, name in enumerate(names)}
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(Trouble, match=r"two\.safetensors") as caught:
        opened(tmp_path)
    assert caught.value.kind == "missing_file"
    save_file({name: weights()[name] for name in names[1::2]}, tmp_path / "two.safetensors")
    assert torch.equal(opened(tmp_path).dit.img_in.weight, weights()["img_in.weight"])


def test_pieces_under_names_of_their_own(tmp_path):
    """A list of files is one model, whatever they are called and whichever tensors lie in which."""
    names = sorted(weights())
    paths = [str(tmp_path / f"{word}.safetensors") for word in ("one", "two")]
    for start, path in enumerate(paths):
        save_file({name: weights()[name] for name in names[start::2]}, path)
    pipe = QwenImagePipeline.from_pretrained(
        torch_dtype=torch.float32, model_configs=[ModelConfig(path=paths)], tokenizer_config=None
    )
    assert all(torch.equal(tensor, weights()[name]) for name, tensor in pipe.dit.state_dict().items())
    save_file({"decoder.weight": torch.ones(2)}, paths[1])
    with pytest.raises(Trouble):
        QwenImagePipeline.from_pretrained(model_configs=[ModelConfig(path=paths)], tokenizer_config=None)


def test_a_model_of_another_family_is_called_by_its_name():
    with pytest.raises(Trouble, match=r"FLUX\.1.*Qwen-Image"):
        opened(MODELS / "tiny_flux" / FILE)
