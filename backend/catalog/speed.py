"""How fast a device computes and moves: measured once on this machine, or assumed from its name. Always spoken of as a range."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from backend.schema.vram import Card

GIB = 2**30
GB = 10**9


@dataclass(frozen=True)
class Speed:
    """Sustained rates. `spread`: how much slower than matrix products alone a network may be."""

    flops: float  # matrix products in 16 bits, a second
    link_bytes: float  # RAM to card, a second
    disk_bytes: float
    memory_bytes: float  # inside the device
    spread: float = 1.8
    measured: bool = False


# name in the driver's spelling, without spaces -> GiB, half the maker's figure for dense 16-bit products (10^12 a second), device memory GB/s, link GB/s
CARDS = {
    "rtx3050": (8, 18, 224, 6),
    "rtx3060": (12, 25, 360, 11),
    "rtx3060ti": (8, 32, 448, 11),
    "rtx3070": (8, 40, 448, 11),
    "rtx3080": (10, 59, 760, 11),
    "rtx3090": (24, 71, 936, 11),
    "rtx4060": (8, 30, 272, 11),
    "rtx4060ti": (16, 44, 288, 11),
    "rtx4070": (12, 58, 504, 22),
    "rtx4070tisuper": (16, 88, 672, 22),
    "rtx4080": (16, 97, 717, 22),
    "rtx4090": (24, 165, 1008, 22),
    "rtx5070": (12, 62, 672, 44),
    "rtx5080": (16, 112, 960, 44),
    "rtx5090": (32, 209, 1792, 44),
    "rtx6000ada": (48, 182, 960, 22),
    "l4": (24, 60, 300, 22),
    "l40s": (48, 181, 864, 22),
    "a10": (24, 62, 600, 22),
    "a100": (80, 156, 2039, 22),
    "h100": (80, 495, 3350, 44),
    "h200": (141, 495, 4800, 44),
}
ASSUMED = Speed(flops=30e12, link_bytes=11 * GB, disk_bytes=1.5 * GB, memory_bytes=400 * GB)
ASSUMED_CPU = Speed(flops=0.1e12, link_bytes=1.5 * GB, disk_bytes=1.5 * GB, memory_bytes=20 * GB, spread=3.0)


def what_if(text: str, *, ram_gib: float = 64.0, reserve_gib: float = 0.6) -> tuple[Card, Speed]:
    """A card that is not here: "12GiB", "12", or a name such as "rtx3060". Raises ValueError for an unknown one."""
    word = "".join(text.lower().split()).removeprefix("nvidia").removeprefix("geforce")
    if word in CARDS:
        gib, tera, memory, link = CARDS[word]
        speed = Speed(tera * 1e12, link * GB, ASSUMED.disk_bytes, memory * GB)
        return _card(text, gib, ram_gib, reserve_gib), speed
    number = word.removesuffix("gib").removesuffix("gb").removesuffix("g")
    try:
        gib = float(number)
    except ValueError:
        raise ValueError(f"{text!r} is no card that is known; say 12GiB, or one of {', '.join(CARDS)}.") from None
    if not 0.25 <= gib <= 4096:
        raise ValueError(f"A card of {gib:g} GiB is not likely; say something like 12GiB.")
    return _card(f"{gib:g} GiB card", gib, ram_gib, reserve_gib), ASSUMED


def _card(name: str, gib: float, ram_gib: float, reserve_gib: float) -> Card:
    total, ram = int(gib * GIB), int(ram_gib * GIB)
    return Card(
        "cuda:0",
        name,
        total,
        total,
        reserve_bytes=int(reserve_gib * GIB),
        ram_total_bytes=ram,
        ram_free_bytes=int(ram * 0.85),
        measured=False,
    )


def speed_of(card: Card, file: Path | None = None) -> Speed:
    """The rates measured on this device (in `file`, written by `remember`), else those assumed for its name."""
    if file is not None and file.is_file():
        try:
            kept = json.loads(file.read_text(encoding="utf-8")).get(device_key(card))
            if kept:
                return Speed(**kept)
        except (ValueError, TypeError):
            pass  # a damaged calibration is no calibration
    word = "".join(card.name.lower().split()).replace("nvidia", "").replace("geforce", "")
    found = max((name for name in CARDS if name in word), key=len, default="")
    if found:
        return what_if(found)[1]
    return ASSUMED_CPU if card.device == "cpu" else ASSUMED


def in_float32(speed: Speed) -> Speed:
    """Of an accelerator, from its rates in 16 bits: matrix products take from twice (TF32) to four times as long."""
    return replace(speed, flops=speed.flops / 2, spread=2 * speed.spread)


def remember(card: Card, speed: Speed, file: Path) -> None:
    """Keeps a calibration of `card` for `speed_of`."""
    known = {}
    if file.is_file():
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            known = {}
    known[device_key(card)] = asdict(speed)
    write_json(file, known)


def write_json(file: Path, values) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.part")
    with temporary.open("w", encoding="utf-8") as out:
        json.dump(values, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)


def device_key(card: Card) -> str:
    """What a device is remembered by. A machine has one CPU and one Apple GPU, which are called differently by different libraries."""
    kind = card.device.partition(":")[0]
    return kind if kind in ("cpu", "mps") else f"{kind}/{card.name}"
