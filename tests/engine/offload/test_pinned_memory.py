"""Pinned RAM in pieces: little more than is asked for, and bounded."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from backend.engine.devices import device_memory
from backend.engine.loading.disk_reader import ALIGNMENT
from backend.engine.offload import pinned_memory
from backend.engine.offload.pinned_memory import PinnedPool, piece_bytes, power_of_two

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30


def test_the_next_power_of_two():
    assert [power_of_two(n) for n in (1, 2, 3, 64, 65, GIB + 1)] == [1, 2, 4, 64, 128, 2 * GIB]


@pytest.mark.parametrize(
    ("block", "count", "share"),
    [(680_000_000, 60, 1.08), (340_000_000, 60, 1.08), (50_000_000, 20, 1.15), (7 * GIB, 2, 1.15)],
)
def test_pieces_hold_blocks_side_by_side(block, count, share):
    """Rounded one by one, the first would take 1.58 times as much."""
    taken, rest, expected = 0, 0, block * count
    for _ in range(count):
        if rest < block:
            rest = piece_bytes(block, expected)
            taken += rest
        rest, expected = rest - block, expected - block
    assert taken <= share * block * count


def test_buffers_are_aligned_do_not_overlap_and_keep_their_piece():
    pieces = []

    def new_piece(nbytes: int) -> torch.Tensor:
        pieces.append(torch.zeros(nbytes, dtype=torch.uint8))
        return pieces[-1]

    source = PinnedPool(CPU, 1000, limit_bytes=10**6, new_piece=new_piece)
    buffers = [source.take(100) for _ in range(9)]
    assert [piece.numel() for piece in pieces] == [512, *[256] * 7]
    for number, buffer in enumerate(buffers):
        assert buffer.numel() == 100 and buffer.storage_offset() % ALIGNMENT == 0
        buffer.fill_(number + 1)
    assert [int(buffer[0]) for buffer in buffers] == list(range(1, 10)) == [int(buffer[-1]) for buffer in buffers]


def test_beyond_the_limit_and_where_the_system_refuses_there_is_none(monkeypatch):
    held = [0]
    monkeypatch.setattr(device_memory, "pinned", lambda device: held[0])

    def new_piece(nbytes: int) -> torch.Tensor:
        held[0] += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    source = PinnedPool(CPU, 10_000, limit_bytes=3000, new_piece=new_piece)
    assert [source.take(900) is not None for _ in range(4)] == [True, True, False, False]
    assert held[0] <= 3000
    monkeypatch.setattr(device_memory, "pinned", lambda device: 0)  # as where torch does not count
    source = PinnedPool(CPU, 10_000, limit_bytes=3000, new_piece=new_piece)
    assert [source.take(900) is not None for _ in range(4)] == [True, True, False, False]

    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    assert PinnedPool(CPU, 100, limit_bytes=3000, new_piece=refuse).take(10) is None
    assert 0 < pinned_memory.SHARE <= 0.5


def test_a_cpu_needs_none():
    assert not device_memory.can_pin("cpu") and device_memory.can_pin("cuda:0") and not device_memory.can_pin("mps")
    assert device_memory.pinned("cpu") == 0
