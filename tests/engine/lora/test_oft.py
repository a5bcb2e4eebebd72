"""OFT files of PEFT: beside the weights and in them they do what the layer did that was trained."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from backend.catalog.lora.peft_config import Turning
from backend.engine.lora import adapters
from backend.engine.lora.algorithms.oft import turns_of
from backend.schema.messages import Trouble

pytestmark = pytest.mark.torch


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 5, bias=False)).requires_grad_(False)


def trained(block: int = 4) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A network with PEFT's layers, and its file."""
    from peft import OFTConfig, inject_adapter_in_model

    module = network()
    config = OFTConfig(r=0, oft_block_size=block, target_modules=["0"])
    inject_adapter_in_model(config, module)
    weight = module[0].oft_R["default"].weight
    weight.data = torch.randn(weight.shape) * 0.1
    return module, {"0.oft_R.weight": weight.data.clone()}


@pytest.mark.parametrize("hot", [True, False])
def test_a_turned_input_is_that_of_the_trained_layer(hot: bool):
    peft, file = trained()
    module, x = network(), torch.randn(3, 2, 12)
    before = copy.deepcopy(module.state_dict())
    receipt = adapters.load(module, file, hot=hot)
    assert (receipt.layers_applied, receipt.layers_found, receipt.unused) == (1, 1, {})
    torch.testing.assert_close(module(x), peft(x), rtol=1e-5, atol=1e-6)
    adapters.clear(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_turns_keep_lengths_and_share_a_layer_with_others():
    _, file = trained()
    turn = turns_of(file["0.oft_R.weight"], 4, Turning(exact=True)) + torch.eye(4)
    torch.testing.assert_close(turn @ turn.transpose(1, 2), torch.eye(4).expand(3, 4, 4), rtol=0, atol=1e-5)
    pair = {"0.lora_A.weight": torch.randn(2, 12), "0.lora_B.weight": torch.randn(10, 2)}
    whole = {"0.diff": torch.randn(10, 12)}
    x = torch.randn(4, 12)
    for others in ([pair], [whole], [pair, whole]):
        hot, cold = network(), network()
        for module, mode in ((hot, True), (cold, False)):
            adapters.load(module, file, strength=0.7, hot=mode)
            for other in others:
                adapters.load(module, other, strength=0.5, hot=mode)
        torch.testing.assert_close(hot(x), cold(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 7), (2, 6), (3, 10)])
def test_blocks_that_do_not_fit_are_refused(shape: tuple[int, int]):
    module = network()
    with pytest.raises(Trouble, match="rotation") as refused:
        adapters.load(module, {"0.oft_R.weight": torch.ones(shape)})
    assert refused.value.kind == "shape_mismatch"
