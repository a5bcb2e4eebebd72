"""Closed forms of a vision tower that cuts pictures into windows: its events depend on the picture, its bytes on the tokens alone."""

from __future__ import annotations

import torch

from backend.engine import forms, shallow, stages, vision_tower
from backend.engine.tape import fakes

TOKENS = (64, 96, 224, 512)  # text tokens that a picture becomes


def forms_of(network: str, config: dict, known: dict, dtype: torch.dtype, name: str) -> dict:
    """Working memory and operations for `t` tokens; "text_bare": without what exists only inside kernels of CUDA's."""
    found, points = {}, [{"t": tokens} for tokens in TOKENS]
    for depths in shallow.depths_of(known):
        with fakes():
            module = stages.build(network, shallow.config_of(config, known, depths), dtype)
            tapes = [
                stages.trace(module, lambda _, at=point, tower=module: vision_tower.see(tower, at, dtype))
                for point in points
            ]
        if depths == shallow.depths_of(known)[0]:
            found[f"text/{name}/b1"] = forms.fit_peaks(["1", "t"], points, tapes) | {"pool": forms.pools(tapes[2:])}
            if dtype != torch.float32:
                bare = [tape.outside() for tape in tapes]
                found[f"text_bare/{name}/b1"] = forms.fit_peaks(["1", "t"], points, bare) | {
                    "pool": forms.pools(bare[2:])
                }
        counts = [tape.linear_flops + tape.attention_flops for tape in tapes]
        found[f"operations/{shallow.word(depths)}"] = forms.fit_operations(["1", "t", "tt"], points, counts)
    return found
