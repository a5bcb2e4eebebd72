"""PEFT configurations of the adapters that are trained (LoRA, DoRA, rsLoRA, LoHa, LoKr, OFT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backend.catalog.lora.peft_config import Turning
from backend.engine.loading import lazy_imports

TURNING = Turning()  # OFT as PEFT, OneTrainer and ComfyUI have it where nothing is said


def peft_config(
    algorithm: str,
    modules: Sequence[str],
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    turning: Turning = TURNING,
):
    """peft's configuration of `algorithm` ("lora", "dora", "rslora", "loha", "lokr", "oft") on `modules`; of OFT `rank`
    is the size of a block.

    `ranks`, `alphas`: others for ends of names.
    """
    peft = lazy_imports.import_module("peft")
    if algorithm == "oft":
        return peft.OFTConfig(
            target_modules=list(modules),
            r=0,
            oft_block_size=rank,
            module_dropout=dropout,
            init_weights=True,
            use_cayley_neumann=not turning.exact,
            num_cayley_neumann_terms=turning.terms,
            inference_mode=False,
        )
    common = {
        "target_modules": list(modules),
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": dict(alphas or {}),
        "inference_mode": False,
    }
    if algorithm in ("lora", "dora", "rslora"):
        return peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            use_dora=algorithm == "dora",
            use_rslora=algorithm == "rslora",
            init_lora_weights=True,
            **common,
        )
    config = peft.LoHaConfig if algorithm == "loha" else peft.LoKrConfig
    return config(r=rank, alpha=alpha, init_weights=True, rank_dropout=dropout, module_dropout=0.0, **common)
