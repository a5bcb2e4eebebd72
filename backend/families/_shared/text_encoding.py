"""States of a text encoder's inner layers, for families that condition on those.

A language model is read below its top: at `hidden_states[-2]`, or at several layers side by side. `Part.taps` says
which, so that the blocks above the last of them are left in their file (a quarter of some encoders), and `tapped`
gives them of an encoder that was loaded so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def tapped(encoder: torch.nn.Module, part, **inputs) -> list[torch.Tensor]:
    """The states (B, L, D) after each of `part.taps` layers, in their order, without the encoder's final norm:
    transformers' `hidden_states[tap]` of the whole encoder. `inputs` are those of its call: input_ids (B, L),
    attention_mask. Differentiable.

    The encoder is one of which blocks above the last tap are not loaded (`backend.catalog.models.match_parts`). Raises
    ValueError for a tap that it does not reach.
    """
    layers = encoder.get_submodule(part.blocks[0])
    found: dict[int, torch.Tensor] = {}
    wanted = _layers_of(part.taps, len(layers))

    def keep(number: int):
        def hook(layer, given, output) -> None:
            found[number] = output[0] if isinstance(output, tuple) else output

        return hook

    def keep_embeddings(layer, given, named) -> None:
        found[0] = given[0] if given else named["hidden_states"]

    handles = [layers[number - 1].register_forward_hook(keep(number)) for number in set(wanted) if number]
    if 0 in wanted:
        handles.append(layers[0].register_forward_pre_hook(keep_embeddings, with_kwargs=True))
    try:
        encoder(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [found[number] for number in wanted]


def _layers_of(taps: Sequence[int], loaded: int) -> list[int]:
    """How many layers lie below each tap, in an encoder of which `loaded` are there: one counted from the end is the
    last of those."""
    if any(tap < 0 for tap in taps) and len(taps) > 1:
        raise ValueError("several taps are counted from the first layer")
    found = [loaded if tap < 0 else tap for tap in taps]
    if max(found) > loaded:
        raise ValueError(f"the encoder has {loaded} layers, and the states after {max(found)} are asked for")
    return found
