"""Where a part's weights lie while it waits, and how they come to the computation: the four states of DiffSynth.

`place` takes a module (on meta, or loaded) and puts its weights where a `VramConfig` says. They are moved by units (`units.py`), blocks through a few
reused buffers ahead of time (`staging.py`), straight from the user's own file (`stream.py`), also under autograd (`held.py`).

What others may rely on:

* `module.weight` of a managed layer always has the shape, dtype and device of the computation. Its *numbers* are there only while its block
  computes; in between every number is NaN and takes no memory, so that a use by mistake cannot go unseen. A real tensor is given by
  `placement.read(name)` (a copy of its own, as the computation sees it: with FP8 storage, the stored number). `placement.of(module)` finds the placement.
* Adapters may be added to a placed module as hooks, as subclasses or as modules around its layers; names are looked up once, in `place`.
* Weights may be changed in place only while `placement.changeable`, i.e. when all four states are the same; else a change would be lost.
* Do not call `module.to(...)` on a placed module, nor save its `state_dict()`.
* One pass over the blocks moves each byte once, whatever the batch: put both halves of classifier-free guidance into one call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch import nn

from backend.catalog.spec import PartSpec
from backend.engine.devices import device_memory
from backend.engine.loading.disk_reader import Reader
from backend.engine.loading.fp8_storage import is_float8
from backend.engine.offload.autograd import Pass
from backend.engine.offload.block_storage import Residence
from backend.engine.offload.blocks import Unit, convert, find_units, move_others, stored_layout
from backend.engine.offload.forward_hooks import Call, watch
from backend.engine.offload.prefetch import most_that_fit
from backend.engine.offload.transfer import Layer, Motion, cast_bytes, cast_on_the_way, find_layers, source_of
from backend.engine.offload.vram_states import State, States, check_files, check_limit, read_states
from backend.schema.memory_plan import VramConfig

_PLACED = "_placement"  # the attribute of a placed module
_BETWEEN = "between"  # the level of a placement that is being moved, or could not be moved whole
STAGING = 2  # buffers that blocks are fetched into: one computes, the next arrives


def place(
    module: nn.Module,
    part: PartSpec,
    config: VramConfig,
    *,
    vram_limit_bytes: int | None = None,
    device: torch.device | str,
    resident: tuple[int, ...] | None = None,
    staging: int = STAGING,
    split_bytes: int | None = None,
    reader: Reader | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
    stays_packed: Callable[[str], bool] | None = None,
) -> Placement:
    """Puts the weights of `module` into their offload state. The module's own are dropped; `part` says where they are stored.

    `vram_limit_bytes`: how much of the computing device this part's weights, staging included, may take for blocks to wait in the preparing
    state; None: all blocks may, 0: none. `resident`: numbers of the blocks that may instead (a plan's choice). `device` computes where `config` names none, in the dtype of the file (bfloat16 for 8-bit files).
    `staging`: buffers for fetched blocks, 2 or 3. `split_bytes`: larger blocks move in pieces, child by child. `reader` reads files. `on_bytes(done, total)` is told of progress. `stays_packed(name)`:
    whether a parameter of a block that its file stores quantized waits so in every state, and is dequantized each time it is used. Raises Trouble for a setting that makes no sense.
    """
    check_limit(vram_limit_bytes)
    stored = getattr(torch, part.storage, None)
    known = isinstance(stored, torch.dtype) and stored.is_floating_point and not is_float8(stored)
    states = read_states(config, device=device, dtype=stored if known else torch.bfloat16)
    check_files(part, states)
    units = find_units(module, part, states.computation.dtype, split_bytes, stays_packed=stays_packed)
    placement = Placement(module, part, units, states, vram_limit_bytes, resident, staging, reader or Reader())
    try:
        placement._fill(on_bytes)
    except BaseException:  # no memory, or cancelled: nothing of it stays, and the module can be placed again
        placement.close()
        raise
    module.__dict__[_PLACED] = placement
    return placement


def of(module: nn.Module) -> Placement | None:
    """The placement of a module, if it has one."""
    return module.__dict__.get(_PLACED)


class Placement:
    """The weights of one placed module. Made by `place`; begins in the offload state, in which the module may be called as well."""

    def __init__(
        self,
        module: nn.Module,
        part: PartSpec,
        units: list[Unit],
        states: States,
        limit,
        resident,
        staging: int,
        reader: Reader,
    ):
        self.module, self.part, self.states, self.limit_bytes = module.eval(), part, states, limit
        self.level, self.resident, self.whole = "offload", resident, False
        self.device, self.dtype = states.computation.device, states.computation.dtype
        self.units = units
        self._by_name = {name: unit for unit in self.units for name in unit.names}
        self._reader = reader
        self._residence = Residence(reader, self.device, part.nbytes)
        self.motion = Motion(reader, self.device, self.dtype, staging)
        self._ending = weakref.finalize(self, self.motion.fetcher.abandon)  # where nobody closes it
        self._may_prepare: set[int] = set()
        self.lock = threading.RLock()
        self.calls: list[Call] = []
        self.passes: set[Pass] = set()
        self.motion.make_parameters(self.units)
        self.layers = find_layers(self.units)
        self._hooks = [] if self.changeable else watch(self)
        move_others(module, self.units, self.device)

    @property
    def blocks(self) -> list[Unit]:
        """The units that are streamed, in order."""
        return [unit for unit in self.units if unit.block]

    @property
    def changeable(self) -> bool:
        """Whether weights may be changed in place, as a fused LoRA does."""
        return self.states.resident and not any(unit.packed for unit in self.units)

    @property
    def moved_bytes(self) -> int:
        """Bytes fetched so far for blocks that do not stay."""
        return self.motion.fetcher.num_bytes

    def held_bytes(self) -> dict[str, int]:
        """Private bytes by purpose: "stored" (waiting or staying; views of the mapped file count nothing), "staging"."""
        found = {id(one): one for unit in self.units for one in (unit.stored, unit.parked, unit.ready) if one}
        return {
            "stored": sum(stored.private_bytes for stored in found.values()),
            "staging": self.motion.staging_bytes(),
        }

    def resident_blocks(self) -> tuple[int, ...]:
        """The numbers of the blocks that need not be fetched, as far as they have been used."""
        return tuple(index for index, unit in enumerate(self.blocks) if not self.motion.streams(unit))

    def staying(self) -> tuple[int, ...]:
        """The numbers of the blocks that are to stay on the computing device while the part is called."""
        if self.states.onload.device == self.device:
            return tuple(range(len(self.blocks)))
        if self.resident is None and self.limit_bytes is not None:
            return self.resident_blocks()
        chosen = self._choose()
        return tuple(index for index, unit in enumerate(self.blocks) if unit.position in chosen)

    def is_ready(self, name: str) -> bool:
        """Whether the parameter `name` holds its numbers for good, and not only while its block computes."""
        return name not in self._by_name or self._by_name[name].ready is not None

    def read(self, name: str) -> torch.Tensor:
        """A copy of the parameter `name` (dotted, the module's name for it when it was placed), as the computation sees it, on its device."""
        unit = self._by_name[name]
        index = unit.names.index(name)
        with self.lock:
            if self.level == "onload":
                self.enter_use(unit)
            if unit.ready is not None and index not in unit.codes:
                return unit.ready.tensors[index].clone()
            source, field = source_of(unit), unit.computing.fields[index]
            kept = unit.stored.tensors[index] if unit.stored is not None else self._residence.read_one(unit, index)
            out = torch.empty(field.shape, dtype=field.dtype, device=self.device)
            convert(kept.to(self.device), out, source.factors[index], source.special[index])
            self._residence.finish()
            return out

    def onload(self) -> None:
        """The part will be called any time."""
        self._settle("onload")

    def offload(self) -> None:
        """The part is not called soon: staging, and whatever is nearer than the offload state, is given back."""
        self._settle("offload")

    def arrange(self, *, whole: bool, codes: Callable[[Unit], frozenset[int]]) -> None:
        """How blocks are used from now on; parks the part. `whole`: a block's weights come, and are cast, all together before it is called,
        as a compiled block needs them, else layer by layer through a smaller buffer. `codes`: which tensors a layer takes as FP8 codes."""
        self.offload()
        with self.lock:
            self.level = _BETWEEN
            self._let_go()
            for hook in self._hooks:
                hook.remove()
            self.whole, self.layers = whole, find_layers(self.units, whole)
            self._hooks = [] if self.changeable else watch(self)
            for unit in self.blocks:
                unit.codes = codes(unit)
                self._enter(unit, self.states.offload)
            self._plan()
            self.level = "offload"

    def close(self) -> None:
        """Gives everything back, open files and the reading thread included; the module keeps its shapes, on the meta device."""
        with self.lock:
            if self.level == "closed":
                return
            self.level = "closed"
            for hook in self._hooks:
                hook.remove()
            self._let_go()
            self.motion.close()
            self._ending.detach()
            for unit in self.units:
                unit.stored = unit.parked = unit.ready = None
            self.motion.make_parameters(self.units, "meta")
            self._residence.finish()
            self._reader.close()
            self.module.__dict__.pop(_PLACED, None)

    def may_cast(self, layer: Layer) -> bool:
        """Whether anything of `layer` has to be cast in any of the states."""
        states = (self.states.offload, self.states.onload, self.states.preparing)
        layouts = [stored_layout(layer.unit, state.dtype) for state in states if not state.on_disk]
        return any(cast_bytes(layer, layout) for layout in (layer.unit.raw, *layouts))

    def enter_use(self, unit: Unit) -> bool:
        """`unit` is about to be used: what may stay on the computing device is brought there now. Answers whether its weights do not stay
        as the computation takes them, so that they have to be held while in use."""
        if unit.ready is not None:
            return False
        if not unit.block:
            self._enter(unit, self.states.computation)
        elif unit.position in self._may_prepare:
            self._enter(unit, self.states.preparing)
            self._may_prepare.discard(unit.position)
            self._begin_next(unit)
        else:
            return True
        self._residence.finish()
        return unit.ready is None

    def _begin_next(self, unit: Unit) -> None:
        """The next block that is to stay comes while `unit` computes."""
        position = min(self._may_prepare, key=lambda one: (one < unit.position, one), default=None)
        if position is not None:
            following = next(one for one in self.units if one.position == position)
            self._residence.begin(following, self.states.preparing, self.motion.fetcher.send)

    def _fill(self, on_bytes: Callable[[int, int], None] | None) -> None:
        done = 0
        for unit in self.units:
            self._enter(unit, self.states.offload)
            done += sum(at.nbytes for at in unit.tensors)
            if on_bytes:
                on_bytes(done, self.part.nbytes)
        self._plan()
        if self.held_bytes()["stored"]:
            device_memory.give_back(self.device)  # what converting took

    def _settle(self, level: str) -> None:
        with self.lock:
            assert self.level != "closed", "the placement was closed"
            if self.level == level:
                return
            self.level = _BETWEEN  # for as long as anything can fail: the next try begins where this one ended
            if not self.changeable:
                self._let_go()
                for unit in self.units:
                    self._enter(unit, getattr(self.states, level))
                self._plan(level)
            self.level = level

    def _let_go(self) -> None:
        """Nothing is held any more, neither by calls nor by passes that raised, and no buffer is kept."""
        for way_back in self.passes:
            way_back.held = False
        self.passes.clear()
        self.calls.clear()
        self.motion.empty()
        self._residence.forget()

    def _enter(self, unit: Unit, state: State) -> None:
        """Brings the weights of `unit` into `state`, and gives them to the modules for good where that is how the computation takes them."""
        was = unit.stored
        if was is not None and was.state == state:
            new = was
        elif unit.parked is not None and unit.parked.state == state:
            new = unit.parked
        else:
            new = self._residence.bring(unit, state, was)
        if new is not None and state == self.states.offload:
            unit.parked = new
        elif unit.parked is not None and unit.parked.private_bytes and unit.parked.state.device == state.device:
            unit.parked = None
        unit.stored = new
        here = new is not None and state.device == self.device
        casts = any(unit.casts(source_of(unit), index) for index in range(len(unit.names)))
        unit.ready = new if here and not casts else None
        for index in range(len(unit.names)):
            self.motion.unbind(unit, index)
        if here:
            self.motion.bind_uncast(unit, new.tensors)

    def _plan(self, level: str = "offload") -> None:
        """Decides which blocks may stay on the computing device, and makes the buffers for the others."""
        onloaded, preparing = level == "onload", self.states.preparing
        self._may_prepare = self._choose() if onloaded else set()
        if onloaded and self.limit_bytes != 0 and preparing.device != self.device:
            for unit in self.blocks:  # takes no memory of the computing device
                self._enter(unit, preparing)
        self._residence.finish()
        moving = [unit for unit in self.blocks if unit.ready is None and unit.position not in self._may_prepare]
        streamed = [unit for unit in moving if unit.stored is None or unit.stored.state.device != self.device]
        self.motion.plan(streamed, self._cast_bytes(preparing if self._may_prepare else None))

    def _choose(self) -> set[int]:
        """Positions of the blocks that may enter the preparing state on the computing device."""
        preparing, blocks = self.states.preparing, self.blocks
        if preparing == self.states.onload or preparing.device != self.device:
            return set()
        if self.resident is not None:
            return {blocks[index].position for index in self.resident}
        if self.limit_bytes is None:
            return {unit.position for unit in blocks}
        sizes = [stored_layout(unit, preparing.dtype).nbytes for unit in blocks]
        used = 0 if device_memory.is_ram(self.device) else device_memory.allocated(self.device)
        used += sum(unit.computing.nbytes for unit in self.units if not unit.block)
        used += self._cast_bytes(preparing) + cast_on_the_way(blocks, preparing.dtype)
        fetched = max((source_of(unit).layout.nbytes for unit in blocks), default=0) * self.motion.staging
        picked = most_that_fit(sizes, self.limit_bytes, lambda chosen: used + (fetched if chosen < len(blocks) else 0))
        return {blocks[index].position for index in picked}

    def _cast_bytes(self, preparing: State | None) -> int:
        """What casting the largest layer of a block takes, as blocks are stored now or will be stored in `preparing`."""
        largest = 0
        for layer in self.layers:
            if layer.unit.block and layer.unit.ready is None:
                layouts = [source_of(layer.unit).layout]
                layouts += [] if preparing is None else [stored_layout(layer.unit, preparing.dtype)]
                largest = max(largest, *(cast_bytes(layer, layout) for layout in layouts))
        return largest
