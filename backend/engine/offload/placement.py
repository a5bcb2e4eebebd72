"""Weight offload (VRAM management): where a part's weights are kept, and how they get to the computing device.

`place` takes a module (on meta, or loaded) and puts its weights where a `VramConfig` says, in DiffSynth's four states.
They are moved by units (`blocks`): repeated blocks are prefetched into a few reused buffers (`prefetch`, `transfer`),
straight from the user's own files where they stay on disk (block swap, sequential offload), also under autograd
(`autograd`).

What callers may rely on:

* `module.weight` of a managed layer always has the shape, dtype and device of the forward pass. Its *numbers* are
  there only while its block computes; in between it is all NaN and takes no memory, so that a use by mistake cannot go
  unseen. `placement.read(name)` returns a real copy, as the forward pass sees it (with FP8 storage: the stored
  number). `placement.of(module)` finds the placement.
* Adapters may be added to a placed module as hooks, as subclasses or as modules around its layers; names are looked up
  once, in `place`.
* Weights may be changed in place only while `placement.weights_writable` (all four states are the same); else a change
  would be lost.
* Do not call `module.to(...)` on a placed module, nor save its `state_dict()`.
* One pass over the blocks transfers each byte once, whatever the batch: put both branches of classifier-free guidance
  into one call.
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
from backend.engine.offload.autograd import OffloadedPass
from backend.engine.offload.block_storage import BlockStorage
from backend.engine.offload.blocks import Unit, convert, find_units, move_unmanaged, stored_layout
from backend.engine.offload.forward_hooks import Call, attach_hooks
from backend.engine.offload.prefetch import most_resident_blocks
from backend.engine.offload.transfer import (
    Layer,
    WeightTransfer,
    cast_before_storing_bytes,
    cast_bytes,
    find_layers,
    source_of,
)
from backend.engine.offload.vram_states import State, States, check_files, check_limit, read_states
from backend.schema.memory_plan import VramConfig

_PLACED = "_placement"  # the attribute of a placed module
_BETWEEN = "between"  # the level of a placement while it is moved, or where moving it failed half-way
STAGING = 2  # prefetch buffers: one block computes, the next is being fetched


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
    """Offloads `module`: puts its weights into the offload state of `config`. Its own tensors are dropped; `part` says
    which files hold them.

    `vram_limit_bytes`: as many blocks stay resident in the preparing state as fit when the weights, with prefetch
    buffers, take at most that much of the computing device; None: all blocks, 0: none. `resident`: the numbers of the
    resident blocks instead (a plan's choice).
    `device` computes where `config` names none, in the dtype of the file (bfloat16 for 8-bit files).
    `staging`: number of prefetch buffers, 2 or 3. `split_bytes`: larger blocks are moved in pieces, child by child.
    `reader` reads the files. `on_bytes(done, total)` reports progress in bytes. `stays_packed(name)`: whether a
    parameter of a block that its file stores quantized stays so in every state, and is dequantized for each use.
    Raises Trouble: "vram_config" for settings that contradict each other, "bad_device", "not_supported" for files that
    cannot be read tensor by tensor; OutOfMemoryError, after which the module can be placed again.
    """
    check_limit(vram_limit_bytes)
    states = read_states(config, device=device, dtype=_computation_dtype(part))
    check_files(part, states)
    units = find_units(module, part, states.computation.in_memory[0], split_bytes, stays_packed=stays_packed)
    placement = Placement(module, part, units, states, vram_limit_bytes, resident, staging, reader or Reader())
    try:
        placement._load(on_bytes)
    except BaseException:  # out of memory, or cancelled: nothing of it stays, and the module can be placed again
        placement.close()
        raise
    module.__dict__[_PLACED] = placement
    return placement


def _computation_dtype(part: PartSpec) -> torch.dtype:
    """The dtype of the files, where networks compute in it; else bfloat16."""
    stored = getattr(torch, part.storage, None)
    computes = isinstance(stored, torch.dtype) and stored.is_floating_point and not is_float8(stored)
    return stored if computes and stored is not None else torch.bfloat16


def of(module: nn.Module) -> Placement | None:
    """The placement of a module, if it has one."""
    return module.__dict__.get(_PLACED)


class Placement:
    """The offloaded weights of one module. Made by `place`.

    It begins at the level "offload"; `onload` before the part is called often, `offload` when it is not needed soon.
    The module may be called at either level.
    """

    def __init__(
        self,
        module: nn.Module,
        part: PartSpec,
        units: list[Unit],
        states: States,
        limit_bytes: int | None,
        resident: tuple[int, ...] | None,
        staging: int,
        reader: Reader,
    ):
        self.module, self.part, self.states, self.limit_bytes = module.eval(), part, states, limit_bytes
        self.level, self.resident, self.whole = "offload", resident, False
        self.dtype, self.device = states.computation.in_memory
        self.units = units
        self._by_name = {name: unit for unit in self.units for name in unit.names}
        self._reader = reader
        self._storage = BlockStorage(reader, self.device, part.nbytes)
        self.transfer = WeightTransfer(reader, self.device, self.dtype, staging)
        self._ending = weakref.finalize(self, self.transfer.prefetcher.shutdown_nowait)  # if dropped without `close`
        self._may_prepare: set[int] = set()  # positions of blocks that become resident when first used
        self.lock = threading.RLock()
        self.calls: list[Call] = []
        self.passes: set[OffloadedPass] = set()
        self.transfer.make_parameters(self.units)
        self.layers = find_layers(self.units)
        self._hooks = [] if self.weights_writable else attach_hooks(self)
        move_unmanaged(module, self.units, self.device)

    @property
    def blocks(self) -> list[Unit]:
        """The units that are streamed, in order."""
        return [unit for unit in self.units if unit.block]

    @property
    def weights_writable(self) -> bool:
        """Whether weights may be changed in place, as a fused LoRA does."""
        return self.states.resident and not any(unit.packed for unit in self.units)

    @property
    def moved_bytes(self) -> int:
        """Bytes transferred so far for streamed blocks."""
        return self.transfer.prefetcher.num_bytes

    def held_bytes(self) -> dict[str, int]:
        """Allocated bytes by purpose: "stored" (offloaded or resident; views of the mapped file count nothing),
        "staging" (prefetch and cast buffers)."""
        found = {id(one): one for unit in self.units for one in (unit.stored, unit.parked, unit.ready) if one}
        return {
            "stored": sum(stored.private_bytes for stored in found.values()),
            "staging": self.transfer.staging_bytes(),
        }

    def resident_blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks that are not streamed, as planned by the last `onload` or `offload`."""
        return tuple(index for index, unit in enumerate(self.blocks) if not self.transfer.streams(unit))

    def planned_resident_blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks that are to stay on the computing device at the level "onload"."""
        if self.states.onload.device == self.device:
            return tuple(range(len(self.blocks)))
        if self.resident is None and self.limit_bytes is not None:
            return self.resident_blocks()
        chosen = self._choose_resident()
        return tuple(index for index, unit in enumerate(self.blocks) if unit.position in chosen)

    def is_ready(self, name: str) -> bool:
        """Whether the parameter `name` is resident: holds its numbers not only while its block computes."""
        return name not in self._by_name or self._by_name[name].ready is not None

    def read(self, name: str) -> torch.Tensor:
        """A copy of the parameter `name` (dotted, as named when the module was placed), in the shape, dtype and device
        of the forward pass. Raises KeyError for a name that is in no unit."""
        unit = self._by_name[name]
        index = unit.names.index(name)
        with self.lock:
            if self.level == "onload":
                self.enter_use(unit)
            if unit.ready is not None and index not in unit.fp8_codes:
                return unit.ready.tensors[index].clone()
            source, field = source_of(unit), unit.computing.fields[index]
            kept = unit.stored.tensors[index] if unit.stored is not None else self._storage.read_one(unit, index)
            out = torch.empty(field.shape, dtype=field.dtype, device=self.device)
            convert(kept.to(self.device), out, source.factors[index], source.nonfinite[index])
            self._storage.finish()
            return out

    def onload(self) -> None:
        """Moves the weights into the onload state: the part will be called soon."""
        self._move_all("onload")

    def offload(self) -> None:
        """Moves the weights back into the offload state, and frees the prefetch and cast buffers."""
        self._move_all("offload")

    def set_casting(self, *, whole: bool, codes: Callable[[Unit], frozenset[int]]) -> None:
        """Offloads the part, and sets how its blocks are cast from now on.

        `whole`: all of a block's weights before it is called, as a compiled block needs them; else layer by layer,
        through a smaller buffer. `codes(unit)`: indices of tensors that their layers take as FP8 codes, without a cast
        (`fp8_matmul`).
        """
        self.offload()
        with self.lock:
            self.level = _BETWEEN
            self._release()
            for hook in self._hooks:
                hook.remove()
            self.whole, self.layers = whole, find_layers(self.units, whole)
            self._hooks = [] if self.weights_writable else attach_hooks(self)
            for unit in self.blocks:
                unit.fp8_codes = codes(unit)
                self._move(unit, self.states.offload)
            self._plan()
            self.level = "offload"

    def close(self) -> None:
        """Frees all memory, files and the reader thread; the module keeps its shapes, on the meta device."""
        with self.lock:
            if self.level == "closed":
                return
            self.level = "closed"
            for hook in self._hooks:
                hook.remove()
            self._release()
            self.transfer.close()
            self._ending.detach()
            for unit in self.units:
                unit.stored = unit.parked = unit.ready = None
            self.transfer.make_parameters(self.units, "meta")
            self._storage.finish()
            self._reader.close()
            self.module.__dict__.pop(_PLACED, None)

    def may_cast(self, layer: Layer) -> bool:
        """Whether any tensor of `layer` has to be cast in one of the states."""
        states = (self.states.offload, self.states.onload, self.states.preparing)
        layouts = [stored_layout(layer.unit, state.in_memory[0]) for state in states if not state.on_disk]
        return any(cast_bytes(layer, layout) for layout in (layer.unit.raw, *layouts))

    def enter_use(self, unit: Unit) -> bool:
        """Called before `unit` is used: moves it to the computing device if it is to stay there. Returns whether its
        weights must be fetched or cast for this use (`WeightTransfer.acquire`)."""
        if unit.ready is not None:
            return False
        if not unit.block:
            self._move(unit, self.states.computation)
        elif unit.position in self._may_prepare:
            self._move(unit, self.states.preparing)
            self._may_prepare.discard(unit.position)
            self._prefetch_next(unit)
        else:
            return True
        self._storage.finish()
        return unit.ready is None

    def _prefetch_next(self, unit: Unit) -> None:
        """Starts the transfer of the next block that is to stay, while `unit` computes."""
        position = min(self._may_prepare, key=lambda one: (one < unit.position, one), default=None)
        if position is not None:
            following = next(one for one in self.units if one.position == position)
            self._storage.prefetch(following, self.states.preparing, self.transfer.prefetcher.copy_async)

    def _load(self, on_bytes: Callable[[int, int], None] | None) -> None:
        done = 0
        for unit in self.units:
            self._move(unit, self.states.offload)
            done += sum(at.nbytes for at in unit.tensors)
            if on_bytes:
                on_bytes(done, self.part.nbytes)
        self._plan()
        if self.held_bytes()["stored"]:
            device_memory.empty_cache(self.device)  # what casting took

    def _move_all(self, level: str) -> None:
        with self.lock:
            assert self.level != "closed", "the placement was closed"
            if self.level == level:
                return
            self.level = _BETWEEN  # for as long as anything can raise: the next call continues where this one ended
            if not self.weights_writable:
                self._release()
                for unit in self.units:
                    self._move(unit, getattr(self.states, level))
                self._plan(level)
            self.level = level

    def _release(self) -> None:
        """Forgets calls and backward passes that raised, and frees all buffers."""
        for backward_pass in self.passes:
            backward_pass.held = False
        self.passes.clear()
        self.calls.clear()
        self.transfer.empty()
        self._storage.drop_prefetched()

    def _move(self, unit: Unit, state: State) -> None:
        """Moves the weights of `unit` into `state`. They become the modules' own (`unit.ready`) where they are on the
        computing device and need no cast; else the modules get placeholders."""
        was = unit.stored
        if was is not None and was.state == state:
            new = was
        elif unit.parked is not None and unit.parked.state == state:
            new = unit.parked
        else:
            new = self._storage.move(unit, state, was)
        if new is not None and state == self.states.offload:
            unit.parked = new
        elif unit.parked is not None and unit.parked.private_bytes and unit.parked.state.device == state.device:
            unit.parked = None
        unit.stored = new
        here = new if state.device == self.device else None
        casts = any(unit.casts(source_of(unit), index) for index in range(len(unit.names)))
        unit.ready = None if casts else here
        for index in range(len(unit.names)):
            self.transfer.unbind(unit, index)
        if here is not None:
            self.transfer.bind_uncast(unit, here.tensors)

    def _plan(self, level: str = "offload") -> None:
        """Decides which blocks become resident, and sizes the buffers for the streamed ones."""
        onloaded, preparing = level == "onload", self.states.preparing
        self._may_prepare = self._choose_resident() if onloaded else set()
        if onloaded and self.limit_bytes != 0 and preparing.device != self.device:
            for unit in self.blocks:  # takes no memory of the computing device
                self._move(unit, preparing)
        self._storage.finish()
        moving = [unit for unit in self.blocks if unit.ready is None and unit.position not in self._may_prepare]
        streamed = [unit for unit in moving if unit.stored is None or unit.stored.state.device != self.device]
        self.transfer.plan(streamed, self._cast_bytes(preparing if self._may_prepare else None))

    def _choose_resident(self) -> set[int]:
        """Positions of the blocks that may stay in the preparing state on the computing device."""
        preparing, blocks = self.states.preparing, self.blocks
        if preparing == self.states.onload or preparing.device != self.device:
            return set()
        if self.resident is not None:
            return {blocks[index].position for index in self.resident}
        if self.limit_bytes is None:
            return {unit.position for unit in blocks}
        dtype, _ = preparing.in_memory
        sizes = [stored_layout(unit, dtype).nbytes for unit in blocks]
        used = 0 if device_memory.is_ram(self.device) else device_memory.allocated(self.device)
        used += sum(unit.computing.nbytes for unit in self.units if not unit.block)
        used += self._cast_bytes(preparing) + cast_before_storing_bytes(blocks, dtype)
        fetched = max((source_of(unit).layout.nbytes for unit in blocks), default=0) * self.transfer.staging
        picked = most_resident_blocks(
            sizes, self.limit_bytes, lambda chosen: used + (fetched if chosen < len(blocks) else 0)
        )
        return {blocks[index].position for index in picked}

    def _cast_bytes(self, preparing: State | None) -> int:
        """Bytes of the cast buffer: of a block's largest layer, as blocks are stored now or will be in `preparing`."""
        largest = 0
        for layer in self.layers:
            if layer.unit.block and layer.unit.ready is None:
                layouts = [source_of(layer.unit).layout]
                layouts += [] if preparing is None else [stored_layout(layer.unit, preparing.in_memory[0])]
                largest = max(largest, *(cast_bytes(layer, layout) for layout in layouts))
        return largest
