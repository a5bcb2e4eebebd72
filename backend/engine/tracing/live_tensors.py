"""What a job really takes: bytes of tensors alive on the device, weights included, the highest of each phase.

CUDA, XPU and NPU count that themselves. Elsewhere operations are looked at as they run: what each makes is counted
until it is dropped. Looking costs some microseconds an operation, so it rests where a step is like the one before. The
process's own size is no measure: it has the libraries in it, and pages that the system's allocator keeps.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backend.engine.devices import device_memory
from backend.engine.lora.side_branch import STATE
from backend.engine.offload import placement
from backend.engine.tracing import forward_calls

STEPS_SEEN = 2  # of the steps of a picture; the first may fill tables that the others find


def weight_bytes(modules: Mapping[str, object], device: torch.device) -> int:
    """Bytes of the parameters and buffers of `modules` that lie on `device`, and in RAM of the buffers that blocks are
    fetched into (they are mappings there, which no operation makes)."""
    return _staging_bytes(modules, device) + _sum(_weights(modules, device), device)


def _weights(modules: Mapping[str, object], device: torch.device) -> list[torch.Tensor]:
    return [
        one for module in modules.values() if isinstance(module, torch.nn.Module) for one in _of_module(module, device)
    ]


def _of_module(module: torch.nn.Module, device: torch.device) -> list[torch.Tensor]:
    placed = placement.of(module)
    if placed is None or placed.weights_writable:
        return [*module.parameters(), *module.buffers(), *forward_calls.tables(module)]
    stored = [unit.stored.tensors for unit in placed.units if unit.stored and unit.stored.state.device == device]
    trained = [weight for weight in module.parameters() if weight.requires_grad]  # adapters, which no placement moves
    return [*forward_calls.tables(module), *trained, *(tensor for tensors in stored for tensor in tensors)]


def _staging_bytes(modules: Mapping[str, object], device: torch.device) -> int:
    placed = [placement.of(module) for module in modules.values() if isinstance(module, torch.nn.Module)]
    away = [one for one in placed if one is not None and not one.weights_writable]
    return sum(one.transfer.staging_bytes() for one in away) if device.type == "cpu" else 0


def _sum(tensors: Iterable[torch.Tensor], device: torch.device, *, but: Mapping[int, object] | None = None) -> int:
    """Bytes of `tensors` on `device`, each place once, without storages in `but`."""
    here = [
        one for one in tensors if device_memory.is_on(one, device) and one.untyped_storage()._cdata not in (but or {})
    ]
    return sum({one.data_ptr(): one.nbytes for one in here}.values())


def adapter_bytes(modules: Mapping[str, object]) -> int:
    """Bytes of the LoRAs that act beside layers of `modules`."""
    branches = [
        layer.__dict__[STATE]
        for module in modules.values()
        if isinstance(module, torch.nn.Module)
        for layer in module.modules()
        if STATE in layer.__dict__
    ]
    return sum(one.nbytes for each in branches for one in (each.down, each.up, *each.added.values()) if one is not None)


def in_use(device: torch.device) -> dict:
    """What there is of `device` and RAM now: bytes in all, free, held by this process (`used`), of its live tensors
    (`allocated`; on a CPU nobody counts those), and used by others."""
    card = device_memory.probe(device)
    return {
        "device": card.device,
        "total_bytes": card.total_bytes,
        "free_bytes": card.free_bytes,
        "used_bytes": device_memory.reserved(device),
        "allocated_bytes": device_memory.allocated(device) if device.type != "cpu" else 0,
        "used_by_others_bytes": card.used_by_others_bytes,
        "ram_total_bytes": card.ram_total_bytes,
        "ram_free_bytes": card.ram_free_bytes,
    }


class Measurable(Protocol):
    """What measuring uses of a `Pipeline`."""

    parts: dict[str, Any]
    device: torch.device
    on_phase: Callable[[str], None] | None


@contextlib.contextmanager
def measuring(pipeline: Measurable, *, known_bytes: int = 0, looks: bool = True) -> Iterator[Measure]:
    """Measures the peak memory of `pipeline` while this is open. `known_bytes`: the same job's peak as measured before;
    then nothing is measured where measuring costs time. Nor is it without `looks`: compiled blocks cannot be traced."""
    peak = Measure(pipeline.parts, pipeline.device, known_bytes=known_bytes, looks=looks)
    pipeline.on_phase = peak.phase
    try:
        yield peak
    finally:
        pipeline.on_phase = None
        peak.end()


class Measure:
    """Peak memory: the highest bytes of live tensors in each phase of a job. Enter a phase by `phase(name)`, call
    `step()` after each step, `end()` at the end.

    `beside` lists tensors on the device besides those of `modules` that were allocated while nothing was measured,
    such as an optimizer's state.
    """

    def __init__(
        self,
        modules: Mapping[str, object],
        device: torch.device | str,
        *,
        known_bytes: int = 0,
        looks: bool = True,
        beside: Callable[[], Iterable[torch.Tensor]] = tuple,
    ):
        self.modules, self.device, self.beside = modules, torch.device(device), beside
        self.by_phase: dict[str, int] = {}
        self._name, self._kept_bytes, self._steps = "", 0, 0
        counts = self.device.type != "cpu" and hasattr(torch.get_device_module(self.device), "max_memory_allocated")
        self._counter = torch.get_device_module(self.device) if counts else None
        self._seen = None if counts else _Seen(self.device)
        self._known_bytes = 0 if counts else known_bytes
        self._blind = not counts and (known_bytes > 0 or not looks)

    @property
    def is_free(self) -> bool:
        """Whether the device counts its peak itself (`max_memory_allocated`), so that measuring costs nothing."""
        return self._counter is not None

    @property
    def highest_bytes(self) -> int:
        self._look()
        return self._known_bytes or max(self.by_phase.values(), default=0)

    @property
    def highest_phase(self) -> str:
        return max(self.by_phase, key=lambda name: self.by_phase[name], default="")

    def phase(self, name: str) -> None:
        """The phase `name` begins, its parts being on their device; "": the phase has ended."""
        if self._blind:
            return
        self._look()
        self._name, self._steps = name, 0
        if not name:
            return
        if self._counter is not None:
            self._counter.reset_peak_memory_stats(self.device)
            return
        self._kept_bytes = 0
        if self._seen is not None:
            self._seen.highest = self._seen.now
            self._seen.watch()

    def step(self) -> None:
        self._steps += 1
        if self._steps == STEPS_SEEN and self._seen is not None:
            self._look()
            self._seen.rest()

    def end(self) -> None:
        self._look()
        if self._seen is not None:
            self._seen.rest()
        self._name = ""

    def _look(self) -> None:
        if not self._name:
            return
        if self._seen is None:
            found = self._counter.max_memory_allocated(self.device) if self._counter is not None else 0
        else:
            found = self._kept(self._seen) + self._seen.highest
        self.by_phase[self._name] = max(self.by_phase.get(self._name, 0), found)

    def _kept(self, seen: _Seen) -> int:
        """Bytes of weights and LoRAs; resident blocks are loaded when they are first used."""
        if seen.watching:
            tensors = [*_weights(self.modules, self.device), *self.beside()]
            kept = _staging_bytes(self.modules, self.device) + adapter_bytes(self.modules)
            self._kept_bytes = max(self._kept_bytes, kept + _sum(tensors, self.device, but=seen.alive))
        return self._kept_bytes


class _Seen(TorchDispatchMode):
    """Bytes that operations made on `device` while this was watching, and that are alive."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.watching = device, False
        self.now = self.highest = 0
        self.alive: dict[int, tuple[weakref.ref, int]] = {}  # by storage
        self._lock = threading.RLock()  # what one thread made another may drop

    def watch(self) -> None:
        if not self.watching:
            self.watching = True
            self.__enter__()

    def rest(self) -> None:
        if self.watching:
            self.watching = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for one in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(one, torch.Tensor) or not device_memory.is_on(one, self.device):
                continue
            storage = one.untyped_storage()
            if storage._cdata not in self.alive:
                given = given or set(_storages(args))
                if storage._cdata not in given:  # else a view of what was there before
                    self._made(storage)
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        with self._lock:
            self.alive[key] = weakref.ref(storage, lambda _: self._dropped(key)), nbytes
            self.now += nbytes
            self.highest = max(self.highest, self.now)

    def _dropped(self, key: int) -> None:
        with self._lock:
            self.now -= self.alive.pop(key)[1]


def _storages(value) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()._cdata
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _storages(one)
