"""Layers of a text encoder that are read below its top: the same states with and without the blocks above them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.family import Part, Signature, complete
from backend.catalog.models.checkpoint_files import component_files, heap_of
from backend.catalog.models.match_parts import find_parts
from backend.engine.loading.load import load_part
from backend.families import sd15
from backend.families._shared.text_encoding import tapped

pytestmark = pytest.mark.torch
PART = Part(
    "transformers.models.qwen3.modeling_qwen3:Qwen3Model",
    folder="text_encoder",
    phase="text",
    blocks=("layers",),
    prefixes=("model.",),
    unused=("lm_head.",),
)
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "vocab_size": 50,
}  # fmt: skip


class Reader:
    """A family of one text encoder."""

    __name__ = "backend.families.reader"
    NAME = TITLE = "reader"
    LORA, DEFAULTS, SIZES = sd15.LORA, sd15.DEFAULTS, sd15.SIZES
    SIGNATURES = (Signature("text_encoder", "base", ("layers.{}.self_attn.q_norm.weight", "embed_tokens.weight")),)

    def __init__(self, taps: tuple[int, ...]):
        self.PARTS = {"text_encoder": replace(PART, taps=taps)}


@pytest.mark.parametrize("taps", [(-2,), (-1,), (1, 3), (0, 2), (4, 2)])
def test_states_below_the_top_are_transformers_without_the_blocks_above(taps, tmp_path: Path):
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    whole = Qwen3Model(Qwen3Config(**SIZES)).eval()
    whole.save_pretrained(tmp_path)
    family = complete(Reader(taps))
    heap = heap_of(component_files(tmp_path))
    (found,) = find_parts(heap.tensors, heap.metadata, [family], folder=tmp_path)
    encoder = load_part(found.spec, dtype=torch.float32, device="cpu")
    top = max(tap if tap >= 0 else 6 + tap for tap in taps)
    assert len(encoder.layers) == max(top, 1) == found.spec.config["num_hidden_layers"]
    ids, mask = torch.tensor([[3, 9, 4, 0], [5, 1, 7, 2]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    kept = {}
    for number, layer in enumerate(whole.layers, 1):  # the last hidden state of transformers' own is normalised
        layer.register_forward_hook(lambda _, __, output, number=number: kept.update({number: output}))
    with torch.no_grad():
        states = whole(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        ours = tapped(encoder, family.PARTS["text_encoder"], input_ids=ids, attention_mask=mask)
    assert len(ours) == len(taps)
    for tap, state in zip(taps, ours, strict=True):
        number = tap if tap >= 0 else 6 + tap
        wanted = states[0] if number == 0 else kept[number]
        assert torch.equal(state[mask.bool()], wanted[mask.bool()])
        if 0 < number < 5:
            assert torch.equal(wanted, states[number])
