"""Checkpoints in RAM: gradients are those of plain checkpointing, and what takes no part in the loss has none."""

import pytest

torch = pytest.importorskip("torch")

from backend.training.model.activation_checkpointing import OffloadedCheckpoints, _plain

pytestmark = pytest.mark.torch


class Block(torch.nn.Module):
    """Two streams, of which each becomes its own."""

    def __init__(self):
        super().__init__()
        self.text, self.picture = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, text, picture):
        return self.text(text), self.picture(picture) + text.mean()


def gradients(again) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    blocks, text, picture = [Block(), Block()], torch.randn(2, 4), torch.randn(2, 4)
    for block in blocks:
        text, picture = again(block, text, picture)
    picture.square().sum().backward()  # nobody asks for the last block's text
    return [weight.grad for block in blocks for weight in block.parameters()]


def test_gradients_are_those_of_plain_checkpointing_and_none_where_nothing_flows():
    kept, plain = gradients(OffloadedCheckpoints().recompute), gradients(_plain)
    assert [one is None for one in kept] == [one is None for one in plain]
    assert [one is None for one in plain] == [False] * 4 + [True, True, False, False]
    assert all(torch.equal(one, other) for one, other in zip(kept, plain, strict=True) if one is not None)
