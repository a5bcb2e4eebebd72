"""The budget that Windows gives a program, asked of objects laid out as Windows lays them out (the system itself is not here)."""

from __future__ import annotations

import ctypes
import sys
from ctypes import CFUNCTYPE, POINTER, addressof, byref, c_long, c_uint32, c_void_p, cast

import pytest

from backend.system import dxgi

GIB = 2**30
pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="calls there have another convention; the system itself is asked"
)


class Thing:
    """An object that begins with a pointer to its table of methods; `released` counts."""

    def __init__(self, **methods):
        self.released = 0
        methods = {dxgi.RELEASE: (CFUNCTYPE(c_long, c_void_p), self._release), **methods}
        self._kept = {int(place): kind(function) for place, (kind, function) in methods.items()}
        self._table = (c_void_p * 20)(*(cast(self._kept[n], c_void_p) if n in self._kept else None for n in range(20)))
        self._body = (c_void_p * 1)(addressof(self._table))
        self.address = addressof(self._body)

    def _release(self, this) -> int:
        self.released += 1
        return 0


def adapter(name: str, budget: int, *, flags: int = 0, old: bool = False) -> tuple[Thing, list[Thing]]:
    def describe(this, out):
        out.contents.name[: len(name)] = [ord(one) for one in name]
        out.contents.flags = flags
        return 0

    def ask(this, node, group, out):
        assert (node, group) == (0, dxgi.LOCAL)
        out.contents.budget = budget
        return 0

    newer = Thing(
        **{
            str(dxgi.QUERY_VIDEO_MEMORY_INFO): (
                CFUNCTYPE(c_long, c_void_p, c_uint32, c_uint32, POINTER(dxgi.MemoryInfo)),
                ask,
            )
        }
    )

    def query(this, wanted, out):
        assert bytes(cast(wanted, POINTER(ctypes.c_ubyte * 16)).contents) == dxgi.ADAPTER3.bytes_le
        if old:
            return -1
        out[0] = newer.address
        return 0

    found = Thing(
        **{
            str(dxgi.GET_DESC1): (CFUNCTYPE(c_long, c_void_p, POINTER(dxgi.Description)), describe),
            str(dxgi.QUERY_INTERFACE): (CFUNCTYPE(c_long, c_void_p, c_void_p, POINTER(c_void_p)), query),
        }
    )
    return found, [found] if old or flags else [found, newer]


def test_every_card_s_budget_is_read_and_everything_given_back():
    made = [
        adapter("NVIDIA GeForce RTX 3070", 7 * GIB),
        adapter("Basic Render Driver", GIB, flags=dxgi.SOFTWARE),
        adapter("Old", GIB, old=True),
        adapter("NVIDIA GeForce RTX 3070", 6 * GIB),
    ]

    def enumerate_adapters(this, index, out):
        if index >= len(made):
            return -2005270526
        out[0] = made[index][0].address
        return 0

    factory = Thing(
        **{str(dxgi.ENUM_ADAPTERS1): (CFUNCTYPE(c_long, c_void_p, c_uint32, POINTER(c_void_p)), enumerate_adapters)}
    )

    def create(wanted, out):
        cast(out, POINTER(c_void_p))[0] = factory.address
        return 0

    assert dxgi._budgets(create) == {"NVIDIA GeForce RTX 3070": 6 * GIB}
    assert [thing.released for _, things in made for thing in things] == [1] * 6 and factory.released == 1
    assert dxgi._budgets(lambda wanted, out: -1) == {}


def test_layouts_are_those_of_the_headers():
    assert dxgi._guid(dxgi.ADAPTER3)._obj[:4] == [0xA4, 0x67, 0x59, 0x64]
    assert ctypes.sizeof(dxgi.Description) == 312 and ctypes.sizeof(dxgi.MemoryInfo) == 32
    assert dxgi.budgets() == {}
    assert byref  # the pointer that every out argument is
