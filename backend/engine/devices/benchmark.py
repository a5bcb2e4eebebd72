"""Device benchmark (calibration): FLOP/s, copy and disk bandwidth, measured by `python -m backend calibrate` and kept.

Takes a second or two. An idle worker measures by itself, once; any request cancels that at once. Estimates of seconds
start from these rates (`planner.costs.device_speed`); without them they assume rates by the card's name.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F

from backend.engine.devices import device_memory
from backend.planner.costs import device_speed
from backend.planner.costs.device_speed import Speed
from backend.schema.messages import Cancelled
from backend.schema.paths import Places, places

# (tokens, width) of the transformer block that is timed; on an accelerator OTHER
BLOCK = {"cpu": (1024, 512)}
OTHER = (4096, 3072)
HEAD = 64
BETTER = 1.3  # a large network gets at most so much more out of a device than this block; estimates' ranges begin there
COPIED_BYTES = {"cpu": 2**26}
SECONDS = 0.4  # that each rate is measured for
ROOM_BYTES = 3 * 2**29  # of memory that measuring takes at most
BUSY_PERCENT = 30.0  # of the CPU's time


def measure(
    device: torch.device, *, file: Path | None = None, should_stop: Callable[[], bool] = lambda: False
) -> Speed:
    """Sustained rates of `device`: FLOP/s of a transformer block in the dtype that networks compute in there, bytes a
    second of copies, and of the disk by reading `file` (a model's), else assumed.

    Raises Cancelled soon after `should_stop()` is true.
    """
    kind = device.type
    assumed = device_speed.ASSUMED_CPU if kind == "cpu" else device_speed.ASSUMED
    flops = _block_rate(device, *BLOCK.get(kind, OTHER), should_stop=should_stop)
    count = COPIED_BYTES.get(kind, 2**28)
    source = torch.empty(count, dtype=torch.uint8, pin_memory=kind == "cuda")
    here = torch.empty(count, dtype=torch.uint8, device=device)
    link = (
        assumed.link_bytes
        if kind == "cpu"
        else count / _seconds(lambda: here.copy_(source, non_blocking=True), device, should_stop)
    )
    other = torch.empty_like(here)
    inside = 2 * count / _seconds(lambda: other.copy_(here), device, should_stop)
    disk = _disk(file, should_stop) if file is not None else assumed.disk_bytes
    return Speed(flops, min(link, disk) if kind == "cpu" else link, disk, inside, assumed.spread, measured=True)


@torch.no_grad()
def _block_rate(device: torch.device, tokens: int, width: int, *, should_stop: Callable[[], bool]) -> float:
    """FLOP/s of a transformer block: attention and a feed-forward layer of four times the width, norms and GELU."""
    x = torch.randn(1, tokens, width, device=device).to(device_memory.best_dtype(device))
    weights = [
        torch.randn(rows, columns, device=device).to(x.dtype) / columns**0.5
        for rows, columns in (
            (3 * width, width),
            (width, width),
            (4 * width, width),
            (width, 4 * width),
        )
    ]

    def block() -> torch.Tensor:
        normed = F.layer_norm(x, (width,))
        heads = F.linear(normed, weights[0]).view(1, tokens, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # each (1, heads, tokens, HEAD)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(1, tokens, width)
        y = x + F.linear(mixed, weights[1])
        return y + F.linear(F.gelu(F.linear(F.layer_norm(y, (width,)), weights[2]), approximate="tanh"), weights[3])

    count = 2 * tokens * sum(weight.numel() for weight in weights) + 4 * tokens**2 * width
    return BETTER * count / _seconds(block, device, should_stop)


def _seconds(work: Callable[[], object], device: torch.device, should_stop: Callable[[], bool]) -> float:
    """The least time of one call, in seconds, over as many as fit into SECONDS."""
    _check_stop(should_stop)
    work()
    _synchronize(device)
    best, end = float("inf"), time.monotonic() + SECONDS
    while time.monotonic() < end:
        _check_stop(should_stop)
        start = time.monotonic()
        work()
        _synchronize(device)
        best = min(best, time.monotonic() - start)
    return max(best, 1e-9)


def _check_stop(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise Cancelled


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # the device that is measured, which need not be the current one


def _disk(file: Path, should_stop: Callable[[], bool]) -> float:
    """Bytes a second of reading up to 512 MiB of `file`, in pieces; not from the page cache where that can be
    dropped."""
    with file.open("rb", buffering=0) as source:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start, count = time.monotonic(), 0
        while count < 2**29 and (piece := source.read(2**24)):
            _check_stop(should_stop)
            count += len(piece)
        return max(count / max(time.monotonic() - start, 1e-9), 1.0)


def measure_once(
    device: torch.device, *, here: Places, should_stop: Callable[[], bool], is_busy: Callable[[], bool] | None = None
) -> bool:
    """Measures `device` for `calibration.json`, unless that is done. False: not now, since the CPU is busy (`is_busy`)
    or memory is short; try again later. Raises Cancelled as `measure` does."""
    card, file = device_memory.probe(device), here.user / "calibration.json"
    if device_speed.speed_of(card, file).measured:
        return True
    if (is_busy or others_are_busy)() or card.free_bytes < ROOM_BYTES:
        return False
    device_speed.remember(card, measure(device, file=largest_file(here), should_stop=should_stop), file)
    device_memory.empty_cache(device)
    return True


def others_are_busy() -> bool:
    """Whether the CPU has other work, which would make a measurement too low."""
    return psutil.cpu_percent(interval=0.2) > BUSY_PERCENT


def largest_file(here: Places) -> Path | None:
    """The largest model file in the models folder, if it is large enough to measure the disk by (128 MiB)."""
    files = (
        [path for path in here.models.rglob("*.safetensors") if path.stat().st_size >= 2**27]
        if here.models.is_dir()
        else []
    )
    return max(files, key=lambda path: path.stat().st_size, default=None)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m backend calibrate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--file", type=Path, default=None, help="a large file on the disk that models lie on")
    said = parser.parse_args(argv)
    device_memory.set_threads()
    card = device_memory.probe(said.device)
    found = measure(torch.device(card.device), file=said.file or largest_file(places()))
    device_speed.remember(card, found, places().user / "calibration.json")
    print(
        f"{card.name}: {found.flops / 1e12:.2f} TFLOP/s, link {found.link_bytes / 1e9:.1f} GB/s, "
        f"disk {found.disk_bytes / 1e9:.1f} GB/s"
    )


if __name__ == "__main__":
    main()
