"""Where weights lie, in which dtype, and the plan that says so before anything is loaded. Sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
DISK = "disk"
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class VramConfig:
    """The four states of a part's layers, each a dtype and a device.

    Devices are "cuda[:n]", "cpu", "mps", "xpu", "npu", and for the first three states also "disk" (dtype is then that
    of the file and the field's dtype is ignored). None means: as the next state towards computation. *offload*: the
    part is not called soon; *onload*: it may be called any time; *preparing*: on the way to computation, entered only
    while `vram_limit` leaves room; *computation*: only inside `forward`.
    """

    offload_dtype: str | None = None
    offload_device: str | None = None
    onload_dtype: str | None = None
    onload_device: str | None = None
    preparing_dtype: str | None = None
    preparing_device: str | None = None
    computation_dtype: str | None = None
    computation_device: str | None = None

    def to_values(self) -> dict[str, str | None]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def managed(self) -> bool:
        """Whether anything but plain residence was asked for."""
        return any(value is not None for value in self.to_values().values())


@dataclass(frozen=True)
class Card:
    """One device that computes, as probed. For a CPU, total and free are those of RAM (cgroup limits respected)."""

    device: str  # "cuda:0", "mps", "xpu:0", "npu:0", "cpu"
    name: str
    total_bytes: int
    free_bytes: int
    used_by_others_bytes: int = 0
    reserve_bytes: int = 0
    ram_total_bytes: int = 0
    ram_free_bytes: int = 0
    dtypes: tuple[str, ...] = DTYPES
    measured: bool = True  # False for a what-if card


@dataclass(frozen=True)
class PhasePlan:
    """One phase (text, encode, denoise, decode; step, sample, save): what lies where and how high it gets."""

    name: str
    weights_bytes: dict[str, int] = field(default_factory=dict)  # part -> bytes on the card
    working_bytes: int = 0
    adapter_bytes: int = 0  # LoRA, gradients and optimizer state
    staging_bytes: int = 0
    live_bytes: int = 0  # of tensors alive at once on the device: what a run measures
    moments: dict[str, int] = field(
        default_factory=dict
    )  # the same of what a step is made of: forward, backward, optimizer
    peak_low_bytes: int = 0  # the least pool that still runs
    peak_high_bytes: int = 0  # what the allocator is likely to reserve
    ram_bytes: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class PlanStep:
    """One rung that the planner took: a word for programs, a sentence for people, its price."""

    rung: str
    sentence: str
    slowdown: float = 1.0
    lossy: bool = False


@dataclass(frozen=True)
class Remedy:
    """A change with which a job that does not fit surely does."""

    words: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)  # knobs of the request or the run
    preferences: dict[str, Any] = field(default_factory=dict)
    freed_bytes: int = 0  # of what other programs hold
    ram_gib: float = 0.0  # of a machine with more RAM
    card_gib: float = 0.0  # of a larger card


@dataclass(frozen=True)
class PartLayout:
    """Where one part's weights are: always on the card, there in its phase, or block by block from `home`."""

    mode: str = "resident"  # "resident" | "parked" | "streamed"
    storage: str = "bfloat16"  # a dtype, or what is quantized how (`catalog.quantization.methods`)
    home: str = "ram"  # "ram" | "disk", of what is not on the card
    on_card: int = 0  # blocks that stay while the others are streamed
    whole: bool = False  # what a compiled block takes is cast all together
    codes: bool = False  # FP8 is multiplied with as it is


@dataclass(frozen=True)
class VramPlan:
    """What a job will need on a card and how its weights are to be placed so that it fits."""

    fits: bool
    verdict: str  # "green" | "amber" | "red"
    phases: tuple[PhasePlan, ...]
    layout: dict[str, PartLayout]  # part -> where its weights are, from which the rest follows
    configs: dict[str, VramConfig]  # part -> the same as four states
    vram_limit_gib: float | None
    resident_blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    streamed_blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tiled_vae: bool = False
    halves_apart: bool = False  # the two halves of guidance one after the other
    steps: tuple[PlanStep, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)  # training: knobs of the config that take this plan
    advice: str = ""
    remedy: Remedy | None = None  # what `advice` says, to be taken
    peak_live_bytes: int = 0
    peak_low_bytes: int = 0
    peak_high_bytes: int = 0
    ram_bytes: int = 0
    disk_bytes: int = 0
    disk: dict[str, int] = field(
        default_factory=dict
    )  # "model"; of training also one "result", "state" and cached "picture"
    disk_words: str = ""  # the same of training as a sentence
    seconds: tuple[float, float] = (0.0, 0.0)
