"""LoRA layers that keep less: peft's outputs, gradients and names, and only what they must in the graph."""

from __future__ import annotations

import pytest
import torch

from backend.engine.lora import low_memory_linear
from backend.engine.tracing import allocation_recorder, forward_calls

pytestmark = pytest.mark.torch
BF16 = torch.bfloat16


class Net(torch.nn.Module):
    """Three layers that read the same tensor, and one that reads what they make."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(width, width) for _ in range(3))
        self.norm, self.out = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)

    def forward(self, x):
        x = self.norm(x)
        return self.out(torch.tanh(self.q(x) * self.k(x)) + self.v(x))


def adapted(dtype: torch.dtype, thin: bool, *, rank: int = 4, **more) -> torch.nn.Module:
    import peft

    torch.manual_seed(0)
    net = Net().to(dtype).requires_grad_(False)
    config = peft.LoraConfig(
        r=rank, lora_alpha=6, target_modules=["q", "k", "v", "out"], init_lora_weights=False, **more
    )
    peft.inject_adapter_in_model(config, net)
    for name, weight in net.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.float()
    return (net, low_memory_linear.make_lean(net)) if thin else (net, 0)


def answers(net, dtype, *, casting: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 7, 24, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", BF16, enabled=casting):
        out = net(x)
    (out.float() ** 2).sum().backward()
    return [out, x.grad, *(weight.grad for name, weight in net.named_parameters() if "lora_" in name)]


@pytest.mark.parametrize(
    ("dtype", "casting", "off"), [(torch.float32, False, 1e-5), (BF16, False, 0.03), (torch.float32, True, 0.03)]
)
def test_outputs_and_gradients_are_peft_s(dtype, casting, off):
    (theirs, _), (ours, count) = adapted(dtype, False), adapted(dtype, True)
    assert count == 4 and [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]
    for one, other in zip(answers(ours, dtype, casting=casting), answers(theirs, dtype, casting=casting), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.linalg.vector_norm((one - other).float()) <= off * torch.linalg.vector_norm(other.float())


def test_switched_off_it_is_the_base():
    net, _ = adapted(torch.float32, True)
    x = torch.randn(3, 24)
    for layer in net.modules():
        if isinstance(layer, low_memory_linear.LeanLinear):
            layer.enable_adapters(False)
    base = Net()
    base.load_state_dict(
        {name.replace(".base_layer", ""): value for name, value in net.state_dict().items() if "lora_" not in name}
    )
    assert torch.equal(net(x), base(x))


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}])
def test_other_kinds_stay_peft_s(more):
    net, count = adapted(torch.float32, True, **more)
    assert count == 0 and not low_memory_linear.computes_alone(net)


def test_only_lean_layers_compute_without_autocast():
    net, _ = adapted(torch.float32, True)
    assert low_memory_linear.computes_alone(net)
    net.norm.weight.requires_grad_(True)
    assert not low_memory_linear.computes_alone(net)


def test_the_graph_keeps_each_input_once():
    """Of a transformer's step with everything kept, at least a fifth is saved where float32 copies went."""
    found = {}
    for thin in (True, False):
        with allocation_recorder.fakes():
            module = forward_calls.build("diffusers:FluxTransformer2DModel", SMALL, BF16)
            forward_calls.add_lora(module, TARGETS, 8, torch.float32, thin=thin)
            module.train()
            step = forward_calls.train_step(module, {"h": 32, "w": 64, "n": 512, "t": 64, "b": 1}, BF16)
            found[thin] = allocation_recorder.peak(forward_calls.trace(module, step, warm=False, grad=True))
    assert found[True] < 0.8 * found[False]


TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "proj_mlp", "proj_out"]
SMALL = {
    "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64, "joint_attention_dim": 64,
    "pooled_projection_dim": 64, "axes_dims_rope": [16, 24, 24],
}  # fmt: skip
