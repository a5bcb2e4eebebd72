"""How fast weights come from a file to the card, whole and block by block."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backend.catalog.formats.read import read_header
from backend.catalog.spec import TensorAt
from backend.engine.devices import device_memory
from backend.engine.loading import fp8_storage, load
from backend.engine.loading.pinned_copy import Upload
from backend.engine.offload import placement
from tests.gpu.checks.chain import written
from tests.gpu.checks.compare import winner
from tests.gpu.runner import Outcome

GIGABYTES_PINNED, GIGABYTES_FP8 = 10, 5  # a second, at least
STAY = {"offload_device": "cpu", "onload_device": "cpu"}  # in RAM, and from their first use on where they compute


def loading(device: torch.device, tiny: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        tensors = _file(Path(folder) / "large.safetensors", *((4, 1 << 15) if tiny else (16, 1 << 27)))
        total = sum(at.nbytes for at in tensors)
        seconds = {name: _timed(device, lambda way=way: way(tensors, device)) for name, way in WAYS.items()}
        stay = _first_use(Path(folder), device, tiny)
    rates = {name: total / value / 1e9 for name, value in seconds.items()}
    measured = {
        "GB/s": rates,
        "weights to the card": winner({name: seconds[name] for name in ("mapped", "pinned")}),
        "rounding": winner({name: seconds[name] for name in ("FP8, whole", "FP8, in chunks")}),
        "blocks that stay": winner(stay),
        "seconds of their first use": stay,
    }
    fast = rates["pinned"] >= GIGABYTES_PINNED and rates["FP8, whole"] >= GIGABYTES_FP8
    return Outcome(None if device_memory.is_ram(device) else fast, measured)


def _file(path: Path, count: int, numel: int) -> list[TensorAt]:
    """`count` tensors of bfloat16 in a file that the system has in RAM."""
    one = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).view(-1, 64)
    save_file({str(index): one.clone() for index in range(count)}, path)
    return list(read_header(path).tensors.values())


def _mapped(tensors: Sequence[TensorAt], device: torch.device) -> None:
    maps = load.open_maps([tensors[0].file], private=False)
    for at in tensors:
        load.view(at, maps[at.file]).to(device, copy=True)


def _pinned(tensors: Sequence[TensorAt], device: torch.device) -> None:
    upload = Upload(device)
    for at in tensors:
        upload.tensor(at, None)
    upload.close()


def _to_fp8(tensors: Sequence[TensorAt], device: torch.device) -> None:
    upload = Upload(device)
    for at in tensors:
        weight = upload.tensor(at, None)
        fp8_storage.store(weight, torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=device))
    upload.close()


def _to_fp8_in_chunks(tensors: Sequence[TensorAt], device: torch.device) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fp8_storage, "CARD_CHUNK", fp8_storage.CHUNK)
        _to_fp8(tensors, device)


WAYS = {"mapped": _mapped, "pinned": _pinned, "FP8, whole": _to_fp8, "FP8, in chunks": _to_fp8_in_chunks}


def _first_use(folder: Path, device: torch.device, tiny: bool) -> dict[str, float]:
    """Seconds of the first pass of blocks that are to stay: each brought before it computes, or the next one beside the computing."""
    chain, found = written(folder, tiny=tiny), {}
    for name in ("in turn", "beside"):
        with pytest.MonkeyPatch.context() as patched, torch.no_grad():
            if name == "in turn":
                patched.setattr(placement.Placement, "_prefetch_next", lambda self, unit: None)
            module, x = chain.placed(STAY, device), chain.input(device)
            found[name] = _timed(device, lambda module=module, x=x: module(x), warm=False)
            placement.of(module).close()
    return found


def _timed(device: torch.device, work: Callable[[], object], *, warm: bool = True) -> float:
    """Seconds on the wall until the device is done; of the second time, where it may be done twice."""
    for _ in range(1 + (warm and device.type != "cpu")):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        spent = time.perf_counter() - began
    return spent


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
