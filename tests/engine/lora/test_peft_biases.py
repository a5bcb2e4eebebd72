"""PEFT's `bias`: whole biases beside few adapters are part of the LoRA, of all modules or of the adapted ones."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model

from backend.catalog.models.identify import identify_lora
from backend.engine.lora import adapters
from backend.families import FAMILIES
from tests.lora_models import build, same, shared, snapshot

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize(
    "targets", [["transformer_blocks.0.attn.to_q"], ["to_q", "img_mlp.net.2"]], ids=["one", "more"]
)
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_trained_are_taken(bias, targets, hot, tmp_path):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=targets, bias=bias, init_lora_weights=False)
    trained = get_peft_model(build("tiny_qwen_image"), config)
    for name, weight in trained.named_parameters():
        if name.endswith("bias") and weight.requires_grad:
            weight.data += torch.randn_like(weight) * 0.1
    trained.save_pretrained(tmp_path)
    model = shared("tiny_qwen_image")
    before = snapshot(model)
    assert identify_lora(tmp_path / "adapter_model.safetensors", FAMILIES).family in ("", "qwen_image")
    receipt = adapters.load(model, tmp_path / "adapter_model.safetensors", hot=hot)
    assert not receipt.unused
    whole = trained.merge_and_unload()
    try:
        if not hot:
            wanted, got = whole.state_dict(), model.state_dict()
            assert all(torch.allclose(got[name], wanted[name], atol=1e-5) for name in before)
        x = torch.randn(3, 48)
        for name in ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_v"):
            assert torch.allclose(model.get_submodule(name)(x), whole.get_submodule(name)(x), atol=1e-4)
    finally:
        adapters.clear(model)
    assert same(model, before)
