"""Streaming on a disk that gives R bytes a second, by the clock on the wall: a step should cost max(computing, bytes /
R), not their sum."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from medium import note, row
from peers import DISK, PEERS, loft_placed

SIDE = 20  # picture tokens a side: 320 pixels
STEPS, ROUNDS = 3, 2  # measured in a row at each rate, and how often: the least counts, other programs only add
RATES = {"Loft": (0.35, 0.7, 1.0, 1.4, 3.0)}  # times bytes / computing
PEERS_RATES = (0.35, 1.0, 3.0)


class Brake:
    """Makes whatever reads take at least as long as its bytes would take at `rate` bytes a second; None: as fast as it
    goes."""

    def __init__(self):
        self.rate: float | None = None
        self.num_bytes = 0

    def hold(self, nbytes: int, began: float) -> None:
        self.num_bytes += nbytes
        if self.rate:
            time.sleep(max(0.0, began + nbytes / self.rate - time.perf_counter()))


def sweep(folder: Path, quick: bool, who: str) -> None:
    """At each rate some steps one after the other, so that nothing can be fetched while nothing is asked for; resident
    steps in between."""
    import torch

    torch.set_num_threads(1)
    brake, peer = Brake(), PEERS[who]
    resident = peer.step(peer.load(folder, quick), SIDE)
    slow = {"Loft": _loft, "diffusers": _diffusers, "diffsynth": _diffsynth}[who]
    streamed = peer.step(slow(folder, quick, brake), SIDE)
    with torch.no_grad():
        for work in (resident, streamed, streamed):
            work()
        before = brake.num_bytes
        streamed()
        moved, worst = brake.num_bytes - before, 0.0
        guess = seconds_of(resident)
        for factor in RATES.get(who, PEERS_RATES):
            brake.rate = factor * moved / guess
            compute, step = [], []
            for _ in range(ROUNDS):
                compute.append(seconds_of(resident))
                streamed()
                step.append(seconds_of(streamed, STEPS))
            compute, step, reading = min(compute), min(step), moved / brake.rate
            longer = step / max(compute, reading)
            worst = max(worst, longer)
            note(
                f"{who}, {brake.rate / 1e6:.0f} MB/s: computing {compute:.2f} s, reading {reading:.2f} s, step "
                f"{step:.2f} s, "
                f"{longer:.2f} of the longer, {step / (compute + reading):.2f} of the sum"
            )
    row("step from a slow disk / max(computing, reading), the worst of a sweep", "1.10", "1.00", **{who: worst})


def seconds_of(work: Callable[[], object], times: int = 1) -> float:
    """On the wall, of one of `times` in a row."""
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def _loft(folder: Path, quick: bool, brake: Brake):
    from backend.engine.loading.disk_reader import Reader

    class Slow(Reader):
        def read(self, spans, buffer) -> None:
            began = time.perf_counter()
            super().read(spans, buffer)
            brake.hold(sum(span.nbytes for span in spans), began)

    return loft_placed(folder, quick, DISK, reader=Slow())


def _diffusers(folder: Path, quick: bool, brake: Brake):
    import safetensors.torch
    from diffusers.hooks import group_offloading

    plain = safetensors.torch.load_file

    def slow(*args, **kwargs):
        began = time.perf_counter()
        found = {key: value.clone() for key, value in plain(*args, **kwargs).items()}  # mapped pages are read here
        brake.hold(sum(value.nbytes for value in found.values()), began)
        return found

    module = PEERS["diffusers"].placed(folder, quick, "disk")
    group_offloading.safetensors.torch.load_file = slow
    return module


def _diffsynth(folder: Path, quick: bool, brake: Brake):
    from diffsynth.core.vram import disk_map

    plain = disk_map.DiskMap.__getitem__

    def slow(self, name: str):
        began = time.perf_counter()
        found = plain(self, name)
        brake.hold(found.nbytes, began)
        return found

    module = PEERS["diffsynth"].placed(folder, quick, "disk")
    disk_map.DiskMap.__getitem__ = slow
    return module
