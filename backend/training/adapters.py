"""LoRA and its relatives, by peft: which modules get one, and their files."""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from backend.catalog.header import read_layout
from backend.catalog.peft_config import METADATA, config_beside, turning_of
from backend.catalog.text import ends_with, listed
from backend.engine import light
from backend.engine.adapter_config import TURNING, peft_config
from backend.schema.messages import Trouble

_REGEX = re.compile(r"[\\^$*+?()\[\]{}|]")
ADAPTER = "default"  # peft's name for it inside the module


@dataclass(frozen=True)
class Adapter:
    """What was put into a part: its kind, where, and of each module the rank and alpha."""

    part: str
    algorithm: str
    modules: tuple[str, ...]
    ranks: dict[str, int]
    alphas: dict[str, float]

    @property
    def rank(self) -> int:
        return max(self.ranks.values())


def target_modules(module: torch.nn.Module, wanted: str, family: ModuleType, *, part: str) -> tuple[str, ...]:
    """Names of the linear layers that `wanted` means: see `lora_target_modules`. Raises Trouble for what matches nothing."""
    linear = [name for name, child in module.named_modules() if isinstance(child, torch.nn.Linear)]
    wanted = wanted.strip()
    if wanted == "all-linear" or (not wanted and part != family.LORA.part):
        return tuple(linear)
    if not wanted:
        ends = family.LORA.modules
    elif wanted in family.LORA.presets:
        ends = family.LORA.presets[wanted]
    elif _REGEX.search(wanted):
        try:
            found = tuple(name for name in linear if re.fullmatch(wanted, name))
        except re.error as error:
            words = f"{wanted!r} is no regular expression: {error} (--lora_target_modules)."
            raise Trouble("bad_value", words, hint="Correct it, or name ends of modules' names.") from None
        return found or _nothing(wanted, linear, part)
    else:
        ends = listed(wanted)
    for end in ends:
        if not any(ends_with(name, end) for name in linear):
            _nothing(end, linear, part)
    return tuple(name for name in linear if any(ends_with(name, end) for end in ends))


def _nothing(wanted: str, linear: list[str], part: str):
    kinds = sorted({re.sub(r"^(.*\.)?\d+\.", "", name, count=1) for name in linear})
    raise Trouble(
        "bad_value",
        f"No module of {part} is called {wanted!r} (--lora_target_modules).",
        hint=f"There are {', '.join(kinds[:24])}.",
    )


def add_adapter(module: torch.nn.Module, section, family: ModuleType, *, part: str) -> Adapter:
    """Puts the adapter into `module` in place: its weights are float32 and train, all others do not."""
    peft = light.import_module("peft")
    from backend.engine import lean

    modules = target_modules(module, section.lora_target_modules, family, part=part)
    ranks = _pattern(section.lora_rank_pattern, "lora_rank_pattern", modules)
    alphas = _pattern(section.lora_alpha_pattern, "lora_alpha_pattern", modules)
    alpha = section.lora_alpha if section.lora_alpha is not None else float(section.lora_rank)
    if section.lora_algorithm == "oft":
        _check_oft(module, modules, section)
    module.requires_grad_(False)
    peft.inject_adapter_in_model(_peft_config(section, modules, alpha, ranks, alphas), module, adapter_name=ADAPTER)
    for name, weight in module.named_parameters():
        if f".{ADAPTER}" in name:
            weight.data = weight.data.float()
            weight.requires_grad_(True)
    _keep_zero_rows(module)
    lean.make_lean(module)
    rank_of = {name: int(_matching(ranks, name, section.lora_rank)) for name in modules}
    alpha_of = {name: float(_matching(alphas, name, alpha)) for name in modules}
    return Adapter(part=part, algorithm=section.lora_algorithm, modules=modules, ranks=rank_of, alphas=alpha_of)


def _keep_zero_rows(module: torch.nn.Module) -> None:
    """A row of zeros in the base stays one under DoRA: its magnitude is 0, and peft would divide that by its norm, 0 too."""
    for layer in module.modules():
        for dora in getattr(layer, "lora_magnitude_vector", {}).values():
            dora.get_weight_norm = functools.partial(_norm_to_divide_by, dora.get_weight_norm)


def _norm_to_divide_by(norm_of, /, **what) -> torch.Tensor:
    norm = norm_of(**what)
    return torch.where(norm > 0, norm, 1.0)


def _check_oft(module: torch.nn.Module, modules: tuple[str, ...], section) -> None:
    """OFT turns blocks of `lora_rank` inputs. Raises Trouble where they do not divide a layer's, and for what it has not."""
    if section.lora_alpha is not None or section.lora_rank_pattern or section.lora_alpha_pattern:
        raise Trouble(
            "bad_value",
            "OFT turns inputs by blocks of one size (--lora_rank); it has no alpha and no patterns.",
            hint="Leave --lora_alpha, --lora_rank_pattern and --lora_alpha_pattern out, or use lora.",
        )
    for name in modules:
        inputs = module.get_submodule(name).in_features
        if section.lora_rank < 2 or inputs % section.lora_rank:
            raise Trouble(
                "bad_value",
                f"OFT turns blocks of {section.lora_rank} inputs (--lora_rank), but {name} has {inputs}.",
                hint=f"Use a number that divides it, such as {math.gcd(inputs, 96)}.",
            )


def _pattern(text: str | None, name: str, modules: tuple[str, ...]) -> dict[str, float]:
    if not text:
        return {}
    try:
        pattern = json.loads(text)
        pattern = {str(end): float(value) for end, value in pattern.items()}
    except (ValueError, TypeError, AttributeError):
        raise Trouble("bad_value", f"--{name} is {text!r}, not a JSON object of names and numbers.") from None
    for end in pattern:
        if not any(ends_with(module, end) for module in modules):
            raise Trouble("bad_value", f"--{name} names {end!r}, which gets no LoRA.")
        if (name == "lora_rank_pattern" and (pattern[end] < 1 or pattern[end] % 1)) or not 0 <= pattern[end] < math.inf:
            kind = "a whole number above 0" if name == "lora_rank_pattern" else "0 or more"
            raise Trouble("bad_value", f"--{name} says {pattern[end]:g} for {end}; it has to be {kind}.")
    return pattern


def _matching(pattern: dict[str, float], name: str, otherwise: float) -> float:
    return next((value for end, value in pattern.items() if ends_with(name, end)), otherwise)


def _peft_config(section, modules: tuple[str, ...], alpha: float, ranks: dict, alphas: dict):
    return peft_config(
        section.lora_algorithm,
        modules,
        rank=section.lora_rank,
        alpha=alpha,
        dropout=section.lora_dropout,
        ranks={end: int(rank) for end, rank in ranks.items()},
        alphas=alphas,
        turning=TURNING,
    )


def adapter_state(adapter: Adapter, weights: dict[str, torch.Tensor], *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The adapter as it is written: module names, no adapter name, and alpha wherever the factor is not 1.

    `weights` are `part.parameter` names. rsLoRA's alpha is stored times the root of the rank, so that the general rule
    alpha / rank gives its factor.
    """
    state = {}
    for name, weight in weights.items():
        state[_key(adapter, name)] = weight.detach().to(device="cpu", dtype=dtype).contiguous()
    for module in adapter.modules:
        alpha, rank = _alpha(adapter, module), adapter.ranks[module]
        if adapter.algorithm in ("loha", "lokr") or (alpha != rank and adapter.algorithm != "oft"):
            state[f"{module}.alpha"] = torch.tensor(alpha, dtype=torch.float32)
    return state


def _key(adapter: Adapter, name: str) -> str:
    """How the weight `part.parameter` is called in a file."""
    key = name.removeprefix(f"{adapter.part}.").replace(f".{ADAPTER}", "")
    return key.removesuffix(".weight") if "lora_magnitude_vector" in key else key


def peft_metadata(adapter: Adapter, family: ModuleType) -> dict[str, str]:
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


def load_file_adapter(adapter: Adapter, weights: dict[str, torch.nn.Parameter], path: Path) -> int:
    """`load_adapter` from a file. Raises Trouble too where its rotations (OFT) are meant otherwise than this run's."""
    from safetensors.torch import load_file

    if adapter.algorithm == "oft":
        component = "dit" if adapter.part == "dit" else adapter.part
        theirs = turning_of(read_layout(path).metadata, config_beside(path), component, path.name)
        if theirs.fields() != TURNING.fields():
            how = "Cayley's map" if theirs.exact else f"a series of {theirs.terms} terms"
            raise Trouble(
                "bad_value",
                f"The rotations in {path.name} are meant by {how}{', projected' if theirs.projected else ''}; this run's are not.",
                hint="Begin anew, or bake the file into the model and train on that.",
            )
    return load_adapter(adapter, weights, load_file(path))


def load_adapter(adapter: Adapter, weights: dict[str, torch.nn.Parameter], stored: dict[str, torch.Tensor]) -> int:
    """Begins from a file's factors; returns how many modules it filled. Raises Trouble where nothing or the wrong size fits."""
    filled = set()
    for name, weight in weights.items():
        key = _key(adapter, name)
        found = _stored(key, stored)
        if found is None:
            continue
        if found.shape != weight.shape:
            raise Trouble(
                "bad_value",
                f"The LoRA to begin from has {list(found.shape)} for {key}, this run {list(weight.shape)}.",
                hint="Set --lora_rank and --lora_target_modules as it was trained.",
            )
        with torch.no_grad():
            weight.copy_(found)
        filled.add(key.rpartition(".lora_")[0])
    for module in adapter.modules if filled else ():
        _check_strength(adapter, module, stored)
    if not filled:
        raise Trouble("bad_value", "The LoRA to begin from (--lora_checkpoint) has no module that this run trains.")
    return len(filled)


def _check_strength(adapter: Adapter, module: str, stored: dict[str, torch.Tensor]) -> None:
    """Raises Trouble where the file's alpha is not this run's: the same factors would then act at another strength."""
    found = _stored(f"{module}.alpha", stored)
    alpha, ours = float(found) if found is not None else float(adapter.ranks[module]), _alpha(adapter, module)
    if adapter.algorithm != "oft" and abs(alpha - ours) > 1e-3 * max(abs(alpha), abs(ours)):
        raise Trouble(
            "bad_value",
            f"The LoRA to begin from has alpha {alpha:g} for {module}, this run {ours:g}.",
            hint=f"Set --lora_alpha {alpha / math.sqrt(adapter.ranks[module]) if adapter.algorithm == 'rslora' else alpha:g}.",
        )


def _alpha(adapter: Adapter, module: str) -> float:
    """As files have it, so that alpha / rank is the factor: rsLoRA's is times the root of the rank."""
    root = math.sqrt(adapter.ranks[module]) if adapter.algorithm == "rslora" else 1.0
    return adapter.alphas[module] * root


def _stored(key: str, stored: dict[str, torch.Tensor]) -> torch.Tensor | None:
    kohya = key.replace("lora_A.", "lora_down.").replace("lora_B.", "lora_up.")
    named = key.replace("lora_A.", f"lora_A.{ADAPTER}.").replace("lora_B.", f"lora_B.{ADAPTER}.")
    for prefix in ("", "pipe.dit.", "transformer.", "diffusion_model.", "base_model.model."):
        for spelling in (key, named, kohya):
            if prefix + spelling in stored:
                return stored[prefix + spelling]
    return None
