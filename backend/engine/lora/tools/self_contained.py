"""Self-contained copies of LoRA files: what metadata or adapter_config.json said is written into the file.

alpha / rank may lie in the header's metadata or in PEFT's adapter_config.json. A copy with other metadata, or in
another folder, would act at another strength; it gets alpha tensors instead, which every reader knows. How an OFT's
rotations are meant has no tensor: it goes along in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from backend.catalog.lora.alpha import AlphaRules, alpha_rules
from backend.catalog.lora.keys import group, innermost, is_adapter, plain
from backend.catalog.lora.metadata import table
from backend.catalog.lora.peft_config import (
    CONFIG,
    METADATA,
    STEMS,
    config_beside,
    fields_of,
    others_beside,
    turning_of,
)
from backend.engine.loading.tensor_source import Source
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file

PAIRS = (("down", "up"), ("hada_w1_b", "hada_w1_a"), ("embedding_down", "embedding_up"))


def kept_meaning(
    source: Source, metadata: Mapping[str, str], out: Path
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(alpha tensors to add, metadata) with which the tensors of `source`, written to `out`, act as `source` does.

    Raises Trouble where nothing that a file can say would make them.
    """
    if not is_adapter(source.shapes):
        return {}, dict(metadata)
    grouped, _ = group(source.shapes)
    names = _names(source, grouped)
    tensors_say = any("alpha" in roles for roles in grouped.values())
    beside = config_beside(out)

    def rules(said: Mapping[str, str], config: Mapping[str, object]) -> AlphaRules:
        return alpha_rules(
            said,
            config,
            tensors_say=tensors_say,
            names=[name for some in names.values() for name in some],
            source=source.name,
        )

    before, after = rules(source.metadata, source.config), rules(metadata, beside)
    alphas, differs = {}, False
    for stem, roles in grouped.items():
        has_rank, rank = _rank(roles, source.shapes)
        if not has_rank or "alpha" in roles:
            continue
        component = innermost(plain(stem)).component or "dit"
        then, now = (one.scale(names[stem], component, rank) for one in (before, after))
        if then != now and rank is None:
            raise _not_kept(source, f"the strength of {plain(stem)}, two whole Kronecker factors, has no tensor")
        if rank:
            alphas[f"{plain(stem)}.alpha"] = torch.tensor(then * rank, dtype=torch.float32)
            differs |= then != now
    return (alphas if differs else {}), _with_turnings(source, grouped, metadata, beside)


def _names(source: Source, grouped: Mapping) -> dict[str, tuple[str, ...]]:
    """What rules for alpha may call each module. Where they have patterns, for dotted names, and the file's are
    flattened, the family tells.

    Raises Trouble where patterns cannot be tried for that.
    """
    readings = {stem: innermost(plain(stem)) for stem in grouped}
    patterns = any(fields.get("alpha_pattern") for fields in fields_of(source.metadata, source.config).values())
    flat = patterns and any(reading.prefix.endswith("_") for reading in readings.values())
    if not flat:
        return {stem: (reading.name,) for stem, reading in readings.items()}
    from backend.engine.lora.tools.content import family_for
    from backend.engine.lora.tools.key_tables import book_of
    from backend.families import FAMILIES

    book = book_of(family_for(source, FAMILIES), source=source)
    found = {}
    for stem, reading in readings.items():
        known = book.slots(stem)
        own = (known[0][0].module,) if known and len(known[0]) == 1 else ()
        found[stem] = (reading.name, *own)
    return found


def _rank(roles: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> tuple[bool, int | None]:
    """(whether alpha acts on the module, its rank or None for two whole Kronecker factors)."""
    for inner, outer in PAIRS:
        if inner in roles and outer in roles:
            return True, shapes[roles[inner]][0]
    for half in ("lokr_w2_b", "lokr_w1_b"):
        if half in roles:
            return True, shapes[roles[half]][0]
    return "lokr_w1" in roles, None


def _with_turnings(source: Source, grouped: Mapping, metadata: Mapping[str, str], beside: Mapping) -> dict[str, str]:
    """`metadata`, with the definition of the file's OFT wherever it would otherwise be read by another."""
    kept = dict(metadata)
    components = {
        innermost(plain(stem)).component or "dit"
        for stem, roles in grouped.items()
        if any(role.startswith("oft") for role in roles)
    }
    fields = {}
    for component in sorted(components):
        then = turning_of(source.metadata, source.config, component, source.name)
        now = turning_of(metadata, beside, component, source.name)
        if then.fields() != now.fields():
            called = "transformer" if component == "dit" else component
            fields |= {f"{called}.{key}": value for key, value in then.fields().items()}
    if fields:
        said = table(kept, METADATA)
        kept[METADATA] = json.dumps({**said, **fields})
    return kept


def _not_kept(source: Source, why: str) -> Trouble:
    return Trouble(
        "not_supported",
        f"A copy of {source.name} would act otherwise than the file: {why}.",
        hint="Convert it to another layout instead; nothing was written.",
    )


def check_neighbours(out: Path, *, own_meaning: bool) -> None:
    """Raises Trouble where a file written to `out` would change what another says, or be read by a configuration that
    is not its own.

    `own_meaning`: the file is made anew, so a configuration that lies there does not speak of it.
    """
    if not is_file(out.with_name(CONFIG)):
        return
    others = others_beside(out)
    if len({other.stem for other in others}) == 1 and not others[0].name.startswith(STEMS):
        raise Trouble(
            "bad_value",
            f"{CONFIG} in {out.parent} is for {others[0].name}, the only LoRA there; "
            "with a second one it would apply to neither.",
            hint="Write to another folder.",
        )
    if own_meaning and config_beside(out):
        raise Trouble(
            "bad_value",
            f"{CONFIG} in {out.parent} would be read as {out.name}'s, and speaks of another file.",
            hint="Write to another folder.",
        )
