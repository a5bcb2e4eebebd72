"""What computes here and how much memory it has, without torch: NVIDIA through NVML, AMD through sysfs, Apple and CPU
through psutil.

No CUDA context is opened: NVML reads what the driver knows.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

import psutil

from backend.schema.memory_plan import DTYPES, Card
from backend.system import dxgi

MPS_DTYPES = ("float32", "float16", "bfloat16")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


class HostMemory(TypedDict):
    """What every card's entry says of the machine around it, in bytes."""

    ram_total_bytes: int
    ram_free_bytes: int
    reserve_bytes: int


def probe(*, reserve_bytes: int = 0, own_pids: Iterable[int] = ()) -> tuple[Card, ...]:
    """The devices of this machine, the one to use first; the CPU where there is no other.

    `reserve_bytes` is what a preference keeps free; memory of `own_pids` does not count as used by others. Takes a few
    milliseconds and may be called every second.
    """
    ram_total, ram_free = ram()
    memory: HostMemory = {
        "ram_total_bytes": ram_total,
        "ram_free_bytes": ram_free,
        "reserve_bytes": reserve_bytes,
    }
    cards = _nvidia(memory, frozenset(own_pids)) or _amd(memory) or _apple(memory)
    return cards or (Card("cpu", cpu_name(), ram_total, ram_free, dtypes=cpu_dtypes(), **memory),)


def choose(cards: tuple[Card, ...], device: str) -> Card:
    """The card that the preference `device` means: "auto" is the first; "cpu" exists on every machine."""
    for card in cards:
        if device in ("auto", "", card.device) or card.device.split(":")[0] == device:
            return card
    first = cards[0]
    ram_total, ram_free = first.ram_total_bytes, first.ram_free_bytes
    return Card("cpu", cpu_name(), ram_total, ram_free, 0, 0, ram_total, ram_free, cpu_dtypes())


def training_environment(device: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that put the preferred `device` first among those that a child process sees, so that its index 0 is
    that one and further processes take the others. `device` as in `choose`; "auto" changes nothing, "cpu" hides every
    accelerator."""
    environment = os.environ if environment is None else environment
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    names = VISIBLE_DEVICES.get(kind, ())
    if not index.isdigit() or not names:
        return {}
    name = next((one for one in names if environment.get(one)), names[0])
    seen = [entry.strip() for entry in environment.get(name, "").split(",") if entry.strip()]
    if not seen:
        count = sum(card.device.partition(":")[0] == kind for card in probe())
        seen = [str(number) for number in range(max(count, int(index) + 1))]
    if int(index) >= len(seen):
        return {}
    first = seen.pop(int(index))
    return {name: ",".join([first, *seen])}


# By kind of device: the variables that say which devices a process sees, the first being what is set where none is.
# ROCm's builds call theirs "cuda" and read both.
VISIBLE_DEVICES = {"cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "xpu": ("ZE_AFFINITY_MASK",)}


def _nvidia(memory: HostMemory, own_pids: frozenset[int]) -> tuple[Card, ...]:
    """NVIDIA cards in the order of their PCI addresses, narrowed by CUDA_VISIBLE_DEVICES as CUDA does."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library, a driver that was updated under a running system: all mean no card
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        order = visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
        budgets = dxgi.budgets()
        return tuple(
            _nvidia_card(pynvml, handles[at], f"cuda:{n}", memory, own_pids, budgets) for n, at in enumerate(order)
        )
    except pynvml.NVMLError:
        return ()
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nvidia_card(
    pynvml, handle, device: str, memory: HostMemory, own_pids: frozenset[int], budgets: dict[str, int]
) -> Card:
    info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    own = 0
    with contextlib.suppress(pynvml.NVMLError):
        for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if entry.pid in own_pids and entry.usedGpuMemory:  # Windows does not tell it
                own += entry.usedGpuMemory
    name, total, free = _text(pynvml.nvmlDeviceGetName(handle)), int(info.total), int(info.free)
    others = max(0, total - free - own)
    if name in budgets:  # Windows lets one program have no more than this
        others, free = max(others, total - budgets[name]), min(free, budgets[name])
    dtypes = DTYPES
    with contextlib.suppress(pynvml.NVMLError, AttributeError):
        if tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) < (8, 0):
            dtypes = tuple(one for one in DTYPES if one != "bfloat16")
    return Card(device, name, total, free, used_by_others_bytes=others, dtypes=dtypes, **memory)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible(uuids: list[str], setting: str | None) -> list[int]:
    """Positions in `uuids` that CUDA_VISIBLE_DEVICES=`setting` leaves, in its order; the list ends at the first wrong
    entry."""
    if setting is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in (part.strip() for part in setting.split(",")):
        found = [at for at, uuid in enumerate(uuids) if word == str(at) or (word and uuid.startswith(word))]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def _amd(memory: HostMemory, sysfs: Path = Path("/sys/class/drm"), kfd: Path = Path("/dev/kfd")) -> tuple[Card, ...]:
    """AMD cards that ROCm can use; torch calls them cuda too."""
    if not kfd.exists():
        return ()
    cards = []
    for folder in sorted(sysfs.glob("card[0-9]*/device/mem_info_vram_total")):
        total = _number(folder)
        used = _number(folder.with_name("mem_info_vram_used"))
        if total and used is not None:
            name = _line(folder.with_name("product_name")) or "AMD GPU"
            cards.append(
                Card(f"cuda:{len(cards)}", name, total, total - used, used_by_others_bytes=used, **memory),
            )
    return tuple(cards)


def _apple(memory: HostMemory) -> tuple[Card, ...]:
    """Apple silicon: the card's memory is the RAM."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return ()
    total, free = memory["ram_total_bytes"], memory["ram_free_bytes"]
    return (Card("mps", cpu_name(), total, free, dtypes=MPS_DTYPES, **memory),)


def cpu_name() -> str:
    """What the processor calls itself, with the number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    elif sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(asked, capture_output=True, text=True, timeout=5).stdout.strip() or name
    count = _usable_cores()
    return f"{name or 'CPU'} ({count} core{'s' if count != 1 else ''})"


def cpu_dtypes(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """In what networks can compute here, as the engine chooses: bfloat16 where the processor multiplies it, float16
    nowhere."""
    fast = sys.platform == "darwin"
    if sys.platform == "linux":
        flags = next((line for line in _text_of(cpuinfo).splitlines() if line.startswith("flags")), "").split()
        fast = "avx512_bf16" in flags or "amx_tile" in flags
    return tuple(name for name in DTYPES if name != "float16" and (fast or name != "bfloat16"))


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ram() -> tuple[int, int]:
    """(total, free) bytes of memory for this process: of the machine, or of the container if that allows less."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    if sys.platform == "linux":
        for limit, used in _cgroup_limits(Path("/proc/self/cgroup"), _CGROUP):
            total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _cgroup_limits(membership: Path, root: Path) -> Iterable[tuple[int, int]]:
    """(limit, used) bytes of every control group above this process that limits memory; versions 1 and 2.

    Pages of files that can be dropped at once do not count as used.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_upwards(root / "memory", path, *names)
        elif controllers == "":
            yield from _limits_upwards(root, path, "memory.max", "memory.current", "inactive_file")


def _limits_upwards(root: Path, path: str, limit_name: str, used_name: str, cache_name: str):
    folder = root / path.lstrip("/")
    if not folder.is_dir():  # inside a container the group is mounted at the root
        folder = root
    while folder == root or root in folder.parents:
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < _UNLIMITED_BYTES:
            yield limit, max(0, used - _cached(folder / "memory.stat", cache_name))
        folder = folder.parent


def _cached(stat: Path, name: str) -> int:
    try:
        rows = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name), 0)


def _line(path: Path) -> str:
    return _text_of(path).strip()


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number in a small file; None for a file that is not there or says "max"."""
    text = _line(path)
    return int(text) if text.isdigit() else None
