"""Where memory runs out in a phase: one rung lower for the part concerned, and the phase again.

From the top: the other parts leave the device; half of the blocks that stay are fetched when they are called, then all
are; blocks are stored in FP8, where that is allowed. A phase has rungs of its own beside: guidance in two halves
(before blocks are fetched, while all stay: there it costs little), tiles of a picture, where those are allowed. Where
RAM ran out beside a card, weights wait on disk instead.

Every rung is taken once in a pipeline's life, so a phase is repeated a bounded number of times, and what was taken
stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from backend.catalog.family import part_label
from backend.engine.devices import device_memory, out_of_memory
from backend.engine.loading.fp8_storage import is_float8
from backend.engine.loading.load import TORCH_DTYPES
from backend.engine.offload.blocks import find_units, stored_layout
from backend.engine.offload.prefetch import evenly_spaced
from backend.engine.offload.vram_states import check_files, read_states
from backend.engine.pipeline import part_loading, part_placement
from backend.planner.costs.layout import PartLayout
from backend.planner.plan import RAM_SHARE, config_of
from backend.schema.memory_plan import DISK, DTYPE_BYTES, VramConfig
from backend.schema.messages import Trouble

FP8 = "float8_e4m3fn"
_WEIGHTS = "A larger reserve in the preferences, or offload_device in ModelConfig, has it so from the start."


@dataclass
class Lower:
    """What a pipeline has given up for memory so far."""

    allow_fp8: bool = False
    allow_tiles: bool = True
    taken: set[tuple[str, str]] = field(default_factory=set)  # part, rung
    tiles: dict[str, int] = field(
        default_factory=dict
    )  # "decode", "encode" -> latent cells from which on it is done in tiles
    moved: set[str] = field(default_factory=set)  # parts that lie elsewhere than they were loaded for
    eighth: set[str] = field(default_factory=set)  # parts stored in FP8
    news: list[str] = field(default_factory=list)  # sentences for the next receipt

    def standing(self) -> list[str]:
        """What every later receipt says: what is less exact."""
        return [
            f"The {part_label(name)} is stored in FP8, since memory ran out before." for name in sorted(self.eighth)
        ]


@dataclass(frozen=True)
class Rung:
    """One measure: its name, what it comes to ("so ..."), how to have it so from the start, and the taking of it."""

    name: str
    words: str
    hint: str
    take: Callable[[], object]


def again(pipeline, part: str, work: Callable, *, when: str, own: Sequence[Rung] = ()):
    """What `work()` gives; where memory runs out in it, done again one rung lower, and so on. `when`: what is going on,
    for the notes.

    `work` is to begin from the beginning each time. At the foot of the ladder the last error is raised as it is.
    """
    while True:
        try:
            return work()
        except out_of_memory.OOM_TYPES as error:
            if not out_of_memory.is_oom(error, pipeline.device):
                raise
            rung = _next(pipeline, part, own, of_ram=out_of_memory.is_ram_oom(error, pipeline.device))
            if rung is None:
                raise
            out_of_memory.release_tensors(error)  # its frames hold the phase's tensors
        pipeline.lower.taken.add((part, rung.name))
        sentence = f"Out of memory while {when}, so {rung.words}. {rung.hint}"
        pipeline.note(sentence)
        pipeline.lower.news.append(sentence)
        _take(pipeline, rung)


def _take(pipeline, rung: Rung) -> None:
    device_memory.empty_cache(pipeline.device)
    with out_of_memory.suppress_oom(pipeline.device):  # `work` will run out again, and the next rung is tried
        rung.take()
    device_memory.empty_cache(pipeline.device)


def _next(pipeline, part: str, own: Sequence[Rung], *, of_ram: bool) -> Rung | None:
    found = _out_of_ram(pipeline, part) if of_ram else _downwards(pipeline, part, own)
    return next((rung for rung in found if (part, rung.name) not in pipeline.lower.taken), None)


def _downwards(pipeline, part: str, own: Sequence[Rung]) -> Iterator[Rung]:
    where = "the card" if pipeline.device.type != "cpu" else "memory"
    near = [
        name for name in pipeline.parts if name in pipeline.spec.parts and name != part and _could_leave(pipeline, name)
    ]
    if near:
        yield Rung(
            "park",
            f"parts that are not at work now leave {where}",
            _WEIGHTS,
            lambda: [_put_away(pipeline, name) for name in near],
        )
    if part not in pipeline.parts:  # it is being loaded
        if _is_placeable(pipeline, part, _layout(pipeline, part, "parked")):
            yield Rung(
                "wait",
                f"{called(part)} comes to {where} only for its phase",
                _WEIGHTS,
                lambda: _put_away(pipeline, part),
            )
        return
    blocks, staying = staying_of(pipeline, part)
    if staying == blocks:
        yield from own
    if staying and part != "vae" and _frees_blocks(pipeline, part):
        for name, count in (("fewer", staying // 2), ("none", 0)):
            words = f"{blocks - count} of {blocks} blocks of {called(part)} are now fetched when they are needed"
            yield Rung(name, words, _WEIGHTS, lambda count=count: _stream(pipeline, part, evenly_spaced(blocks, count)))
    if blocks and _may_be_eighth(pipeline, part):
        words = f"{called(part)} is now stored in FP8, which is less exact"
        yield Rung("fp8", words, _WEIGHTS, lambda: _store_in_fp8(pipeline, part))
    yield from own


def _out_of_ram(pipeline, part: str) -> Iterator[Rung]:
    """RAM ran out, not the card."""
    others = [
        name
        for name in pipeline.parts
        if name in pipeline.spec.parts and name != part and _waits_in_ram(pipeline, name)
    ]
    hint = "offload_device='disk' in ModelConfig has it so from the start."
    if (part not in pipeline.parts or _waits_in_ram(pipeline, part)) and _is_placeable(
        pipeline, part, _on_disk(pipeline, part)
    ):
        yield Rung("disk", f"{called(part)} now waits on disk", hint, lambda: _leave_ram(pipeline, part))
    others = [name for name in others if _is_placeable(pipeline, name, _on_disk(pipeline, name))]
    if others:
        yield Rung(
            "all on disk", "all parts now wait on disk", hint, lambda: [_leave_ram(pipeline, name) for name in others]
        )


def halves(pipeline) -> Rung:
    """Guidance in two passes."""
    words = "the two halves of guidance are now computed one after the other"
    return Rung(
        "halves",
        words,
        "A larger reserve in the preferences has it so from the start.",
        lambda: setattr(pipeline, "together", False),
    )


def tiling(pipeline, phase: str, height: int, width: int, asked: bool | tuple[int, int] | None = None) -> list[Rung]:
    """`tiles` for a picture of so many latent cells that is larger than a tile and does not go in tiles yet."""
    small = max(height, width) <= pipeline.family.TILES[0]
    if small or not pipeline.lower.allow_tiles or pipeline.is_tiled(phase, height * width, asked):
        return []
    return [tiles(pipeline, phase, height * width)]


def tiles(pipeline, phase: str, cells: int) -> Rung:
    """The autoencoder in pieces, from now on for pictures of so many latent cells and more."""
    hint = "tiled=True, a smaller picture or a larger reserve in the preferences has it so from the start."
    return Rung(
        f"tiles, {phase}, {cells}",
        "it was done again in tiles",
        hint,
        lambda: pipeline.lower.tiles.update({phase: cells}),
    )


def _put_away(pipeline, name: str) -> None:
    part_placement.rearrange(pipeline, name, _layout(pipeline, name, "parked"), None)


def _stream(pipeline, name: str, staying: set[int]) -> None:
    part_placement.rearrange(pipeline, name, _layout(pipeline, name, "streamed"), tuple(sorted(staying)))


def _store_in_fp8(pipeline, name: str) -> None:
    mode = "streamed" if name in pipeline.resident_blocks else _mode(pipeline, name)
    config = _layout(pipeline, name, mode, storage=FP8)
    pipeline.lower.eighth.add(name)
    part_placement.rearrange(pipeline, name, config, pipeline.resident_blocks.get(name))


def _leave_ram(pipeline, name: str) -> None:
    part_placement.rearrange(pipeline, name, _on_disk(pipeline, name), pipeline.resident_blocks.get(name))


def _on_disk(pipeline, name: str) -> VramConfig:
    mode = _mode(pipeline, name)
    return _layout(pipeline, name, "parked" if mode == "resident" else mode, home=DISK)


def _mode(pipeline, name: str) -> str:
    config = pipeline.configs.get(name, VramConfig())
    if not part_placement.is_placed(pipeline, name):
        return "resident"
    here = pipeline.placements.get(name)
    onload = here.states.onload if here is not None else _states(pipeline, name, config).onload
    offload = here.states.offload if here is not None else _states(pipeline, name, config).offload
    near = [state.device == pipeline.device for state in (offload, onload)]
    return "resident" if all(near) else "parked" if near[1] else "streamed"


def _layout(pipeline, name: str, mode: str, *, home: str = "", storage: str = "") -> VramConfig:
    """The four states of `name` in another mode: stored as it is now, waiting where it does now, or where there is
    room."""
    config = pipeline.configs.get(name, VramConfig())
    computing = config.computation_dtype or str(pipeline.dtype).removeprefix("torch.")
    dtypes = (config.offload_dtype, config.onload_dtype, config.preparing_dtype)
    now = next((str(one).removeprefix("torch.") for one in dtypes if one and "float8" in str(one)), computing)
    storage = storage or now
    if not home:
        nbytes = sum(math.prod(at.shape) for at in pipeline.spec.parts[name].tensors.values()) * DTYPE_BYTES[storage]
        room = nbytes <= RAM_SHARE * device_memory.ram()[1] / device_memory.processes_here()
        known = config.offload_device or config.onload_device
        home = DISK if pipeline.device.type == "cpu" or known == DISK or not room else "ram"
    return config_of(PartLayout(mode, storage, home), str(pipeline.device), computing)


def _states(pipeline, name: str, config: VramConfig):
    return read_states(config, device=pipeline.device, dtype=pipeline.dtype)


def _is_placeable(pipeline, name: str, config: VramConfig) -> bool:
    """Whether the part's files can be read piece by piece as `config` asks."""
    if part_loading.is_fixed(pipeline, name):
        return False
    part, module = pipeline.spec.parts[name], pipeline.parts.get(name)
    try:
        check_files(part, _states(pipeline, name, config))
        if module is not None and name not in pipeline.placements:
            find_units(module, part, pipeline.dtype)
    except Trouble:
        return False
    return True


def _could_leave(pipeline, name: str) -> bool:
    """Whether `name`, while it waits, has memory of the computing device that it need not have."""
    here = pipeline.placements.get(name)
    if here is not None:
        kept = [
            unit.stored
            for unit in here.units
            if unit.stored is not None and here.states.offload.device == pipeline.device
        ]
        nbytes = sum(one.private_bytes for one in kept)
    else:
        nbytes = 0 if part_placement.is_placed(pipeline, name) else _own_bytes(pipeline, name)
    return nbytes > 0 and _is_placeable(pipeline, name, _layout(pipeline, name, "parked"))


def _own_bytes(pipeline, name: str) -> int:
    """Of a part that is plainly loaded, what is on the device and no view of its file."""
    part = pipeline.spec.parts[name]
    fused = {key for one in pipeline.adapters.loaded if not one.hot.get(name, True) for key in one.names[name]}
    total = 0
    for key, weight in pipeline.parts[name].named_parameters():
        at = part.tensors.get(key)
        view = (
            at is not None and TORCH_DTYPES.get(at.dtype) == weight.dtype and key not in part.scales and not at.swapped
        )
        total += 0 if view and pipeline.device.type == "cpu" and key not in fused else weight.nbytes
    return total


def staying_of(pipeline, name: str) -> tuple[int, int]:
    """How many blocks the part has, and how many of them stay on the device while it is called; (0, 0) where it cannot
    be streamed."""
    here = pipeline.placements.get(name)
    if here is not None:
        return len(here.blocks), len(here.planned_resident_blocks())
    if part_loading.is_fixed(pipeline, name):
        return 0, 0
    try:
        units = find_units(pipeline.parts[name], pipeline.spec.parts[name], pipeline.dtype)
    except Trouble:
        return 0, 0
    count = sum(unit.block for unit in units)
    return count, len(pipeline.resident_blocks.get(name, range(count)))


def _frees_blocks(pipeline, name: str) -> bool:
    """Whether blocks that do not stay leave memory of the device free: on a CPU, views of the file take none."""
    if not _is_placeable(pipeline, name, _layout(pipeline, name, "streamed")):
        return False
    here = pipeline.placements.get(name)
    if pipeline.device.type != "cpu":
        return True
    if here is None:
        return part_placement.is_placed(pipeline, name) or _own_bytes(pipeline, name) > 0
    dtype = here.states.preparing.dtype or here.dtype
    pairs = [
        pair for unit in here.blocks for pair in zip(unit.raw.fields, stored_layout(unit, dtype).fields, strict=True)
    ]
    return any(raw.dtype != stored.dtype for raw, stored in pairs)


def _may_be_eighth(pipeline, name: str) -> bool:
    """Whether storing in FP8 is allowed and would change anything: what is fetched from disk comes in the file's own
    format."""
    here = pipeline.placements.get(name)
    if part_loading.is_fixed(pipeline, name) or name in pipeline.packed:
        return False
    if not pipeline.lower.allow_fp8 or (
        here is not None and here.states.onload.on_disk and not here.planned_resident_blocks()
    ):
        return False
    storages = (
        [] if here is None else [here.states.offload.dtype, here.states.onload.dtype, here.states.preparing.dtype]
    )
    return not any(dtype is not None and is_float8(dtype) for dtype in storages)


def _waits_in_ram(pipeline, name: str) -> bool:
    here = pipeline.placements.get(name)
    return here is not None and torch.device("cpu") in (here.states.offload.device, here.states.onload.device)


def called(name: str) -> str:
    """A part as notes speak of it."""
    return f"the {part_label(name)}"
