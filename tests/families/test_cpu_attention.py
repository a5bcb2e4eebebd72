"""Attention in plain matrix products against the stock processor."""

import pytest

torch = pytest.importorskip("torch")

from backend.families import qwen_image
from backend.families.qwen_image.cpu_attention import MAX_TOKENS, use_cpu_attention
from backend.training.model.training_module import may_use_cpu_attention

pytestmark = pytest.mark.torch


def transformer():
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        axes_dims_rope=(4, 6, 6),
        in_channels=16,
        out_channels=4,
        joint_attention_dim=24,
    )


def run(model, mask):
    random = torch.Generator().manual_seed(1)
    x, text = torch.randn(3, 12, 16, generator=random), torch.randn(3, 5, 24, generator=random)
    return model(
        hidden_states=x,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=mask,
        timestep=torch.rand(3, generator=random),
        img_shapes=[[(1, 3, 4)]] * 3,
        return_dict=False,
    )[0]


@pytest.mark.parametrize("padded", [False, True])
def test_same_velocity_and_gradients_as_the_stock_processor(padded):
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool() if padded else None
    model = transformer()
    stock = run(model, mask)
    stock.square().mean().backward()
    wanted = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    assert may_use_cpu_attention(qwen_image, model, tokens=12) and use_cpu_attention(model)
    plain = run(model, mask)
    plain.square().mean().backward()
    assert (stock - plain).abs().max() < 1e-5 * stock.abs().max()
    for name, weight in model.named_parameters():
        if name in wanted:
            assert (weight.grad - wanted[name]).norm() <= 1e-4 * wanted[name].norm() + 1e-7, name


def test_long_sequences_keep_the_stock_processor():
    model = transformer()
    assert may_use_cpu_attention(qwen_image, model, tokens=MAX_TOKENS)
    assert not may_use_cpu_attention(qwen_image, model, tokens=MAX_TOKENS + 1)
