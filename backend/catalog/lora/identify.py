"""What a LoRA file is, from its header: family, dialect, ranks, targets, trainer, trigger words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from backend.catalog.family import Family, LoraSign
from backend.catalog.formats.read import read_header
from backend.catalog.formats.safetensors import Layout, read_layout
from backend.catalog.lora import metadata as lora_facts
from backend.catalog.lora import module_names
from backend.catalog.lora.keys import ALGORITHMS, group, innermost, is_adapter, plain
from backend.catalog.spec import LoraSpec
from backend.catalog.state_dict_keys import flatten
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
    widths: tuple[tuple[str, int, int], ...]  # (flattened module name, input width, rows; 0 for unknown), denoiser only
    texts: tuple[tuple[str, str, int], ...] = ()  # (prefix, flattened module name, input width) of text encoders


def identify_lora(path: str | os.PathLike, families: Iterable[Family]) -> LoraSpec:
    """The LoRA in `path`. Troubles: "damaged", "missing_file", "not_recognised" (no LoRA)."""
    path = Path(path)
    if path.suffix.lower() in PICKLES:
        header = read_header(path)
        entries = {name: {"dtype": at.dtype, "shape": list(at.shape)} for name, at in header.tensors.items()}
        return lora_of(path, Layout(entries, {}, 0, path.stat().st_size), tuple(families))
    return lora_of(path, read_layout(path), tuple(families))


def lora_of(path: Path, layout: Layout, families: tuple[Family, ...]) -> LoraSpec:
    """`identify_lora` for a header that has been read."""
    if not is_adapter(layout.entries):
        raise Trouble(
            "not_recognised", f"{path.name} is not a LoRA: it holds no adapter's tensors.", hint="Is it a model?"
        )
    outline = outline_of(tuple(layout.entries), tuple(tuple(entry["shape"]) for entry in layout.entries.values()))
    family, possible, evidence = families_of(outline.widths, layout.metadata, families, texts=outline.texts)
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
    ranks, targets, algorithms, components, widths, texts = set(), {}, set(), {}, [], []
    for stem, roles in modules.items():
        reading = innermost(plain(stem))
        components[reading.component or "dit"] = None
        targets[target_of(reading.name)] = None
        algorithms |= {ALGORITHMS[role] for role in roles if role in ALGORITHMS}
        rank, width, rows = _sizes(roles, shape_of)
        if rank:
            ranks.add(rank)
        if reading.component in ("", "dit"):
            widths.append((flatten(reading.name), width, rows))
        elif width:
            texts.append((reading.prefix, flatten(reading.name), width))
    return Outline(
        dialect=_dialect(keys, modules),
        ranks=tuple(sorted(ranks)),
        targets=tuple(sorted(targets)),
        num_modules=len(modules),
        algorithms=tuple(sorted(algorithms)),
        components=tuple(sorted(components)),
        widths=tuple(widths),
        texts=tuple(texts),
    )


def _sizes(roles: Mapping[str, str], shape_of: Mapping[str, tuple]) -> tuple[int, int, int]:
    """(rank, input width, rows), 0 where the module's tensors do not show it."""

    def size(role: str, place: int) -> int:
        shape = shape_of.get(roles.get(role, ""), ())
        return shape[place] if len(shape) > 1 else 0

    for inner, outer in (("down", "up"), ("hada_w1_b", "hada_w1_a")):
        if size(inner, 1):
            return size(inner, 0), size(inner, 1), 0 if "hada_t1" in roles else size(outer, 0)
    if size("diff", 1):
        return 0, size("diff", 1), size("diff", 0)
    left, right = (
        (size(f"lokr_{w}", 0) or size(f"lokr_{w}_a", 0), size(f"lokr_{w}", 1) or size(f"lokr_{w}_b", 1))
        for w in ("w1", "w2")
    )
    rank = size("lokr_w2_b", 0) or size("lokr_w1_b", 0)
    return rank, left[1] * right[1], 0 if "lokr_t2" in roles else left[0] * right[0]


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
    widths: Iterable[tuple[str, int, int]],
    metadata: Mapping[str, str],
    families: Iterable[Family],
    *,
    texts: Iterable[tuple[str, str, int]] = (),
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(family, "" where it cannot be told; families possible; why) of a LoRA with these modules of the denoiser.

    `texts`: its modules of text encoders, which decide where there are no others.
    """
    families = tuple(families)
    sure, found = _candidates(tuple(widths), families)
    candidates = dict(found)
    if not sure:
        candidates = _with_names(tuple(widths), candidates, families)
    if not candidates and not tuple(widths):
        told = module_names.families_of_encoders(texts, families)
        candidates = dict.fromkeys(told, "has a text encoder with these modules")
    said = lora_facts.architecture(metadata)
    meant = [family.NAME for family in families if said and any(word in said for word in family.WORDS)]
    if len(candidates) > 1:
        narrowed = [name for name in meant if name in candidates]
        candidates = {name: candidates[name] for name in narrowed} or candidates
    if not candidates and meant:
        candidates = dict.fromkeys(meant[:1], f"the metadata says {said[:60]}")
    names = tuple(candidates)
    return names[0] if len(names) == 1 else "", names, tuple(f"{name}: {why}" for name, why in candidates.items())


@lru_cache(maxsize=256)
def _candidates(
    widths: tuple[tuple[str, int, int], ...], families: tuple[Family, ...]
) -> tuple[bool, tuple[tuple[str, str], ...]]:
    """(whether they are sure, (family, why) by signs of the modules alone): those that are sure, else those that are
    possible."""
    sure, possible = {}, {}
    for family in families:
        for sign in family.LORA_SIGNS:
            why = _shows(sign, widths)
            if why:
                (sure if sign.sure else possible)[family.NAME] = why
    return bool(sure), tuple((sure or possible).items())


def _with_names(
    widths: tuple[tuple[str, int, int], ...], candidates: dict[str, str], families: tuple[Family, ...]
) -> dict[str, str]:
    """The candidates whose networks have every module of a file in its size; where none of them has, all families that
    do; else as they are."""
    names = {family.NAME for family in families}
    having = [name for name in module_names.families_with(widths) if name in names]
    if kept := {name: why for name, why in candidates.items() if name in having}:
        return kept
    if not having:
        return candidates
    why = "only it has these modules in this size" if len(having) == 1 else "has these modules in this size"
    return {name: f"{why}, such as {widths[0][0]}" for name in having}


def _shows(sign: LoraSign, widths: tuple[tuple[str, int, int], ...]) -> str:
    """Why these modules bear the sign; "" where they do not."""
    joined = "\n".join(name for name, _, _ in widths)
    first = ""
    for pattern in sign.names:
        match = re.search(pattern, joined)
        if not match:
            return ""
        first = first or match.group()
    if any(re.search(pattern, joined) for pattern in sign.never):
        return ""
    for what, place, wanted in (("width", 1, sign.widths), ("rows", 2, sign.rows)):
        for pattern, allowed in wanted.items():
            seen = {module[place] for module in widths if module[place] and re.search(pattern, module[0])}
            if not seen & set(allowed):
                return ""
            first += f", {what} {min(seen & set(allowed))}"
    return f"has {first}"


def named(family: str, families: Iterable[Family]) -> str:
    """The family's title, for sentences."""
    return next((one.TITLE for one in families if family == one.NAME), family or "an unknown family")
