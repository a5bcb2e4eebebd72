"""How much video memory Windows lets one program have, from DXGI.

Elsewhere, and wherever the question fails: nothing is known.

Windows pages video memory out instead of refusing it, so what is beyond this budget is not an error but ten times
slower. Interfaces, their numbers and the order of their methods are those of Microsoft's headers dxgi.h and dxgi1_4.h
(IDXGIAdapter3::QueryVideoMemoryInfo).
"""

from __future__ import annotations

import ctypes
import sys
import uuid

FACTORY1 = uuid.UUID("770aae78-f26f-4dba-a829-253c83d1b387")
ADAPTER3 = uuid.UUID("645967a4-1392-4310-a798-8053ce3e93fd")
# places in the tables of methods, counted from IUnknown's first
QUERY_INTERFACE, RELEASE, ENUM_ADAPTERS1, GET_DESC1, QUERY_VIDEO_MEMORY_INFO = 0, 2, 12, 10, 14
LOCAL = 0  # the segment group of the card's own memory
SOFTWARE = 2  # flag of an adapter that is no card
MOST_ADAPTERS = 32


class Luid(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint32), ("high", ctypes.c_int32))


class Description(ctypes.Structure):
    """DXGI_ADAPTER_DESC1."""

    _fields_ = (
        ("name", ctypes.c_uint16 * 128),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("subsystem", ctypes.c_uint32),
        ("revision", ctypes.c_uint32),
        ("dedicated_video", ctypes.c_size_t),
        ("dedicated_system", ctypes.c_size_t),
        ("shared_system", ctypes.c_size_t),
        ("luid", Luid),
        ("flags", ctypes.c_uint32),
    )

    @property
    def text(self) -> str:
        return bytes(self.name).decode("utf-16-le", errors="replace").partition("\0")[0]


class MemoryInfo(ctypes.Structure):
    """DXGI_QUERY_VIDEO_MEMORY_INFO."""

    _fields_ = (
        ("budget", ctypes.c_uint64),
        ("usage", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("reservation", ctypes.c_uint64),
    )


def budgets() -> dict[str, int]:
    """Name of a card -> bytes that one program may use of it without being paged out; the least of cards of the same
    name. Empty where nothing can be known."""
    if sys.platform != "win32":
        return {}
    try:
        return _budgets(ctypes.windll.dxgi.CreateDXGIFactory1)
    except (AttributeError, OSError, ValueError):  # an old system, a system without DXGI, a call that went astray
        return {}


def _budgets(create_factory) -> dict[str, int]:
    factory = ctypes.c_void_p()
    if create_factory(_guid(FACTORY1), ctypes.byref(factory)) != 0 or not factory:
        return {}
    found: dict[str, int] = {}
    try:
        for index in range(MOST_ADAPTERS):
            adapter = ctypes.c_void_p()
            if _call(factory, ENUM_ADAPTERS1, ctypes.c_uint32(index), ctypes.byref(adapter)) != 0 or not adapter:
                break
            try:
                said = _of_adapter(adapter)
            finally:
                _call(adapter, RELEASE)
            if said is not None:
                name, budget = said
                found[name] = min(budget, found.get(name, budget))
    finally:
        _call(factory, RELEASE)
    return found


def _of_adapter(adapter: ctypes.c_void_p) -> tuple[str, int] | None:
    said, newer, info = Description(), ctypes.c_void_p(), MemoryInfo()
    if _call(adapter, GET_DESC1, ctypes.byref(said)) != 0 or said.flags & SOFTWARE:
        return None
    if _call(adapter, QUERY_INTERFACE, _guid(ADAPTER3), ctypes.byref(newer)) != 0 or not newer:
        return None
    try:
        asked = _call(newer, QUERY_VIDEO_MEMORY_INFO, ctypes.c_uint32(0), ctypes.c_uint32(LOCAL), ctypes.byref(info))
    finally:
        _call(newer, RELEASE)
    return (said.text, int(info.budget)) if asked == 0 and info.budget else None


def _guid(value: uuid.UUID):
    return ctypes.byref((ctypes.c_ubyte * 16).from_buffer_copy(value.bytes_le))


def _call(this: ctypes.c_void_p, place: int, *arguments) -> int:
    """The method at `place` in the table that the object begins with; its HRESULT (0 is success), or what else it
    returns."""
    table = ctypes.cast(this, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
    kinds = [
        ctypes.c_void_p,
        *(ctypes.c_uint32 if isinstance(one, ctypes.c_uint32) else ctypes.c_void_p for one in arguments),
    ]
    kind = getattr(ctypes, "WINFUNCTYPE", ctypes.CFUNCTYPE)
    return kind(ctypes.c_long, *kinds)(table[place])(this, *arguments)
