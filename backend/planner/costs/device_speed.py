"""How fast a device computes and moves: measured once on this machine, or assumed from its name.

Always spoken of as a range.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from backend.planner.costs import gpu_table
from backend.schema.json_values import finite
from backend.schema.memory_plan import DTYPES, GIB, Card
from backend.schema.untrusted import read_object_or_empty
from backend.system.atomic_files import write_json

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
    source: str = ""  # where the rates are from, as the end of a sentence "Seconds are ..."


UNKNOWN = "a guess: no card called {} is known, so 30 TFLOP/s are assumed"
ASSUMED = Speed(
    flops=30e12, link_bytes=11 * GB, disk_bytes=1.5 * GB, memory_bytes=400 * GB,
    source="a guess: the card's make is not said, so 30 TFLOP/s are assumed",
)  # fmt: skip
ASSUMED_CPU = Speed(
    flops=0.1e12, link_bytes=1.5 * GB, disk_bytes=1.5 * GB, memory_bytes=20 * GB, spread=3.0,
    source="a guess: this processor was not measured yet, so 0.1 TFLOP/s are assumed",
)  # fmt: skip


def what_if(text: str, *, ram_gib: float = 64.0, reserve_gib: float = 0.6) -> tuple[Card, Speed]:
    """A card that is not here: "12GiB", "12", a name such as "rtx3060", "a100 40gb" or "RTX 4070 Laptop"; "cpu" is a
    machine without one.

    Raises ValueError for an unknown one, with the names that are written most alike."""
    word = "".join(text.lower().split())
    if word == "cpu":
        return _without_card(ram_gib), ASSUMED_CPU
    found = gpu_table.card_named(text)
    if found is not None:
        gib = gpu_table.gib_of(text) or found.gib[0]
        if gib not in found.gib:
            raise ValueError(f"The {found.name} has {' or '.join(map(str, found.gib))} GiB, not {gib} ({text!r}).")
        card = _card(text, gib, ram_gib, reserve_gib)
        if found.device == "mps":  # its memory is the RAM
            card = replace(card, ram_total_bytes=card.total_bytes, ram_free_bytes=int(card.total_bytes * 0.85))
        return replace(card, device=found.device, dtypes=found.dtypes), speed_named(found)
    number = word.removesuffix("gib").removesuffix("gb").removesuffix("g")
    try:
        gib = float(number)
    except ValueError:
        close = gpu_table.nearest(text) or ("RTX 3060", "RTX 4090", "A100")
        raise ValueError(
            f"{text!r} is no card that is known. Nearest are {', '.join(close)}; or say its memory, such as 12GiB."
        ) from None
    if not 0.25 <= gib <= 4096:
        raise ValueError(f"A card of {gib:g} GiB is not likely; say something like 12GiB.")
    return _card(f"{gib:g} GiB card", gib, ram_gib, reserve_gib), ASSUMED


def speed_named(card: gpu_table.CardFacts) -> Speed:
    """What is assumed of a known card: the share of its maker's figure that networks reach."""
    flops = card.teraflops * card.share * 1e12
    source = f"assumed from the maker's {card.teraflops:g} TFLOP/s of the {card.name}"
    return Speed(flops, card.link_gb * GB, ASSUMED.disk_bytes, card.memory_gb * GB, source=source)


def _without_card(ram_gib: float) -> Card:
    total, free = int(ram_gib * GIB), int(ram_gib * GIB * 0.85)
    return Card(
        "cpu",
        "a CPU",
        total,
        free,
        reserve_bytes=min(total // 16, GIB),
        ram_total_bytes=total,
        ram_free_bytes=free,
        dtypes=tuple(one for one in DTYPES if one != "float16"),
        measured=False,
    )


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
    here = card.measured or card.device.startswith("cuda")  # others are remembered without their names
    if file is not None and here:
        kept = _calibration(read_object_or_empty(file).get(device_key(card)))
        if kept is not None:
            return kept
    if card.device == "cpu":
        return ASSUMED_CPU
    found = gpu_table.card_named(card.name)
    if found is not None:
        return speed_named(found)
    return ASSUMED if not card.measured else replace(ASSUMED, source=UNKNOWN.format(card.name or "without a name"))


def _calibration(kept: object) -> Speed | None:
    """What a file says of a device's speed; a damaged calibration is no calibration."""
    rates = ("flops", "link_bytes", "disk_bytes", "memory_bytes", "spread")
    if not isinstance(kept, dict) or any(finite(kept.get(name, 1.8), low=1e-3, high=1e30) is None for name in rates):
        return None
    try:
        return Speed(**kept)
    except TypeError:
        return None


def source_of(speed: Speed, device: str) -> str:
    """A sentence on where the seconds of an estimate are from."""
    if speed.measured:
        thing = "processor" if device == "cpu" else "card"
        return f"Seconds follow from the speed that was measured of this {thing}: {speed.flops / 1e12:.3g} TFLOP/s."
    return f"Seconds are {speed.source}." if speed.source else ""


def in_float32(speed: Speed) -> Speed:
    """Of an accelerator, from its rates in 16 bits: matrix products take from twice (TF32) to four times as long."""
    return replace(speed, flops=speed.flops / 2, spread=2 * speed.spread)


def remember(card: Card, speed: Speed, file: Path) -> None:
    """Keeps a calibration of `card` for `speed_of`."""
    known = read_object_or_empty(file)
    known[device_key(card)] = asdict(speed)
    write_json(file, known, indent=1)


def device_key(card: Card) -> str:
    """What a device is remembered by.

    A machine has one CPU and one Apple GPU, which are called differently by different libraries.
    """
    kind = card.device.partition(":")[0]
    return kind if kind in ("cpu", "mps") else f"{kind}/{card.name}"
