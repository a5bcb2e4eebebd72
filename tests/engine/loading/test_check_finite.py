"""A model's file with NaN or infinite numbers is refused by name, wherever they are and whatever they are stored as."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from backend.engine.loading import check_finite
from backend.pipelines import ModelConfig, QwenImagePipeline
from backend.schema.messages import Trouble
from tests.lora_models import CASES

pytestmark = pytest.mark.torch
BASE = CASES / "models" / "tiny_qwen_image" / "diffusion_pytorch_model.safetensors"
Q = "transformer_blocks.0.attn.to_q.weight"


def load(path: Path, **options) -> QwenImagePipeline:
    return QwenImagePipeline.from_pretrained(
        torch_dtype=torch.float32,
        device="cpu",
        model_configs=[ModelConfig(path=str(path), **options)],
        tokenizer_config=None,
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_number_that_is_none_is_found(dtype: torch.dtype, value: float, offloaded: bool, tmp_path: Path):
    if dtype == torch.float8_e4m3fn and value == value:
        pytest.skip("this format has no infinity")
    weights, path = load_file(BASE), tmp_path / "m.safetensors"
    weights[Q][17, 5] = value
    save_file({key: tensor.to(dtype) for key, tensor in weights.items()}, path)
    options = {"offload_device": "cpu", "onload_device": "cpu"} if offloaded else {}
    with pytest.raises(Trouble, match=f"{Q} of dit in m.safetensors holds NaN or infinite") as caught:
        load(path, **options)
    assert caught.value.kind == "not_finite"
    weights[Q][17, 5] = 0.0
    save_file({key: tensor.to(dtype) for key, tensor in weights.items()}, path)
    load(path, **options)


def test_large_numbers_whose_sum_is_none_are_fine_and_large_parts_are_sampled(tmp_path: Path, monkeypatch):
    weights, path = load_file(BASE), tmp_path / "m.safetensors"
    weights[Q] = torch.full_like(weights[Q], 3e38)
    save_file(weights, path)
    load(path)
    monkeypatch.setattr(check_finite, "WHOLE", 0)
    monkeypatch.setattr(check_finite, "SMALL", 0)
    monkeypatch.setattr(check_finite, "ENDS", 4)
    weights[Q][-1, -1] = float("nan")
    save_file(weights, path)
    with pytest.raises(Trouble, match=Q):
        load(path)
