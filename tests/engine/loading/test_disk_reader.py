"""Bytes from files into buffers, the order of blocks, and what fits."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.spec import TensorAt
from backend.engine.loading import disk_reader
from backend.engine.offload.prefetch import BufferPool, Prefetcher, PrefetchOrder, evenly_spaced, most_resident_blocks
from backend.schema.messages import Trouble

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


@pytest.fixture
def stored(tmp_path: Path):
    """Three tensors in two files, one of them at an odd place."""
    data = bytes(range(256)) * 40
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(data)
    second.write_bytes(data[::-1])
    places = (
        TensorAt(first, "x", "U8", (100,), 3, 103),
        TensorAt(first, "y", "BF16", (50, 2), 103, 303),
        TensorAt(second, "z", "F32", (7,), 8, 36),
        TensorAt(second, "none", "F32", (0,), 36, 36),
    )
    return data, places


def layout_of(places) -> disk_reader.Layout:
    dtypes = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32}
    return disk_reader.lay_out((dtypes[at.dtype], at.shape) for at in places)


def test_a_read_puts_every_tensor_in_its_place(stored):
    data, places = stored
    layout = layout_of(places)
    buffer = disk_reader.allocate(layout.nbytes, CPU)
    reader = disk_reader.Reader()
    reader.read_tensors(places, layout, buffer)
    found = [bytes(tensor.reshape(-1).view(torch.uint8).tolist()) for tensor in disk_reader.views(buffer, layout)]
    assert found == [data[3:103], data[103:303], data[::-1][8:36], b""]
    assert reader.num_bytes == 328
    assert all(field.offset % disk_reader.ALIGNMENT == 0 for field in layout.fields)
    reader.close()


@pytest.mark.parametrize("piece", [1, 33, 64, 100, 10_000])
def test_cut_into_pieces_it_is_the_same(stored, piece):
    _, places = stored
    layout = layout_of(places)
    whole, pieced = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    reader = disk_reader.Reader()
    reader.read_tensors(places, layout, whole)
    for offset, nbytes, spans in disk_reader.cut(disk_reader.spans_of(places, layout), piece):
        assert nbytes <= piece
        bounce = torch.empty(piece, dtype=torch.uint8)
        bounce[:nbytes] = pieced[offset : offset + nbytes]
        reader.read(spans, bounce)
        pieced[offset : offset + nbytes] = bounce[:nbytes]
    assert torch.equal(whole, pieced)
    reader.close()


def test_more_tensors_than_one_call_takes(tmp_path):
    path = tmp_path / "many"
    path.write_bytes(bytes(range(250)) * 20)
    places = [TensorAt(path, str(i), "U8", (1,), i, i + 1) for i in range(5000)]
    layout = disk_reader.lay_out([(torch.uint8, (1,))] * 5000)
    buffer = disk_reader.allocate(layout.nbytes, CPU)
    reader = disk_reader.Reader()
    reader.read_tensors(places, layout, buffer)
    assert buffer[:: disk_reader.ALIGNMENT].tolist() == list(range(250)) * 20
    reader.close()


def test_a_file_that_ends_early_or_is_gone_says_so(tmp_path):
    path = tmp_path / "short.safetensors"
    path.write_bytes(b"x" * 10)
    reader, layout = disk_reader.Reader(), disk_reader.lay_out([(torch.uint8, (20,))])
    with pytest.raises(Trouble, match=r"short\.safetensors ends before"):
        reader.read_tensors([TensorAt(path, "x", "U8", (20,), 0, 20)], layout, disk_reader.allocate(64, CPU))
    gone = tmp_path / "gone.safetensors"
    with pytest.raises(Trouble, match=r"gone\.safetensors cannot be read"):
        reader.read_tensors([TensorAt(gone, "x", "U8", (20,), 0, 20)], layout, disk_reader.allocate(64, CPU))
    with pytest.raises(Trouble, match="holds 10 bytes for x"):
        reader.read_tensors([TensorAt(path, "x", "U8", (20,), 0, 10)], layout, disk_reader.allocate(64, CPU))
    reader.close()


def test_an_error_of_the_reading_thread_reaches_who_waits(tmp_path):
    reader = disk_reader.Reader()
    prefetcher, slot = Prefetcher(reader, CPU), BufferPool(64, 1, CPU).take(0)
    prefetcher.start(slot, (disk_reader.Span(tmp_path / "gone", 0, 0, 4),), 4)
    with pytest.raises(Trouble, match="gone"):
        prefetcher.wait(slot)
    assert slot.key is None
    prefetcher.close()


def follow(order: PrefetchOrder, sequence: list[tuple[int, int]], count: int = 1) -> list[tuple[int, ...]]:
    told = []
    for position, direction in sequence:
        order.note(position, direction)
        told.append(tuple(order.ahead(count)))
    return told


def test_before_it_knows_better_the_next_in_line_comes_next():
    order = PrefetchOrder([2, 5, 7, 9])
    assert order.ahead(2) == [2, 5]
    assert follow(order, [(2, 1), (5, 1), (7, 1), (9, 1)], 2) == [(5, 7), (7, 9), (9, 2), (2, 5)]


def test_forwards_and_backwards_are_told_apart_once_seen():
    order = PrefetchOrder([0, 1, 2, 3])
    there, back = [(i, 1) for i in range(4)], [(i, -1) for i in reversed(range(4))]
    follow(order, there + back)
    told = follow(order, there + back)
    assert told == [(1,), (2,), (3,), (3,), (2,), (1,), (0,), (0,)]


def test_the_first_backward_pass_goes_in_reverse():
    order = PrefetchOrder([0, 1, 2, 3])
    follow(order, [(i, 1) for i in range(4)])
    assert follow(order, [(3, -1), (2, -1), (1, -1), (0, -1)]) == [(2,), (1,), (0,), (1,)]


def test_a_reentrant_recomputation_is_learnt():
    order = PrefetchOrder([0, 1, 2])
    sequence = [(0, 1), (1, 1), (2, 1), (2, 1), (2, -1), (1, 1), (1, -1), (0, 1), (0, -1)]
    follow(order, sequence * 2)
    assert follow(order, sequence) == [(position,) for position, _ in (*sequence[1:], sequence[0])]


def test_an_unusual_order_is_learnt():
    order = PrefetchOrder([0, 1, 2, 3, 4])
    follow(order, [(i, 1) for i in (3, 0, 4)])
    order.restart()
    assert order.ahead(3) == [3, 0, 4]


def test_one_block_comes_after_itself():
    order = PrefetchOrder([4])
    assert order.ahead(2) == [4]
    order.note(4)
    assert order.ahead(2) == [4]


def test_buffers_grow_only_while_all_are_in_use():
    buffers = BufferPool(128, 2, CPU)
    first, second = buffers.take(0), buffers.take(1)
    first.num_users = second.num_users = 1
    assert buffers.take(2) is None
    third = buffers.take(2, required=True)
    assert len(buffers.slots) == 3
    buffers.trim()
    assert len(buffers.slots) == 2 and third not in buffers.slots


def test_the_buffer_that_was_used_longest_ago_goes_first_but_not_what_is_wanted():
    buffers = BufferPool(128, 3, CPU)
    slots = [buffers.take(key) for key in range(3)]
    buffers.touch(slots[0])
    assert buffers.take(7, keep=(1,)) is slots[2]
    assert buffers.find(2) is None and buffers.find(1) is slots[1]


@pytest.mark.parametrize(("count", "chosen"), [(10, 0), (10, 3), (10, 10), (60, 41), (7, 1)])
def test_chosen_blocks_are_spread_evenly(count, chosen):
    picked = sorted(evenly_spaced(count, chosen))
    assert len(picked) == chosen
    gaps = [b - a for a, b in pairwise(picked)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_as_many_as_fit():
    sizes = [10] * 10
    assert most_resident_blocks(sizes, 100, lambda chosen: 0) == set(range(10))
    assert len(most_resident_blocks(sizes, 99, lambda chosen: 20)) == 7
    assert most_resident_blocks(sizes, 15, lambda chosen: 20) == set()


def test_memory_goes_back_when_the_last_tensor_goes():
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()
    before = process.memory_info().rss
    buffer = disk_reader.allocate(64 << 20, CPU)
    part = buffer.fill_(1)[: 1 << 20].view(torch.bfloat16)
    del buffer
    assert process.memory_info().rss - before > 60 << 20
    del part
    for _ in range(20):
        if process.memory_info().rss - before < 4 << 20:
            break
        time.sleep(0.05)
    assert process.memory_info().rss - before < 4 << 20
