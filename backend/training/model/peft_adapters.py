"""LoRA and its relatives, by peft: which modules get one, and their files."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from backend.catalog.family import Family
from backend.catalog.lora.alpha import AlphaRules, alpha_rules
from backend.catalog.lora.keys import split_key
from backend.catalog.lora.peft_config import METADATA, turning_of
from backend.engine.loading import lazy_imports
from backend.engine.lora.trained_adapters import TURNING, peft_config
from backend.planner.rules.resolve_training import ResolvedAdapter
from backend.schema.messages import Trouble

ADAPTER = "default"  # peft's name for it inside the module


def add_adapter(module: torch.nn.Module, adapter: ResolvedAdapter) -> None:
    """Puts the adapter into `module`, its part's network, in place: its weights are float32 and train, all others do
    not."""
    peft = lazy_imports.import_module("peft")
    from backend.engine.lora import low_memory_linear

    module.requires_grad_(False)
    peft.inject_adapter_in_model(_peft_config(adapter), module, adapter_name=ADAPTER)
    for name, weight in module.named_parameters():
        if f".{ADAPTER}" in name:
            weight.data = weight.data.float()
            weight.requires_grad_(True)
    _keep_zero_rows(module)
    low_memory_linear.make_lean(module)


def _keep_zero_rows(module: torch.nn.Module) -> None:
    """A row of zeros in the base stays one under DoRA: its magnitude is 0, and peft would divide that by its norm, 0
    too."""
    for layer in module.modules():
        for dora in getattr(layer, "lora_magnitude_vector", {}).values():
            dora.get_weight_norm = functools.partial(_norm_to_divide_by, dora.get_weight_norm)


def _norm_to_divide_by(norm_of, /, **what) -> torch.Tensor:
    norm = norm_of(**what)
    return torch.where(norm > 0, norm, 1.0)


def _peft_config(adapter: ResolvedAdapter):
    return peft_config(
        adapter.algorithm,
        adapter.modules,
        rank=adapter.rank,
        alpha=adapter.alpha,
        dropout=adapter.dropout,
        ranks={end: int(rank) for end, rank in adapter.ranks.items()},
        alphas=dict(adapter.alphas),
        turning=TURNING,
    )


def adapter_state(
    adapter: ResolvedAdapter, weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The adapter as it is written: module names, no adapter name, and alpha wherever the factor is not 1.

    `weights` are `part.parameter` names. rsLoRA's alpha is stored times the root of the rank, so that the general rule
    alpha / rank gives its factor.
    """
    state = {}
    for name, weight in weights.items():
        state[_key(adapter, name)] = weight.detach().to(device="cpu", dtype=dtype).contiguous()
    for module in adapter.modules:
        alpha, rank = _alpha(adapter, module), adapter.rank_of(module)
        if adapter.algorithm in ("loha", "lokr") or (alpha != rank and adapter.algorithm != "oft"):
            state[f"{module}.alpha"] = torch.tensor(alpha, dtype=torch.float32)
    return state


def _key(adapter: ResolvedAdapter, name: str) -> str:
    """How the weight `part.parameter` is called in a file."""
    key = name.removeprefix(f"{adapter.part}.").replace(f".{ADAPTER}", "")
    return key.removesuffix(".weight") if "lora_magnitude_vector" in key else key


def peft_metadata(adapter: ResolvedAdapter, family: Family) -> dict[str, str]:
    """How an OFT's rotations are meant, as fields of PEFT's OFTConfig; nothing for kinds whose tensors say all."""
    if adapter.algorithm != "oft":
        return {}
    fields = {
        **TURNING.fields(),
        "r": 0,
        "oft_block_size": adapter.rank,
        "block_share": False,
        "target_modules": sorted(adapter.modules),
    }
    part = adapter.part if adapter.part.startswith("text_encoder") else family.PARTS[adapter.part].folder
    return {METADATA: json.dumps({f"{part}.{key}": value for key, value in fields.items()})}


def load_file_adapter(
    adapter: ResolvedAdapter, weights: dict[str, torch.nn.Parameter], path: Path, *, flag: str = "lora_checkpoint"
) -> int:
    """`load_adapter` from a file: its alpha may lie in its metadata or in a configuration beside it, its factors in 8
    bits with scales.

    Raises Trouble too where its rotations (OFT) are meant otherwise than this run's.
    """
    from backend.engine.loading.tensor_source import open_source

    source = open_source(path)
    keys = [key for key in source.shapes if split_key(key)]
    rules = alpha_rules(
        source.metadata,
        source.config,
        tensors_say=any(key.endswith(".alpha") for key in keys),
        names=adapter.modules,
        source=path.name,
    )
    if adapter.algorithm == "oft":
        theirs = turning_of(source.metadata, source.config, adapter.part, path.name)
        if theirs.fields() != TURNING.fields():
            how = "Cayley's map" if theirs.exact else f"a series of {theirs.terms} terms"
            raise Trouble(
                "bad_value",
                (
                    f"The rotations in {path.name} are meant by {how}{', projected' if theirs.projected else ''}; this "
                    "run's are not."
                ),
                hint="Begin anew, or bake the file into the model and train on that.",
            )
    stored = {key: source.read(key) for key in keys}
    return load_adapter(adapter, weights, stored, flag=flag, rules=rules)


def load_adapter(
    adapter: ResolvedAdapter,
    weights: dict[str, torch.nn.Parameter],
    stored: dict[str, torch.Tensor],
    *,
    flag: str = "lora_checkpoint",
    rules: AlphaRules | None = None,
) -> int:
    """Begins from a file's factors; returns how many modules it filled. `rules`: for alpha, where no tensor says it.

    Raises Trouble where nothing or the wrong size fits, and where one module is there twice with different values.
    """
    filled = set()
    for name, weight in weights.items():
        key = _key(adapter, name)
        found = _stored(key, stored, adapter.part)
        if found is None:
            continue
        if found.shape != weight.shape:
            raise Trouble(
                "bad_value",
                f"The LoRA to begin from (--{flag}) has {list(found.shape)} for {key}, this run {list(weight.shape)}.",
                hint="Set --lora_rank and --lora_target_modules as it was trained.",
            )
        if not found.is_floating_point():
            raise Trouble("not_supported", f"The LoRA to begin from (--{flag}) stores {key} as codes without a scale.")
        with torch.no_grad():
            weight.copy_(found)
        filled.add(key.rpartition(".lora_")[0])
    for module in adapter.modules if filled else ():
        _check_strength(adapter, module, stored, rules or AlphaRules())
    if not filled:
        raise Trouble("bad_value", f"The LoRA to begin from (--{flag}) has no module that this run trains.")
    return len(filled)


def _check_strength(adapter: ResolvedAdapter, module: str, stored: dict[str, torch.Tensor], rules: AlphaRules) -> None:
    """Raises Trouble where the file's alpha is not this run's: the same factors would then act at another strength."""
    found, rank = _stored(f"{module}.alpha", stored, adapter.part), adapter.rank_of(module)
    alpha = float(found) if found is not None else rules.scale((module,), adapter.part, rank) * rank
    ours = _alpha(adapter, module)
    if adapter.algorithm != "oft" and abs(alpha - ours) > 1e-3 * max(abs(alpha), abs(ours)):
        raise Trouble(
            "bad_value",
            f"The LoRA to begin from has alpha {alpha:g} for {module}, this run {ours:g}.",
            hint=(
                "Set --lora_alpha "
                f"{alpha / math.sqrt(adapter.rank_of(module)) if adapter.algorithm == 'rslora' else alpha:g}."
            ),
        )


def _alpha(adapter: ResolvedAdapter, module: str) -> float:
    """As files have it, so that alpha / rank is the factor: rsLoRA's is times the root of the rank."""
    root = math.sqrt(adapter.rank_of(module)) if adapter.algorithm == "rslora" else 1.0
    return adapter.alpha_of(module) * root


def _stored(key: str, stored: dict[str, torch.Tensor], part: str) -> torch.Tensor | None:
    kohya = key.replace("lora_A.", "lora_down.").replace("lora_B.", "lora_up.")
    named = key.replace("lora_A.", f"lora_A.{ADAPTER}.").replace("lora_B.", f"lora_B.{ADAPTER}.")
    found = [
        prefix + spelling
        for prefix in dict.fromkeys(
            ("", f"pipe.{part}.", f"{part}.", "transformer.", "diffusion_model.", "base_model.model.")
        )
        for spelling in dict.fromkeys((key, named, kohya))
        if prefix + spelling in stored
    ]
    for other in found[1:]:
        if stored[other].shape != stored[found[0]].shape or not torch.equal(stored[other], stored[found[0]]):
            raise Trouble(
                "repeated",
                f"The LoRA to begin from holds {found[0]} and {other}, which name the same factor and differ.",
                hint="Only one of them can be meant. Take one out of the file.",
            )
    return stored[found[0]] if found else None
