"""Devices and their memory: detection, free and total VRAM and RAM, peak, dtypes, emptying caches. Bytes throughout.

CUDA (ROCm builds use the same name), MPS, XPU, NPU and the CPU. Querying a card opens its context, so this runs in the
worker and in training, never in the studio.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import psutil
import torch

from backend.schema.memory_plan import DTYPES, GIB, Card
from backend.schema.messages import Trouble
from backend.system import dxgi

RAM = torch.device("cpu")
_ACCELERATORS = ("cuda", "xpu", "npu", "mps")


def default_device() -> str:
    """The first accelerator that is there, else "cpu"."""
    for kind in _ACCELERATORS:
        module = _module(kind)
        if module is not None and module.is_available():
            return kind if kind == "mps" else f"{kind}:0"
    return "cpu"


def check_device(device: str) -> torch.device:
    """`device` ("auto", "cpu", "cuda", "cuda:1", ...) as a torch.device, with an index where its kind has several.

    Raises Trouble("bad_device").
    """
    if str(device) in ("auto", ""):
        device = default_device()
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise Trouble(
            "bad_device", f"{device!r} is no device.", hint="Use auto, cpu, cuda:0, mps, xpu:0 or npu:0."
        ) from None
    if wanted.type == "cpu":
        return torch.device("cpu")
    module = _module(wanted.type)
    if module is None or not module.is_available():
        raise Trouble(
            "bad_device",
            f"This machine (or this build of torch) has no {wanted.type} device.",
            hint=f"Use {default_device()}: device= in a script, Device in the page's preferences.",
        )
    if wanted.type == "mps":
        return torch.device("mps")  # there is one
    index = wanted.index or 0
    if index >= module.device_count():
        raise Trouble(
            "bad_device", f"There is no {wanted.type}:{index}; the last is {wanted.type}:{module.device_count() - 1}."
        )
    return torch.device(wanted.type, index)


def probe(device: str | torch.device = "auto", *, reserve_bytes: int | None = None) -> Card:
    """The device as it is now: name, dtypes, total and free bytes. `reserve_bytes` to leave free; None: what a desktop
    usually needs. Raises Trouble("bad_device")."""
    device = check_device(str(device))
    ram_total, ram_free = ram()
    if device.type == "cpu":
        reserve = min(ram_total // 16, GIB) if reserve_bytes is None else reserve_bytes
        return Card(
            device="cpu",
            name=_cpu_name(),
            total_bytes=ram_total,
            free_bytes=ram_free,
            used_by_others_bytes=max(0, ram_total - ram_free - psutil.Process().memory_info().rss),
            reserve_bytes=reserve,
            ram_total_bytes=ram_total,
            ram_free_bytes=ram_free,
            dtypes=_dtypes(device),
        )
    total, free = card_memory(device)
    reserve = _usual_reserve(total) if reserve_bytes is None else reserve_bytes
    return Card(
        device=str(device),
        name=_card_name(device),
        total_bytes=total,
        free_bytes=free,
        used_by_others_bytes=max(0, total - free - reserved(device)),
        reserve_bytes=reserve,
        ram_total_bytes=ram_total,
        ram_free_bytes=ram_free,
        dtypes=_dtypes(device),
    )


def ram() -> tuple[int, int]:
    """Total and free bytes of RAM: the machine's, or this process's container's (cgroup) where that is less."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limit, used = _cgroup()
    if limit is not None and limit < total:
        total, free = limit, min(free, max(0, limit - used))
    return total, free


def is_ram(device: torch.device) -> bool:
    """Whether `device` is the CPU."""
    return device == RAM


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether `tensor` (of any shape) lies on `device`; a device without an index ("mps", "cuda") is any of its
    kind."""
    here = tensor.device
    return here.type == device.type and device.index in (None, here.index)


def processes_here() -> int:
    """Processes of one run on this machine, which share its RAM (torchrun and accelerate say so)."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said)) if said.isdigit() else 1


def _cgroup(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """Limit and use of the control group (version 2, then 1) in bytes; (None, 0) where there is none. File cache counts
    as free."""
    for limit_file, used_file, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (root / limit_file).read_text().strip()
            used = int((root / used_file).read_text())
            stat = (root / limit_file).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if not limit.isdigit() or int(limit) >= 2**60:
            return None, 0
        cached = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line).get(cache_name, "0")
        return int(limit), max(0, used - int(cached))
    return None, 0


def card_memory(device: torch.device) -> tuple[int, int]:
    """Total and free bytes (VRAM) of a card. Where a driver does not report what other processes use, free is what this
    process leaves. Raises RuntimeError where the card does not answer."""
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total, max(0, total - torch.mps.driver_allocated_memory())
    module = _accelerator(device)
    if hasattr(module, "mem_get_info"):
        try:
            free, total = module.mem_get_info(device)
            if sys.platform == "win32":
                budget = dxgi.budgets().get(_card_name(device)) or _windows_budget(total)
                free = min(free, budget - reserved(device))  # beyond it Windows spills into shared memory
            return total, max(0, free)
        except RuntimeError:
            pass  # some integrated XPUs have no such query
    total = module.get_device_properties(device).total_memory
    return total, max(0, total - module.memory_reserved(device))


def _windows_budget(total: int) -> int:
    """Dedicated memory that Windows lets one program have before it moves pages out: all but a sixteenth, at least 512
    MiB."""
    return total - max(512 * 2**20, total // 16)


def _usual_reserve(total: int) -> int:
    return min(int(0.6 * GIB), total // 8)


def _card_name(device: torch.device) -> str:
    if device.type == "mps":
        return "Apple GPU"
    return str(_accelerator(device).get_device_name(device))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine() or "CPU"


def _dtypes(device: torch.device) -> tuple[str, ...]:
    if device.type == "cpu":  # without the instructions bfloat16 is many times slower than float32
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() or sys.platform == "darwin"
        return tuple(name for name in DTYPES if name != "float16" and (fast or name != "bfloat16"))
    if device.type == "mps":
        return ("float32", "float16", "bfloat16")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0) and not torch.version.hip:
        return tuple(name for name in DTYPES if name != "bfloat16")
    return DTYPES


def best_dtype(device: str | torch.device, *, bears: Sequence[str] = ("bfloat16", "float16", "float32")) -> torch.dtype:
    """The dtype that networks compute in on `device`: the first of `bears` (names of the dtypes that a network can
    compute in) that the device is fast in, else float32."""
    dtypes = _dtypes(torch.device(device))
    return next((getattr(torch, name) for name in bears if name in dtypes), torch.float32)


def allocated(device: str | torch.device) -> int:
    """Bytes of live tensors on the device; for the CPU the process's resident memory."""
    device = torch.device(device)
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return _accelerator(device).memory_allocated(device)


def reserved(device: str | torch.device) -> int:
    """Bytes that this process holds on the device: live tensors, and what the caching allocator keeps for reuse."""
    device = torch.device(device)
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return _accelerator(device).memory_reserved(device)


class Peak:
    """Peak memory: the highest `allocated` in bytes since this was made.

    CUDA, XPU, NPU and Linux count it themselves; elsewhere `look()` has to be called often.
    """

    def __init__(self, device: str | torch.device):
        self.device = torch.device(device)
        self.highest_bytes = allocated(self.device)
        self._counter: Callable[[], int] = partial(allocated, self.device)
        module = _module(self.device.type)
        if module is not None and hasattr(module, "reset_peak_memory_stats"):
            module.reset_peak_memory_stats(self.device)
            self._counter = partial(module.max_memory_allocated, self.device)
        elif self.device.type == "cpu" and _reset_high_water():
            self._counter = _high_water

    def look(self) -> int:
        """The peak so far, in bytes."""
        self.highest_bytes = max(self.highest_bytes, self._counter())
        return self.highest_bytes


def _reset_high_water() -> bool:
    """Makes Linux count the peak resident memory (VmHWM) of this process anew; False where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _high_water() > 0
    except OSError:
        return False


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def empty_cache(device: str | torch.device) -> None:
    """Collects garbage and empties torch's caches, on the device and in RAM (pinned RAM too), for other programs."""
    gc.collect()
    module = _module(torch.device(device).type)
    if module is not None and hasattr(module, "empty_cache"):
        module.empty_cache()
    if can_pin(device):
        torch.accelerator.empty_host_cache()
    _trim()


def can_pin(device: str | torch.device) -> bool:
    """Whether copies to `device` from pinned RAM overlap with its computation."""
    return torch.device(device).type in ("cuda", "xpu")


def pinned(device: str | torch.device) -> int:
    """Bytes of RAM that this process has pinned for copies to `device`, as far as torch counts them."""
    if torch.device(device).type != "cuda":
        return 0
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def _trim() -> None:
    """Makes glibc return freed pages (malloc_trim); without it RSS after an unload stays near its peak."""
    if sys.platform != "linux":
        return
    import ctypes

    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library, which has no such call


def set_threads(count: int | None = None) -> None:
    """Sets torch's CPU threads: `count`, else OMP_NUM_THREADS, else one per physical core that this process may use."""
    if count is None and os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return  # torch has followed it already
    if count is None:
        allowed = (
            len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process(), "cpu_affinity") else os.cpu_count() or 1
        )
        count = min(psutil.cpu_count(logical=False) or allowed, allowed)
    torch.set_num_threads(max(1, count))


def _module(kind: str) -> ModuleType | None:
    """torch.cuda, torch.xpu, ...; None for the CPU and where the build has no such module."""
    return None if kind == "cpu" else getattr(torch, kind, None)


def _accelerator(device: torch.device) -> ModuleType:
    """The module of a device that is known to be there."""
    module = _module(device.type)
    assert module is not None, f"this build of torch has no {device.type}"
    return module
