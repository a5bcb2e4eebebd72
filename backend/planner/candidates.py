"""The arrangements that each phase of a job can take, and what each costs. Pure; the planner puts them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from backend.planner.costs import phase_costs
from backend.planner.costs.device_speed import Speed
from backend.planner.costs.layout import DENOISERS, FP8, Fixed, Layout, PartLayout, Work, Working
from backend.planner.costs.model_sizes import ModelSizes, PartSizes
from backend.planner.costs.quantized_bytes import cast_bytes
from backend.planner.costs.weight_bytes import moved_bytes, off_card, on_card
from backend.schema.memory_plan import DTYPE_BYTES, PhasePlan

LOSSY = ("fp8", "tile", "optimizer_8bit")  # rungs that change results


@dataclass(frozen=True)
class Terms:
    """What every option is judged by."""

    sizes: ModelSizes
    work: Work
    point: dict
    speed: Speed
    fixed: Fixed
    budget_bytes: int
    homes: tuple[str, ...]  # where weights may wait
    storages: tuple[str, ...]
    ram_bytes: float = math.inf  # that weights may take
    tiles: bool = True  # a decode may be done in them
    eight_bit_moments: bool = True  # an optimizer may keep its own so
    least: bool = False  # of ways that differ in bytes on the card alone, only the one that needs least is looked at
    memo: dict = field(default_factory=dict, compare=False, repr=False)  # what does not depend on homes and storages

    def once(self, key, make: Callable):
        """`make()`, computed the first time that `key` is asked for."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    @property
    def room_bytes(self) -> int:
        """Of the budget, for tensors."""
        fixed = self.fixed
        return self.budget_bytes - fixed.context_high_bytes - fixed.workspace_bytes - fixed.learnt_bytes

    @property
    def encoders(self) -> list[PartSizes]:
        return [part for name, part in self.sizes.parts.items() if name not in (*DENOISERS, "vae")]

    @property
    def denoisers(self) -> list[PartSizes]:
        return [self.sizes.parts[name] for name in DENOISERS if name in self.sizes.parts]


@dataclass(frozen=True)
class Option:
    """One arrangement of one phase (or of two that share it)."""

    layout: Layout
    phases: tuple[PhasePlan, ...]
    rungs: tuple[str, ...] = ()
    lossy: int = 0
    off_card_bytes: int = 0  # in RAM, as long as the job lasts

    @cached_property
    def high(self) -> int:
        return max((phase.peak_high_bytes for phase in self.phases), default=0)

    @cached_property
    def low(self) -> int:
        return max((phase.peak_low_bytes for phase in self.phases), default=0)

    @cached_property
    def lossy_rungs(self) -> frozenset[str]:
        """Those that change results."""
        return frozenset(rung for rung in self.rungs if rung.partition(":")[0] in LOSSY)

    @cached_property
    def seconds(self) -> float:
        """In the middle of their range, by which options are compared."""
        return sum(sum(phase.seconds) / 2 for phase in self.phases)


def part_layouts(
    terms: Terms, *, modes: tuple[str, ...] = ("parked", "streamed")
) -> Iterator[tuple[PartLayout, tuple[str, ...], int]]:
    """Every way to keep a part: (layout, rungs, number of lossy ones)."""
    for mode in modes:
        for home in terms.homes if mode != "resident" else terms.homes[:1]:
            for storage in terms.storages:
                rungs = [
                    rung
                    for rung, taken in (
                        ("park", mode != "resident"),
                        ("fp8", storage == FP8),
                        ("stream", mode == "streamed"),
                        ("disk", mode != "resident" and home == "disk" and not terms.fixed.on_cpu),
                    )
                    if taken
                ]
                yield PartLayout(mode, storage, home), tuple(rungs), int(storage == FP8)


def text_options(terms: Terms, modes=("parked", "streamed"), *, fills: bool = True) -> list[Option]:
    """Encoding the prompts (both, one after the other, with guidance).

    `fills`: blocks of a streamed encoder stay as far as there is room.
    """
    if not terms.encoders:
        return [Option(Layout(), ())]
    each = [phase_costs.text(part, terms.point, terms.work, terms.fixed) for part in terms.encoders]
    working = max(each, key=lambda one: one.likely)
    storage = dict(terms.work.quantized).get(terms.encoders[0].name)
    layouts = [_quantized(terms, storage)] if storage else part_layouts(terms, modes=modes)
    return [_encoded(terms, *one, working=working, fills=fills) for one in layouts]


def _quantized(terms: Terms, storage: str) -> tuple[PartLayout, tuple[str, ...], int]:
    """How a quantized part is kept: always on the card."""
    return PartLayout("resident", storage, terms.homes[0]), ("quantize",), 0


def _encoded(
    terms: Terms, layout: PartLayout, rungs: tuple[str, ...], lossy: int, *, working: Working, fills: bool
) -> Option:
    encoders, computing = terms.encoders, terms.work.computing
    room = terms.room_bytes - working.likely - _staying(terms, encoders)
    parts = filled(encoders, layout, room if fills else 0, computing)
    weights, staging = held(encoders, parts, computing)
    staging += max(cast_bytes(layout.storage, part, DTYPE_BYTES[computing]) for part in encoders)
    passes = 2 if terms.work.guidance and not terms.work.targets else 1
    moved = sum(
        _entering(part, parts[part.name], terms)
        + phase_costs.move_seconds(
            moved_bytes(part, parts[part.name], computing) * (passes - 1), layout.home, terms.speed
        )
        for part in encoders
    )
    flops = sum(phase_costs.operations(part, phase_costs.told(part, terms.point)) for part in encoders)
    seconds = phase_costs.ranged(phase_costs.compute_seconds(flops * passes, terms.speed) + moved, terms.speed)
    ram = sum(off_card(part, parts[part.name], computing) for part in encoders)
    phase = phase_costs.phase("text", weights, working, terms.fixed, staging=staging, ram=ram, seconds=seconds)
    return Option(Layout(parts), (phase,), _named("text", rungs), lossy, ram)


def _staying(terms: Terms, here: list[PartSizes]) -> int:
    """Bytes of quantized parts that are on the card while others, those `here`, compute."""
    others = [(name, storage) for name, storage in terms.work.quantized if name not in {part.name for part in here}]
    return sum(terms.sizes.parts[name].bytes(storage, terms.work.computing) for name, storage in others)


def denoise_options(terms: Terms, modes=("parked", "streamed")) -> list[Option]:
    """All steps of all pictures; the halves of guidance together, or one after the other for less memory."""
    apart, work = (False, True) if terms.work.guidance else (False,), terms.work
    apart = apart[-1:] if terms.least else apart
    layouts = list(part_layouts(terms, modes=modes))
    if work.fp8_products:  # the request itself wants weights stored so
        layouts = [
            (one, tuple(rung for rung in rungs if rung != "fp8"), 0)
            for one, rungs, _ in part_layouts(replace(terms, storages=(FP8,)), modes=modes)
        ]
    storage = dict(work.quantized).get(terms.denoisers[0].name) if terms.denoisers else None
    if storage:
        layouts = [_quantized(terms, storage)]
    layouts = [
        (replace(one, whole=work.compiled, codes=work.fp8_products), rungs, lossy) for one, rungs, lossy in layouts
    ]
    return [_denoised(terms, layout, rungs, lossy, apart=one) for one in apart for layout, rungs, lossy in layouts]


def _denoised(terms: Terms, layout: PartLayout, rungs: tuple[str, ...], lossy: int, *, apart: bool) -> Option:
    work, first = terms.work, terms.denoisers[0]
    point = {**terms.point, "b": 1} if apart else terms.point
    working = max(
        (phase_costs.denoise(part, point, work, terms.fixed) for part in terms.denoisers), key=lambda one: one.likely
    )
    room = terms.room_bytes - working.likely - work.lora_bytes - _staying(terms, terms.denoisers)
    parts = {}
    for part in terms.denoisers:  # one after the other
        parts |= filled([part], layout, room, work.computing)
    weights, staging = held(terms.denoisers if layout.mode == "resident" else [first], parts, work.computing)
    staging += cast_bytes(layout.storage, first, DTYPE_BYTES[work.computing])
    flops = phase_costs.operations(first, {**point, "b": 1}) * terms.point["b"]
    passes = 2 if apart else 1
    cast = first.numel * 3 * passes / terms.speed.memory_bytes if layout.storage == FP8 and not layout.codes else 0.0
    moved = moved_bytes(first, parts[first.name], work.computing) * passes
    aside = phase_costs.move_seconds(moved, layout.home, terms.speed)
    entering = sum(_entering(part, parts[part.name], terms) for part in terms.denoisers)
    pass_seconds = max(phase_costs.compute_seconds(flops, terms.speed) + cast, aside)
    seconds = phase_costs.ranged(pass_seconds * work.steps * work.count + entering, terms.speed)
    ram = sum(off_card(part, parts[part.name], work.computing) for part in terms.denoisers)
    phase = phase_costs.phase(
        "denoise", weights, working, terms.fixed, staging=staging, adapter=work.lora_bytes, ram=ram, seconds=seconds
    )
    named = (*_named("dit", rungs), *(("halves",) if apart else ()))
    return Option(Layout(parts, halves_apart=apart), (phase,), named, lossy, ram)


def decode_options(terms: Terms, modes=("parked",)) -> list[Option]:
    """Latents to pictures, and a given picture to latents before."""
    part, found = terms.sizes.parts.get("vae"), []
    if part is None:
        return [Option(Layout(), ())]
    for mode in modes:
        ways = (False, True) if terms.tiles else (False,)
        for tiled in ways[-1:] if terms.least else ways:
            layout = PartLayout(mode, terms.work.computing, terms.homes[0])
            found.append(_decoded(terms, part, layout, tiled))
    return found


def _decoded(terms: Terms, part: PartSizes, layout: PartLayout, tiled: bool) -> Option:
    work, dtype = terms.work, terms.work.decoder_dtype
    weights = {"vae": part.bytes(dtype, dtype)}
    flops = phase_costs.operations(part, terms.point, "operations/decode")
    each = phase_costs.compute_seconds(flops * (1.8 if tiled else 1.0), terms.speed)
    entering = _entering(part, layout, terms)
    working = phase_costs.decode(part, terms.point, dtype, terms.fixed, tiled=tiled)
    seconds = phase_costs.ranged(each * work.count + entering, terms.speed)
    phases = [phase_costs.phase("decode", weights, working, terms.fixed, seconds=seconds)]
    if work.encodes:
        point = phase_costs.encoded(terms.point, terms.sizes, work)
        flops = phase_costs.operations(part, point, "operations/encode")
        first = phase_costs.decode(part, point, dtype, terms.fixed, stage="encode")
        seconds = phase_costs.ranged(phase_costs.compute_seconds(flops, terms.speed), terms.speed)
        phases.insert(0, phase_costs.phase("encode", weights, first, terms.fixed, seconds=seconds))
    rungs = (("tile",) if tiled else ()) + (("park",) if layout.mode == "parked" else ())
    ram = off_card(part, layout, dtype)
    return Option(Layout({"vae": layout}, tiled=tiled), tuple(phases), rungs, int(tiled), ram)


def held(parts: list[PartSizes], layouts: dict[str, PartLayout], computing: str) -> tuple[dict[str, int], int]:
    """(weights of each of `parts`, staging) on the card while they take turns in one phase."""
    each = {part.name: on_card(part, layouts[part.name], True, computing) for part in parts}
    return {name: weights for name, (weights, _) in each.items()}, max(
        (buffers for _, buffers in each.values()), default=0
    )


def filled(parts: list[PartSizes], layout: PartLayout, room_bytes: float, computing: str) -> dict[str, PartLayout]:
    """`layout` for each of `parts`, which are on the card together; of streamed ones as many blocks stay as there is
    room for, the largest part first."""
    found = {part.name: layout for part in parts}
    if layout.mode != "streamed":
        return found
    for part in sorted(parts, key=lambda one: -one.numel):
        others, buffers = held([one for one in parts if one is not part], found, computing)
        room = room_bytes - sum(others.values())
        low, high = 0, max(len(part.blocks) - 1, 0)
        while low < high:
            middle = (low + high + 1) // 2
            weights, staging = on_card(
                part,
                PartLayout("streamed", layout.storage, layout.home, middle, layout.whole, layout.codes),
                True,
                computing,
            )
            low, high = (middle, high) if weights + max(staging, buffers) <= room else (low, middle - 1)
        found[part.name] = replace(layout, on_card=low)
    return found


def _entering(part: PartSizes, layout: PartLayout, terms: Terms) -> float:
    """Seconds until every weight has been on the card once. FP8 gains nothing here: casting eats what is moved less."""
    if layout.mode == "resident":
        return 0.0
    computing = terms.work.computing
    return phase_costs.move_seconds(part.bytes(computing, computing), layout.home, terms.speed)


def _named(part: str, rungs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(rung if rung == "park" else f"{rung}:{part}" for rung in rungs)
