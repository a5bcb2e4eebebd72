"""Slows down whoever guesses: a few wrong tries are free, then an address has to wait, longer each time; and all addresses together
have an allowance too, which guessing from many of them uses up."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

FREE_TRIES = 5  # wrong ones of an address before it has to wait
FIRST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 300.0
FORGET_SECONDS = 3600.0  # after so long without a wrong try an address starts anew
ALL_TRIES = 40  # of all addresses together, at once ...
ALL_PER_SECOND = 0.5  # ... and so many more each second
MOST_ADDRESSES = 10_000
LOOPBACK = "loopback"


@dataclass
class _Address:
    wrong: int = 0
    last: float = 0.0
    until: float = 0.0


class Throttle:
    """`wait` before a try is looked at, `failed` or `succeeded` after it. May be used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._known: OrderedDict[str, _Address] = OrderedDict()
        self._allowance, self._filled = float(ALL_TRIES), clock()

    def wait(self, address: str) -> float:
        """Seconds until this address may try again; 0 when it may now, and then the try counts as wrong until `succeeded`."""
        with self._lock:
            now = self._clock()
            known = self._at(address, now)
            self._allowance = min(float(ALL_TRIES), self._allowance + (now - self._filled) * ALL_PER_SECOND)
            self._filled = now
            if now < known.until:
                return known.until - now
            if (
                self._allowance < 1 and _group(address) != LOOPBACK
            ):  # the owner at this machine is not kept out by others
                return (1 - self._allowance) / ALL_PER_SECOND
            # Counted before it is judged, so that many tries at the same time do not slip through.
            self._allowance -= 1
            known.wrong, known.last = known.wrong + 1, now
            if known.wrong >= FREE_TRIES:
                known.until = now + min(FIRST_WAIT_SECONDS * 2 ** (known.wrong - FREE_TRIES), LONGEST_WAIT_SECONDS)
            return 0.0

    def succeeded(self, address: str) -> None:
        with self._lock:
            self._known.pop(_group(address), None)
            self._allowance = min(float(ALL_TRIES), self._allowance + 1)

    def wrong(self, address: str) -> int:
        """How many tries of this address in a row were wrong."""
        with self._lock:
            known = self._known.get(_group(address))
            return known.wrong if known else 0

    def _at(self, address: str, now: float) -> _Address:
        key = _group(address)
        known = self._known.get(key)
        if known is None or (now - known.last > FORGET_SECONDS and now >= known.until):
            known = self._known[key] = _Address()
        self._known.move_to_end(key)
        while len(self._known) > MOST_ADDRESSES:
            self._known.popitem(last=False)
        return known


def _group(address: str) -> str:
    """An IPv6 host has a network of 2^64 addresses to itself, a program of this machine all of 127.0.0.0/8: they count as one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_loopback:
        return LOOPBACK
    return str(ipaddress.ip_network((found, 64), strict=False) if found.version == 6 else found)
