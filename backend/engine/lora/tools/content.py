"""The content of a LoRA file by module, under the model's own names, ready to be exported or merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from backend.catalog.family import Family
from backend.catalog.lora.alpha import alpha_rules
from backend.catalog.lora.identify import families_of, named, outline_of
from backend.catalog.lora.keys import Reading, group, plain, readings
from backend.catalog.state_dict_keys import Slot
from backend.engine.loading.tensor_source import Source
from backend.engine.lora.algorithms.build import bias_body, check_whole, leave_out_rank_0, weight_body
from backend.engine.lora.algorithms.delta import Body, Dense
from backend.engine.lora.algorithms.module_tensors import Module, at_place, cut
from backend.engine.lora.algorithms.oft import is_output_rotation, is_rotation
from backend.engine.lora.duplicate_modules import Claim, Claims, lend_alphas
from backend.engine.lora.tools.key_tables import Book
from backend.engine.lora.tools.text_encoder_keys import text_module
from backend.schema.messages import Trouble


@dataclass
class Content:
    """The changes of one module. `magnitude` is a DoRA's, its rows or columns as it lies in the file."""

    bodies: list[Body] = field(default_factory=list)
    magnitude: torch.Tensor | None = None
    bias: list[Body] = field(default_factory=list)

    def dense(self) -> torch.Tensor | None:
        """The sum of the bodies, float32, in the shape of the first; None without bodies."""
        if not self.bodies:
            return None
        total = self.bodies[0].dense()
        for body in self.bodies[1:]:
            total += body.dense().view(total.shape)
        return total


def read_content(source: Source, book: Book) -> tuple[dict[str, Content], dict[str, str]]:
    """({own module: what changes it}, {what was left out: why}). Raises Trouble for an unusable file, or if nothing is
    known."""
    grouped, others = group(source.shapes)
    places = {stem: _known(stem, roles, book) for stem, roles in grouped.items()}
    grouped = lend_alphas(grouped, {stem: found[0] for stem, found in places.items() if found}, source)
    names = {stem: _names(*found) for stem, found in places.items() if found}
    rules = alpha_rules(
        source.metadata,
        source.config,
        tensors_say=any("alpha" in roles for roles in grouped.values()),
        names=[name for some in names.values() for name in some],
        source=source.name,
    )
    contents: dict[str, Content] = {}
    claims = Claims(source.name)
    unused = dict.fromkeys(others, "is no adapter's tensor")
    _check_wholes(source, others, book)
    for stem, roles in sorted(grouped.items(), key=lambda item: _extent(places[item[0]])):
        found = places[stem]
        if found is None or set(roles) == {"alpha"}:
            unused[plain(stem)] = "is no module of this family" if found is None else "has an alpha and nothing else"
            continue
        slots, reading = found
        module = Module(
            source=source,
            stem=stem,
            roles=roles,
            slots=slots,
            names=names[stem],
            component=reading.component or "dit",
            rules=rules,
            shape_of=lambda name: None,
            weight_of=_no_weight,
            notes=[],
            unused=unused,
            ranks=set(),
            alphas=set(),
        )
        _take(module, contents, claims)
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


def _names(slots: tuple[Slot, ...], reading: Reading) -> tuple[str, ...]:
    """What rules for alpha may call a module: as the file has it, then, where it is one module of the family, by its
    own name."""
    own = (slots[0].module,) if len(slots) == 1 else ()
    return tuple(dict.fromkeys((reading.name, *own)))


def _extent(found: tuple[tuple[Slot, ...], Reading] | None) -> float:
    """What is of whole modules comes before what is of some of their rows, of which it may be a repetition."""
    if found is None:
        return 0.0
    start, stop, whole = found[0][0].place
    return -(stop - start) / whole


def _check_wholes(source: Source, others: list[str], book: Book) -> None:
    """Raises Trouble for whole parameters of the model beside adapters: what they change depends on the model, which is
    not here."""
    for key in others:
        stem, _, leaf = key.rpartition(".")
        if stem and leaf in ("weight", "bias", "scale") and _known(stem, {}, book):
            raise Trouble(
                "not_supported",
                f"{source.name} holds {key} as a whole beside its adapters, whose change needs the base model.",
                hint="Bake it instead; nothing was written.",
            )


def _take(module: Module, contents: dict[str, Content], claims: Claims) -> None:
    if is_rotation(module) or is_output_rotation(module):
        raise Trouble(
            "not_supported",
            f"{module.source.name} is an OFT on {plain(module.stem)}: what it changes depends on the base model.",
            hint="Bake it into a checkpoint instead; nothing was written.",
        )
    leave_out_rank_0(module)
    if not module.roles:
        return
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
        share = None if magnitude is None else _magnitude_of(magnitude, slot, body, by_row=role == "magnitude_out")
        key = next(iter(module.roles.values()))
        if body is not None:
            here = _in_place(cut(body, slot), slot)
            if claims.is_new(f"{_key(slot)}.weight", Claim(module.stem, key, slot.place, here.dense, share)):
                content = contents.setdefault(_key(slot), Content())
                content.bodies.append(here)
                content.magnitude = share if share is not None else content.magnitude
        if bias is not None:
            here = _in_place(cut(bias, slot), slot)
            if claims.is_new(f"{_key(slot)}.bias", Claim(module.stem, key, slot.place, here.dense)):
                contents.setdefault(_key(slot), Content()).bias.append(here)


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


def family_for(source: Source, families: tuple[Family, ...], name: str = "") -> Family:
    """The family of a LoRA: `name` if given, else as its modules and metadata say. Raises Trouble where that is not
    clear."""
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
