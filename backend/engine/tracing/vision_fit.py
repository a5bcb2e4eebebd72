"""Closed forms of a vision tower that cuts pictures into windows: its events depend on the picture, its bytes on the
tokens alone."""

from __future__ import annotations

import torch

from backend.engine.tracing import fit, forward_calls, sample_points
from backend.engine.tracing.allocation_recorder import fakes

TOKENS = (64, 96, 224, 512)  # text tokens that a picture becomes


def forms_of(network: str, config: dict, known: dict, dtype: torch.dtype, name: str) -> dict:
    """Working memory and operations for `t` tokens; "text_bare": without what exists only inside kernels of CUDA's."""
    found, points = {}, [{"t": tokens} for tokens in TOKENS]
    for depths in sample_points.depths_of(known):
        with fakes():
            module = forward_calls.build(network, sample_points.config_of(config, known, depths), dtype)
            tapes = [
                forward_calls.trace(
                    module, lambda _, at=point, tower=module: forward_calls.encode_text(tower, at, dtype)
                )
                for point in points
            ]
        if depths == sample_points.depths_of(known)[0]:
            found[f"text/{name}/b1"] = fit.fit_peaks(["1", "t"], points, tapes) | {"pool": fit.pools(tapes[2:])}
            if dtype != torch.float32:
                bare = [tape.outside() for tape in tapes]
                found[f"text_bare/{name}/b1"] = fit.fit_peaks(["1", "t"], points, bare) | {"pool": fit.pools(bare[2:])}
        counts = [tape.linear_flops + tape.attention_flops for tape in tapes]
        found[f"operations/{sample_points.word(depths)}"] = fit.fit_operations(["1", "t", "tt"], points, counts)
    return found
