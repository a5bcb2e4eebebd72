"""The four states of a part's weights: read from a `VramConfig`, completed, and refused where they make no sense.

Rank says how far from computing a device is: disk, then RAM, then the device that computes. On its way to computation a weight may only come nearer.
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
    """Where weights lie and in which dtype. On disk the dtype is the file's and `dtype` is None."""

    dtype: torch.dtype | None
    device: torch.device | None  # None: disk

    @property
    def on_disk(self) -> bool:
        return self.device is None

    @property
    def rank(self) -> int:
        return 0 if self.device is None else 1 if device_memory.is_ram(self.device) else 2

    def __str__(self) -> str:
        return DISK if self.on_disk else f"{str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True)
class States:
    """All four, complete."""

    offload: State
    onload: State
    preparing: State
    computation: State

    @property
    def resident(self) -> bool:
        """Whether weights never move and never change their dtype: the plain case."""
        return self.offload == self.onload == self.preparing == self.computation


def read_states(config: VramConfig, *, device: torch.device | str, dtype: torch.dtype) -> States:
    """The states that `config` asks for; what it leaves out is as in the next state towards computation, the last being
    `dtype` on `device`. Raises Trouble ("vram_config", or "bad_device" for one that is not there) with a sentence.
    """
    values = {name: _plain(value) for name, value in config.to_values().items()}
    values["computation_dtype"] = values["computation_dtype"] or _plain(dtype)
    values["computation_device"] = values["computation_device"] or _plain(device)
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


def _plain(value) -> str | None:
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
    return State(getattr(torch, dtype), _device(level, device))


def _device(level: str, name: str) -> torch.device:
    kind, _, number = name.partition(":")
    if kind not in ("cpu", *ACCELERATORS) or (number and not number.isdigit()):
        raise _refused(
            f"{level}_device is {name!r}, which is no device.", "One of: cpu, cuda, cuda:1, mps, xpu, npu, disk."
        )
    return device_memory.check_device(name)


def check_states(states: States) -> None:
    """Raises Trouble where a state is nearer to computing than the one after it, computes in what nothing computes in, or is in a dtype that the
    computing device cannot take."""
    computing = states.computation
    if is_float8(computing.dtype):
        raise _refused(
            f"computation_dtype is {str(computing.dtype).removeprefix('torch.')}, but layers do not compute in 8-bit floats.",
            "Store in FP8 (preparing_dtype, onload_dtype) and compute in bfloat16. Products in FP8 are from_pretrained(fp8_products=True).",
        )
    ordered = [(level, getattr(states, level)) for level in LEVELS]
    for level, state in ordered:
        if computing.device.type == "mps" and state.dtype is not None and is_float8(state.dtype):
            raise _refused(
                f"{level}_dtype is {str(state.dtype).removeprefix('torch.')}, which Apple's GPUs (mps) cannot take.",
                "Store in bfloat16 or float16; blocks that do not fit can be streamed from disk.",
            )
    for (level, state), (nearer, next_state) in pairwise(ordered):
        if state.rank > next_state.rank:
            raise _refused(
                f"{level} ({state}) is nearer to computing than {nearer} ({next_state}): weights would move away in order to compute.",
                f"Give {nearer} a device as near as {level}'s, or move {level} further away.",
            )
        if state.rank == 2 and state.device.type != computing.device.type:
            raise _refused(
                f"{level} keeps weights on {state.device}, but {computing.device} computes.",
                "Accelerators hold weights only for their own kind; choose cpu or disk.",
            )


def check_limit(vram_limit_bytes: int | None) -> None:
    """Raises Trouble for a limit below zero; None is no limit, 0 lets nothing wait on the computing device."""
    if vram_limit_bytes is not None and vram_limit_bytes < 0:
        raise _refused(
            f"vram_limit is {vram_limit_bytes} bytes.", "Use None for no limit, or 0 to keep nothing ready on the card."
        )


def check_files(part: PartSpec, states: States) -> None:
    """Raises Trouble where weights shall stay on disk but their file does not hold them as plain bytes."""
    if not (states.offload.on_disk or states.onload.on_disk or states.preparing.on_disk):
        return
    for path in _pickles(part.files):
        raise Trouble(
            "vram_config",
            f"{path.name} is a pickle, and weights cannot be streamed out of one; {part.name} can only be left on disk as safetensors.",
            hint=f"Convert it once: {CONVERT.format(path=_quoted(path))}",
        )


def _pickles(files: Iterable[Path]) -> list[Path]:
    return [path for path in files if path.suffix.lower() not in MAPPED_SUFFIXES]


def _quoted(path: Path) -> str:
    """As every shell takes it."""
    return f'"{path}"' if " " in str(path) else str(path)


def _refused(message: str, hint: str) -> Trouble:
    return Trouble("vram_config", message, hint=hint)
