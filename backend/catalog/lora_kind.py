"""What a LoRA file is, from its header: family, dialect, ranks, targets, trainer, trigger words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from backend.catalog import lora_facts
from backend.catalog.adapter import ALGORITHMS, group, innermost, is_adapter, plain
from backend.catalog.family import LoraSign
from backend.catalog.header import Layout, read_header, read_layout
from backend.catalog.names import flatten
from backend.catalog.spec import LoraSpec
from backend.schema.messages import Trouble

PICKLES = (".pt", ".pth", ".bin", ".ckpt")

__all__ = ["families_of", "identify_lora", "is_adapter", "named"]


@dataclass(frozen=True)
class Outline:
    """What the names and shapes of a LoRA say; equal for all files of one trainer and one rank."""

    dialect: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    num_modules: int
    algorithms: tuple[str, ...]
    components: tuple[str, ...]
    widths: tuple[tuple[str, int], ...]  # (flattened module name, input width or 0), denoiser only


def identify_lora(path: str | os.PathLike, families: Iterable[ModuleType]) -> LoraSpec:
    """The LoRA in `path`. Troubles: "damaged", "missing_file", "not_recognised" (no LoRA)."""
    path = Path(path)
    if path.suffix.lower() in PICKLES:
        header = read_header(path)
        entries = {name: {"dtype": at.dtype, "shape": list(at.shape)} for name, at in header.tensors.items()}
        return lora_of(path, Layout(entries, {}, 0, path.stat().st_size), tuple(families))
    return lora_of(path, read_layout(path), tuple(families))


def lora_of(path: Path, layout: Layout, families: tuple[ModuleType, ...]) -> LoraSpec:
    """`identify_lora` for a header that has been read."""
    if not is_adapter(layout.entries):
        raise Trouble(
            "not_recognised", f"{path.name} is not a LoRA: it holds no adapter's tensors.", hint="Is it a model?"
        )
    outline = outline_of(tuple(layout.entries), tuple(tuple(entry["shape"]) for entry in layout.entries.values()))
    family, possible, evidence = families_of(outline.widths, layout.metadata, families)
    metadata = layout.metadata
    status = path.stat()
    return LoraSpec(
        path=path,
        family=family,
        dialect=outline.dialect,
        ranks=outline.ranks,
        alphas=lora_facts.alphas(metadata),
        targets=outline.targets,
        num_modules=outline.num_modules,
        algorithms=outline.algorithms,
        components=outline.components,
        trigger_words=lora_facts.trigger_words(metadata, path),
        trainer=lora_facts.trainer(metadata, outline.dialect),
        base=lora_facts.base(metadata),
        nbytes=status.st_size,
        modified=status.st_mtime,
        metadata=metadata,
        evidence=evidence,
        families_possible=possible,
    )


@lru_cache(maxsize=256)
def outline_of(keys: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Outline:
    """The outline of a file with these names and shapes (remembered: a library holds many files of one kind)."""
    shape_of = dict(zip(keys, shapes, strict=True))
    modules, _ = group(keys)
    ranks, targets, algorithms, components, widths = set(), {}, set(), {}, []
    for stem, roles in modules.items():
        reading = innermost(plain(stem))
        components[reading.component or "dit"] = None
        targets[target_of(reading.name)] = None
        algorithms |= {ALGORITHMS[role] for role in roles if role in ALGORITHMS}
        rank, width = _rank_and_width(roles, shape_of)
        if rank:
            ranks.add(rank)
        if reading.component in ("", "dit"):
            widths.append((flatten(reading.name), width))
    return Outline(
        dialect=_dialect(keys, modules),
        ranks=tuple(sorted(ranks)),
        targets=tuple(sorted(targets)),
        num_modules=len(modules),
        algorithms=tuple(sorted(algorithms)),
        components=tuple(sorted(components)),
        widths=tuple(widths),
    )


def _rank_and_width(roles: Mapping[str, str], shape_of: Mapping[str, tuple]) -> tuple[int, int]:
    """(rank, input width), 0 where the module's tensors do not show it."""
    for role in ("down", "hada_w1_b"):
        shape = shape_of.get(roles.get(role, ""))
        if shape and len(shape) > 1:
            return shape[0], shape[1]
    for role in ("lokr_w2_b", "lokr_w1_b"):
        shape = shape_of.get(roles.get(role, ""))
        if shape:
            return shape[0], 0
    shape = shape_of.get(roles.get("diff", ""))
    return 0, shape[1] if shape and len(shape) > 1 else 0


def target_of(name: str) -> str:
    """The kind of a module: its name after the last numbered block, `attn.to_q`."""
    found = re.split(r"(?:blocks|layers|refiner|resnets|attentions)[._]\d+[._]", name)
    return found[-1]


def _dialect(keys: tuple[str, ...], modules: Mapping[str, object]) -> str:
    """Prefix style and suffix style, in the words of the tools that write them; several joined by a plus sign."""
    prefixes = sorted({_prefix_style(innermost(plain(stem)).prefix) for stem in modules})
    suffixes = sorted({_suffix_style(key) for key in keys} - {""})
    return f"{' + '.join(prefixes)}: {' + '.join(suffixes)}"


def _prefix_style(prefix: str) -> str:
    if prefix.endswith("_"):
        return f"flattened ({prefix})"
    return f"dotted ({prefix})" if prefix else "dotted (no prefix)"


def _suffix_style(key: str) -> str:
    for mark, style in (
        (".lora_A.", "lora_A/lora_B"),
        (".lora_down.", "lora_down/lora_up"),
        (".lora.down.", "lora.down/lora.up"),
        ("_lora", "processor"),
        (".hada_", "LoHa"),
        (".lokr_", "LoKr"),
        (".diff", "diff"),
        (".oft_", "OFT"),
    ):
        if mark in key.removeprefix("lora_") and not (mark == "_lora" and ".processor." not in key):
            return style + (" (adapter name kept)" if re.search(r"\.lora_[AB]\.(?!weight$|bias$)", key) else "")
    return ""


def families_of(
    widths: Iterable[tuple[str, int]], metadata: Mapping[str, str], families: Iterable[ModuleType]
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(family, "" where it cannot be told; families possible; why) of a LoRA with these modules."""
    families = tuple(families)
    candidates = dict(_candidates(tuple(widths), families))
    said = lora_facts.architecture(metadata)
    meant = [family.NAME for family in families if said and any(word in said for word in getattr(family, "WORDS", ()))]
    if len(candidates) > 1:
        narrowed = [name for name in meant if name in candidates]
        candidates = {name: candidates[name] for name in narrowed} or candidates
    if not candidates and meant:
        candidates = dict.fromkeys(meant[:1], f"the metadata says {said[:60]}")
    names = tuple(candidates)
    return names[0] if len(names) == 1 else "", names, tuple(f"{name}: {why}" for name, why in candidates.items())


@lru_cache(maxsize=256)
def _candidates(widths: tuple[tuple[str, int], ...], families: tuple[ModuleType, ...]) -> tuple[tuple[str, str], ...]:
    """(family, why) by the modules alone: those that are sure, else those that are possible."""
    sure, possible = {}, {}
    for family in families:
        for sign in getattr(family, "LORA_SIGNS", ()):
            why = _shows(sign, widths)
            if why:
                (sure if sign.sure else possible)[family.NAME] = why
    return tuple((sure or possible).items())


def _shows(sign: LoraSign, widths: tuple[tuple[str, int], ...]) -> str:
    """Why these modules bear the sign; "" where they do not."""
    joined = "\n".join(name for name, _ in widths)
    first = ""
    for pattern in sign.names:
        match = re.search(pattern, joined)
        if not match:
            return ""
        first = first or match.group()
    if any(re.search(pattern, joined) for pattern in sign.never):
        return ""
    for pattern, allowed in sign.widths.items():
        seen = {width for name, width in widths if width and re.search(pattern, name)}
        if not seen & set(allowed):
            return ""
        first += f", width {min(seen & set(allowed))}"
    return f"has {first}"


def named(family: str, families: Iterable[ModuleType]) -> str:
    """The family's title, for sentences."""
    return next((one.TITLE for one in families if family == one.NAME), family or "an unknown family")
