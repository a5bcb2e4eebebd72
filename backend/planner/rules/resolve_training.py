"""`resolve`: what a run's settings mean for the parts of its model, parsed once. The planner counts by it, the trainer
does it, the rule book checks it. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from backend.catalog.family import Family
from backend.catalog.hub.part_entries import Files, entries_of, parts_meant, rounding_of
from backend.catalog.lora.target_modules import pattern_of, target_modules
from backend.catalog.quantization.methods import check_method
from backend.catalog.spec import ModelSpec, PartSpec
from backend.families import by_name
from backend.planner.costs.layout import FP8
from backend.planner.costs.model_sizes import EMBEDDING, ModelSizes, PartSizes
from backend.schema.messages import Trouble
from backend.schema.training.config import LoraSection, TrainingConfig
from backend.system.text_files import ends_with

Layers = Mapping[str, tuple[int, int]]  # linear layer -> (rows, columns) of its weight: outputs, inputs


@dataclass(frozen=True)
class ResolvedAdapter:
    """An adapter (LoRA or one of its relatives): in which part, on which linear layers, and its rank and alpha
    there."""

    part: str
    algorithm: str
    modules: tuple[str, ...]  # full names of the layers inside the part
    rank: int
    alpha: float
    dropout: float = 0.0
    ranks: Mapping[str, float] = field(default_factory=dict)  # end of a module's name -> its own rank
    alphas: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        return int(_matching(self.ranks, module, self.rank))

    @property
    def largest_rank(self) -> int:
        return max(map(self.rank_of, self.modules), default=self.rank)

    def alpha_of(self, module: str) -> float:
        return float(_matching(self.alphas, module, self.alpha))


@dataclass(frozen=True)
class PartStorage:
    """How a part's frozen weights are stored, and where they wait while they do not compute."""

    fp8: bool = False
    quantization: str = ""  # a name of `catalog.quantization.methods.METHODS`
    excluded: tuple[str, ...] = ()  # ends of names of layers that are not quantized
    offloaded: bool = False
    offload_device: str = "ram"  # "ram" or "disk", of what is offloaded
    resident_blocks: int | None = 0  # offloaded blocks that stay on the device; None: the settings leave it open

    @property
    def storage(self) -> str:
        """As the planner writes it: a dtype, "METHOD" or "METHOD/LAYERS"; "" where weights are stored as they
        compute."""
        if self.fp8:
            return FP8
        return "/".join(filter(None, (self.quantization, ",".join(self.excluded) if self.quantization else "")))

    @property
    def full(self) -> bool:
        """Whether the weights are on the device in the precision they compute in."""
        return not (self.fp8 or self.quantization or self.offloaded)


@dataclass(frozen=True)
class ResolvedTraining:
    """`troubles`: what of the settings could not be read; it is left out of the rest."""

    trained: tuple[str, ...]  # parts whose own weights train
    adapter: ResolvedAdapter | None
    parts: Mapping[str, PartStorage]  # every part of the model
    layers: Mapping[str, Layers]  # the linear layers of each part
    troubles: tuple[Trouble, ...] = ()

    @property
    def trains(self) -> tuple[str, ...]:
        """Parts with weights that train: their own, or an adapter's."""
        return (*self.trained, *([self.adapter.part] if self.adapter else []))


def resolve(
    config: TrainingConfig,
    sizes: ModelSizes,
    family: Family | None = None,
    *,
    spec: ModelSpec | None = None,
    known: tuple[str, ...] = (),
) -> ResolvedTraining:
    """What `config` means for the model of `sizes`. `spec`: the model as found, for the names of all its layers;
    without it they follow from `sizes`. `known`: entries of the command line, for hints. Never raises: see
    `ResolvedTraining.troubles`."""
    troubles: list[Trouble] = []
    layers = {name: layers_of(part, spec.parts.get(name) if spec else None) for name, part in sizes.parts.items()}
    part = config.adapter_part
    adapter = None
    if part in layers:
        adapter, wrong = resolve_adapter(config.lora, layers[part], family or by_name(sizes.family), part=part)
        troubles += wrong
    return ResolvedTraining(
        trained=config.trained_parts,
        adapter=adapter,
        parts=MappingProxyType(_storage(config, sizes, known, troubles)),
        layers=MappingProxyType(layers),
        troubles=tuple(troubles),
    )


def layers_of(sizes: PartSizes, part: PartSpec | None = None) -> Layers:
    """The linear layers of a part by their names: from its own headers, or, of one that is not here, block by block as
    it is published."""
    if part is None:
        return _block_by_block(
            tuple((name, tuple(size)) for name, size in sizes.outside.items()),
            tuple((name, tuple(size)) for name, size in sizes.linears.items()),
            tuple(sizes.depths.items()),
        )
    return {
        name.removesuffix(".weight"): (at.shape[0], at.shape[1])
        for name, at in part.tensors.items()
        if len(at.shape) == 2 and name.endswith(".weight") and not EMBEDDING.search(name)
    }


@lru_cache(maxsize=64)  # asked for at every keystroke, of sizes that are made anew each time
def _block_by_block(
    outside: tuple[tuple[str, tuple[int, int]], ...],
    linears: tuple[tuple[str, tuple[int, int, int]], ...],
    depths: tuple[tuple[str, int], ...],
) -> Layers:
    """The fields of those names of a `PartSizes`, as items."""
    found = dict(outside)
    for name, (rows, columns, _) in linears:
        home, depth = next((home, depth) for home, depth in depths if name.startswith(f"{home}."))
        for number in range(depth):
            found[f"{home}.{number}.{name.removeprefix(f'{home}.')}"] = (rows, columns)
    return MappingProxyType(found)


def resolve_adapter(
    lora: LoraSection, layers: Layers, family: Family, *, part: str
) -> tuple[ResolvedAdapter, list[Trouble]]:
    """The adapter in a part with these linear layers, and what of the settings could not be read; where its modules
    cannot be told, it is on those that are usual."""
    troubles: list[Trouble] = []
    names = tuple(layers)
    try:
        modules = _modules(names, lora.lora_target_modules, family.NAME, part)
    except Trouble as trouble:
        troubles.append(trouble)
        modules = _modules(names, "" if part == family.LORA.part else "all-linear", family.NAME, part)
    modules = modules or names  # a family that names none: for an estimate, all
    patterns: dict[str, Mapping[str, float]] = {}
    for flag in ("lora_rank_pattern", "lora_alpha_pattern"):
        try:
            patterns[flag] = pattern_of(getattr(lora, flag), flag, modules)
        except Trouble as trouble:
            troubles.append(trouble)
    adapter = ResolvedAdapter(
        part=part,
        algorithm=lora.lora_algorithm,
        modules=modules,
        rank=lora.lora_rank,
        alpha=float(lora.lora_rank) if lora.lora_alpha is None else lora.lora_alpha,
        dropout=lora.lora_dropout,
        ranks=MappingProxyType(patterns.get("lora_rank_pattern", {})),
        alphas=MappingProxyType(patterns.get("lora_alpha_pattern", {})),
    )
    return adapter, troubles


@lru_cache(maxsize=256)
def _modules(names: tuple[str, ...], wanted: str, family: str, part: str) -> tuple[str, ...]:
    """`target_modules` of the family that is called `family`, remembered: a form asks at every keystroke."""
    return target_modules(names, wanted, by_name(family).LORA, part=part)


def _matching(pattern: Mapping[str, float], name: str, otherwise: float) -> float:
    return next((value for end, value in pattern.items() if ends_with(name, end)), otherwise)


def _storage(
    config: TrainingConfig, sizes: ModelSizes, known: tuple[str, ...], troubles: list[Trouble]
) -> dict[str, PartStorage]:
    model, memory = config.model, config.memory
    files = {name: part.files for name, part in sizes.parts.items()}
    eight = _all_meant(model.fp8_models, "fp8_models", files, known, troubles)
    away = _all_meant(model.offload_models, "offload_models", files, known, troubles)
    if memory.enable_model_cpu_offload:
        away |= files.keys() - set(config.trained_parts)
    quantized = _quantized(model.quant_options, files, known, troubles)
    return {
        name: PartStorage(
            fp8=name in eight,
            quantization=quantized[name][0] if name in quantized else "",
            excluded=quantized[name][1] if name in quantized else (),
            offloaded=name in away,
            offload_device=memory.offload_device if name in away else "ram",
            resident_blocks=memory.resident_blocks if name == "dit" and name in away else 0,
        )
        for name in files
    }


def _all_meant(
    entries: str | None, setting: str, files: Files, known: Sequence[str], troubles: list[Trouble]
) -> set[str]:
    """The parts that a list with commas means."""
    found: set[str] = set()
    for entry in entries_of(entries):
        try:
            found |= parts_meant(entry, setting, files, known=known)
        except Trouble as trouble:
            troubles.append(trouble)
    return found


def _quantized(
    text: str | None, files: Files, known: Sequence[str], troubles: list[Trouble]
) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Part -> (method, ends of names of layers that are left out), from `--quant_options`."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    try:
        asked = rounding_of(text)
        if text and not asked:
            raise Trouble(
                "bad_value",
                f"--quant_options is {text!r}, which names no part.",
                hint="For example dit:int8, or leave it out.",
                setting="quant_options",
            )
    except Trouble as trouble:
        troubles.append(trouble)
        return found
    for entry, method, excluded in asked:
        try:
            check_method(method, "--quant_options")
            for name in sorted(parts_meant(entry, "quant_options", files, known=known)):
                if name in found:
                    raise Trouble(
                        "bad_value",
                        f"--quant_options names the part {name} twice ({found[name][0]} and {method}).",
                        hint="Say one.",
                        setting="quant_options",
                    )
                found[name] = (method, excluded)
        except Trouble as trouble:
            trouble.setting = "quant_options"
            troubles.append(trouble)
    return found


def kinds_of(layers) -> list[str]:
    """Names of layers without what stands before a block's number, each once, in their order by the alphabet."""
    return sorted({re.sub(r"^(.*\.)?\d+\.", "", name, count=1) for name in layers})
