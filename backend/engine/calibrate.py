"""How fast this device multiplies and copies: `python -m backend.engine.calibrate` measures for a second or two and keeps the answer.

The estimate of seconds starts from these numbers (`catalog.speed`); without them it assumes some by the card's name.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from backend.catalog import speed
from backend.catalog.speed import Speed
from backend.engine import memory
from backend.schema.places import places

LARGE = {"cpu": 1024}  # side of the matrices that are multiplied; on an accelerator OTHER
OTHER = 8192
COPIED_BYTES = {"cpu": 2**26}
SECONDS = 0.4


def measure(device: torch.device, *, file: Path | None = None) -> Speed:
    """Sustained rates of `device`; the disk's by reading `file` (a model's, ideally one not read lately), else assumed."""
    kind = device.type
    side = LARGE.get(kind, OTHER)
    assumed = speed.ASSUMED_CPU if kind == "cpu" else speed.ASSUMED
    a = torch.randn(side, side, device=device).to(torch.bfloat16 if kind != "mps" else torch.float16)
    flops = 2 * side**3 / _seconds(lambda: a @ a, device)
    count = COPIED_BYTES.get(kind, 2**28)
    source = torch.empty(count, dtype=torch.uint8, pin_memory=kind == "cuda")
    here = torch.empty(count, dtype=torch.uint8, device=device)
    link = assumed.link_bytes if kind == "cpu" else count / _seconds(lambda: here.copy_(source, non_blocking=True), device)
    other = torch.empty_like(here)
    memory = 2 * count / _seconds(lambda: other.copy_(here), device)
    disk = _disk(file) if file is not None else assumed.disk_bytes
    return Speed(flops, min(link, disk) if kind == "cpu" else link, disk, memory, assumed.spread, measured=True)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The least time of one call, over as many as fit into SECONDS."""
    work()
    _wait(device)
    best, end = float("inf"), time.monotonic() + SECONDS
    while time.monotonic() < end:
        start = time.monotonic()
        work()
        _wait(device)
        best = min(best, time.monotonic() - start)
    return max(best, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _disk(file: Path) -> float:
    """Bytes a second of reading up to 512 MiB of `file`, in pieces."""
    start, count = time.monotonic(), 0
    with file.open("rb", buffering=0) as source:
        while count < 2**29 and (piece := source.read(2**24)):
            count += len(piece)
    return max(count / max(time.monotonic() - start, 1e-9), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m backend.engine.calibrate", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--file", type=Path, default=None, help="a large file on the disk that models lie on")
    said = parser.parse_args()
    card = memory.probe(said.device)
    found = measure(torch.device(card.device), file=said.file)
    speed.remember(card, found, places().user / "calibration.json")
    print(f"{card.name}: {found.flops / 1e12:.2f} TFLOP/s, link {found.link_bytes / 1e9:.1f} GB/s, disk {found.disk_bytes / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
