"""What a LoRA file says, module by module under the model's own names, ready to be written in another layout or computed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch

from backend.catalog.adapter import Reading, group, plain, readings
from backend.catalog.lora_alphas import alpha_rules
from backend.catalog.lora_kind import families_of, named, outline_of
from backend.catalog.names import Slot
from backend.engine.lora_body import Body, Dense
from backend.engine.lora_book import Book
from backend.engine.lora_build import bias_body, check_whole, weight_body
from backend.engine.lora_module import Module, at_place, cut
from backend.engine.lora_source import Source
from backend.engine.lora_text import text_module
from backend.schema.messages import Trouble


@dataclass
class Content:
    """The changes of one module. `magnitude` is a DoRA's, its rows or columns as it lies in the file."""

    bodies: list[Body] = field(default_factory=list)
    magnitude: torch.Tensor | None = None
    bias: list[Body] = field(default_factory=list)

    def dense(self) -> torch.Tensor | None:
        """The sum of the bodies, float32."""
        if not self.bodies:
            return None
        total = self.bodies[0].dense()
        for body in self.bodies[1:]:
            total += body.dense().view(total.shape)
        return total


def read_content(source: Source, book: Book) -> tuple[dict[str, Content], dict[str, str]]:
    """({own module: what changes it}, {what was left out: why}). Raises Trouble for an unusable file, or if nothing is known."""
    grouped, others = group(source.shapes)
    rules = alpha_rules(source.metadata, source.config, tensors_say=any("alpha" in roles for roles in grouped.values()))
    contents: dict[str, Content] = {}
    unused = dict.fromkeys(others, "is no adapter's tensor")
    for stem, roles in grouped.items():
        found = _known(stem, roles, book)
        if found is None or set(roles) == {"alpha"}:
            unused[plain(stem)] = "is no module of this family" if found is None else "has an alpha and nothing else"
            continue
        slots, reading = found
        whole = len(slots) == 1
        module = Module(
            source=source,
            stem=stem,
            roles=roles,
            slots=slots,
            own_name=slots[0].module if whole else reading.name,
            component=reading.component or "dit",
            rules=rules,
            shape_of=lambda name: None,
            weight_of=_no_weight,
            notes=[],
            unused=unused,
            ranks=set(),
            alphas=set(),
        )
        _take(module, contents)
    if not contents:
        raise Trouble(
            "no_keys_match",
            f"{source.name} has nothing that is known of {book.family.TITLE}.",
            hint="Say which family it is for.",
            detail="\n".join(list(unused)[:200]),
        )
    return contents, unused


def _known(stem: str, roles: Mapping[str, str], book: Book) -> tuple[tuple[Slot, ...], Reading] | None:
    """What a file's module stands for: of the denoiser, or of a text encoder."""
    name = plain(stem) + (".modulation" if set(roles) == {"diff_m"} else "")
    found = book.slots(name)
    for reading in () if found else readings(name):
        module = text_module(reading.component, reading.name)
        if module:
            return (Slot(module),), reading
    return found


def _take(module: Module, contents: dict[str, Content]) -> None:
    check_whole(module)
    body, bias = weight_body(module), bias_body(module)
    body = Dense(module.read("diff_m"), 1.0) if "diff_m" in module.roles else body
    role = next((role for role in ("magnitude", "magnitude_out") if role in module.roles), None)
    magnitude = module.read(role) if role else None
    for slot in module.slots:
        if slot.place != (0, 1, 1) and magnitude is not None:
            raise Trouble(
                "not_supported",
                f"{plain(module.stem)} is a DoRA of a part of {slot.module} only; that is not rewritten.",
            )
        content = contents.setdefault(_key(slot), Content())
        if body is not None:
            content.bodies.append(_in_place(cut(body, slot), slot))
        if bias is not None:
            content.bias.append(_in_place(cut(bias, slot), slot))
        if magnitude is not None:
            content.magnitude = _magnitude_of(magnitude, slot, body, by_row=role == "magnitude_out")


def _key(slot: Slot) -> str:
    """The module, or where another parameter than a weight is meant (a modulation's table), that parameter."""
    return slot.module if slot.parameter == "weight" else f"{slot.module}.{slot.parameter}".lstrip(".")


def _in_place(body: Body, slot: Slot) -> Body:
    """A change of some of a module's rows as one of all, zero elsewhere."""
    start, stop, whole = slot.place
    return at_place(body, slot, body.shape[0] * whole // (stop - start))


def _magnitude_of(magnitude: torch.Tensor, slot: Slot, body: Body | None, *, by_row: bool) -> torch.Tensor:
    """A module's share of a DoRA magnitude, as (o, 1, ...) or (1, i, ...)."""
    rows = body.shape[0] if body is not None else magnitude.numel()
    if by_row or magnitude.ndim == 1 or magnitude.shape[0] == rows != 1:
        values = magnitude.flatten()
        start, stop, whole = slot.share
        share = values[rows * start // whole : rows * stop // whole]
        return share.reshape(-1, *[1] * (len(body.shape) - 1 if body is not None else 1))
    if slot.share != (0, 1, 1):
        raise Trouble(
            "not_supported", f"The DoRA of {slot.module} is by columns of a fused matrix and cannot be taken apart."
        )
    return magnitude


def _no_weight(name: str) -> torch.Tensor:
    raise Trouble("not_supported", f"{name} is replaced as a whole, which needs the base model.")


def family_for(source: Source, families: tuple[ModuleType, ...], name: str = "") -> ModuleType:
    """The family of a LoRA: `name` if given, else as its modules and metadata say. Raises Trouble where that is not clear."""
    if name:
        found = next((family for family in families if name == family.NAME), None)
        if found is None:
            raise Trouble(
                "bad_value", f"There is no family {name!r}.", hint=f"There are {', '.join(f.NAME for f in families)}."
            )
        return found
    outline = outline_of(tuple(source.shapes), tuple(source.shapes.values()))
    family, possible, _ = families_of(outline.widths, source.metadata, families)
    if not family:
        choices = " or ".join(named(one, families) for one in possible) or "any of several models"
        raise Trouble(
            "not_recognised", f"{source.name} could be for {choices}.", hint="Say which with the family setting."
        )
    return next(one for one in families if family == one.NAME)
