"""The four VRAM states of weights (offload, onload, preparing, computation), read from a `VramConfig` and checked.

The rank of a state says how near to computation it is: disk, then RAM, then the computing device. From offload to
computation the rank may only grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from backend.catalog.spec import PartSpec
from backend.engine.devices import device_memory
from backend.engine.loading.fp8_storage import is_float8
from backend.schema.memory_plan import DISK, DTYPES, VramConfig
from backend.schema.messages import Trouble

LEVELS = ("offload", "onload", "preparing", "computation")
ACCELERATORS = ("cuda", "mps", "xpu", "npu")
MAPPED_SUFFIXES = (".safetensors", ".gguf", ".sft")  # formats whose tensors lie in the file as they are
CONVERT = "python -m backend lora to_safetensors {path}"


@dataclass(frozen=True)
class State:
    """A device and a dtype that weights are stored in. On disk the dtype is the file's, and both are None."""

    dtype: torch.dtype | None
    device: torch.device | None  # None: disk

    @property
    def on_disk(self) -> bool:
        return self.device is None

    @property
    def in_memory(self) -> tuple[torch.dtype, torch.device]:
        """dtype and device of a state that is not on disk."""
        assert self.dtype is not None and self.device is not None, "this state is on disk"
        return self.dtype, self.device

    @property
    def rank(self) -> int:
        """0 disk, 1 RAM, 2 accelerator."""
        return 0 if self.device is None else 1 if device_memory.is_ram(self.device) else 2

    def __str__(self) -> str:
        return DISK if self.on_disk else f"{str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True)
class States:
    """All four states, complete. `computation` is never on disk."""

    offload: State
    onload: State
    preparing: State
    computation: State

    @property
    def resident(self) -> bool:
        """Whether weights never move and never change their dtype: no offload."""
        return self.offload == self.onload == self.preparing == self.computation


def read_states(config: VramConfig, *, device: torch.device | str, dtype: torch.dtype) -> States:
    """The states that `config` asks for; what it leaves out is as in the next state towards computation, the last being
    `dtype` on `device`. Raises Trouble ("vram_config"; "bad_device" for a device that is not there)."""
    values = {name: _normalized(value) for name, value in config.to_values().items()}
    values["computation_dtype"] = values["computation_dtype"] or _normalized(dtype)
    values["computation_device"] = values["computation_device"] or _normalized(device)
    found: dict[str, State] = {}
    for nearer, level in zip((None, *LEVELS[:0:-1]), LEVELS[::-1]):
        for what in ("device", "dtype"):
            values[f"{level}_{what}"] = values[f"{level}_{what}"] or values[f"{nearer}_{what}"]
        found[level] = _state(level, values)
        if found[level].on_disk:  # its dtype is the file's; further away it is as nearer by
            values[f"{level}_dtype"] = values[f"{nearer}_dtype"]
    states = States(**found)
    check_states(states)
    return states


def _normalized(value: object) -> str | None:
    """The spelling without "torch."; an accelerator without a number is its first."""
    if value is None:
        return None
    text = str(value).strip().removeprefix("torch.")
    return f"{text}:0" if text in ("cuda", "xpu", "npu") else text


def _state(level: str, values: dict[str, str | None]) -> State:
    dtype, device = values[f"{level}_dtype"], values[f"{level}_device"]
    if device == DISK:
        if level == "computation":
            raise _refused(
                "computation_device is 'disk', but nothing computes on a disk.", "Name the device that computes."
            )
        return State(None, None)
    if dtype == DISK:
        raise _refused(
            f"{level}_dtype is 'disk' while {level}_device is {device!r}.",
            f"Set {level}_device='disk' too, or name a dtype: {', '.join(DTYPES)}.",
        )
    if dtype not in DTYPES:
        raise _refused(f"{level}_dtype is {dtype!r}, which weights cannot have.", f"One of: {', '.join(DTYPES)}.")
    assert dtype is not None and device is not None, "read_states completes them"
    return State(getattr(torch, dtype), _device(level, device))


def _device(level: str, name: str) -> torch.device:
    kind, _, number = name.partition(":")
    if kind not in ("cpu", *ACCELERATORS) or (number and not number.isdigit()):
        raise _refused(
            f"{level}_device is {name!r}, which is no device.", "One of: cpu, cuda, cuda:1, mps, xpu, npu, disk."
        )
    return device_memory.check_device(name)


def check_states(states: States) -> None:
    """Raises Trouble ("vram_config") where a state is nearer to computation than the next one, the computation dtype is
    FP8, or the computing device cannot take a state's dtype."""
    computation_dtype, computation_device = states.computation.in_memory
    if is_float8(computation_dtype):
        raise _refused(
            f"computation_dtype is {str(computation_dtype).removeprefix('torch.')}, "
            "but layers do not compute in 8-bit floats.",
            "Store in FP8 (preparing_dtype, onload_dtype) and compute in bfloat16. "
            "Products in FP8 are from_pretrained(fp8_products=True).",
        )
    ordered: list[tuple[str, State]] = [(level, getattr(states, level)) for level in LEVELS]
    for level, state in ordered:
        if computation_device.type == "mps" and state.dtype is not None and is_float8(state.dtype):
            raise _refused(
                f"{level}_dtype is {str(state.dtype).removeprefix('torch.')}, which Apple's GPUs (mps) cannot take.",
                "Store in bfloat16 or float16; blocks that do not fit can be streamed from disk.",
            )
    for (level, state), (nearer, next_state) in pairwise(ordered):
        if state.rank > next_state.rank:
            raise _refused(
                f"{level} ({state}) is nearer to computing than {nearer} ({next_state}): "
                "weights would move away in order to compute.",
                f"Give {nearer} a device as near as {level}'s, or move {level} further away.",
            )
        if state.rank == 2 and state.device is not None and state.device.type != computation_device.type:
            raise _refused(
                f"{level} keeps weights on {state.device}, but {computation_device} computes.",
                "Accelerators hold weights only for their own kind; choose cpu or disk.",
            )


def check_limit(vram_limit_bytes: int | None) -> None:
    """Raises Trouble ("vram_config") for a limit below zero bytes; None is no limit, 0 keeps no block resident."""
    if vram_limit_bytes is not None and vram_limit_bytes < 0:
        raise _refused(
            f"vram_limit is {vram_limit_bytes} bytes.", "Use None for no limit, or 0 to keep nothing ready on the card."
        )


def check_files(part: PartSpec, states: States) -> None:
    """Raises Trouble ("vram_config") where weights are to be streamed from disk, but their file is a pickle."""
    if not (states.offload.on_disk or states.onload.on_disk or states.preparing.on_disk):
        return
    for path in _pickles(part.files):
        raise Trouble(
            "vram_config",
            f"{path.name} is a pickle, and weights cannot be streamed out of one; "
            f"{part.name} can only be left on disk as safetensors.",
            hint=f"Convert it once: {CONVERT.format(path=_quoted(path))}",
        )


def _pickles(files: Iterable[Path]) -> list[Path]:
    return [path for path in files if path.suffix.lower() not in MAPPED_SUFFIXES]


def _quoted(path: Path) -> str:
    """`path` quoted so that every shell takes it."""
    return f'"{path}"' if " " in str(path) else str(path)


def _refused(message: str, hint: str) -> Trouble:
    return Trouble("vram_config", message, hint=hint)
