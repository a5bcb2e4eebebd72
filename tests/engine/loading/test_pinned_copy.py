"""Weights that go to a device are read into pinned RAM and cast there; nothing of their file is mapped to be written to."""

from __future__ import annotations

import mmap
import random
import warnings

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from backend.catalog.formats.read import read_header
from backend.engine.loading import load, pinned_copy
from backend.engine.loading.disk_reader import Reader
from backend.engine.loading.pinned_copy import PinnedCopy
from backend.engine.offload import placement
from backend.schema.memory_plan import VramConfig
from tests.engine.fake_cuda import CARD, fake_card
from tests.engine.small import inputs

pytestmark = pytest.mark.torch


@pytest.fixture
def part(small, monkeypatch):
    """A part whose class is known to the loader."""
    from tests.engine.small import Small

    found, _ = small(torch.float32, num_blocks=2)
    monkeypatch.setattr(load, "find_class", lambda network: Small)
    found.config["num_blocks"] = 2
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("bounce_bytes", [4096, 32 << 20])
def test_a_part_is_loaded_to_a_device_as_to_ram(part, monkeypatch, dtype, bounce_bytes):
    here, asked = load.load_part(part, dtype=dtype), []
    monkeypatch.setattr(pinned_copy.PinnedCopy.__init__, "__kwdefaults__", {"bounce_bytes": bounce_bytes})
    real = mmap.mmap
    monkeypatch.setattr(
        load.mmap, "mmap", lambda *args, **named: asked.append(named.get("access")) or real(*args, **named)
    )
    told = []
    with fake_card(monkeypatch, 0, early=0.0) as card, warnings.catch_warnings():
        warnings.simplefilter("error")
        there = load.load_part(part, dtype=dtype, device=CARD, on_bytes=lambda *now: told.append(now))
        card.run_own()
    assert [one for one in asked if one is not None] == [mmap.ACCESS_READ]
    assert told[-1] == (part.nbytes, part.nbytes) and not card.faults
    for (name, one), (other, two) in zip(here.named_parameters(), there.named_parameters(), strict=True):
        assert name == other and one.dtype == two.dtype and torch.equal(one, two)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_every_kind_of_number_arrives_in_pieces_and_is_cast_over_there(tmp_path, monkeypatch, stored):
    generator = torch.Generator().manual_seed(0)
    kept = {f"{n}": (4 * torch.randn(n, 7, generator=generator)).to(stored) for n in (1, 64, 300)} | {
        "one": torch.ones(()).to(stored)
    }
    save_file(kept, tmp_path / "w.safetensors")
    monkeypatch.setattr(pinned_copy.PinnedCopy.__init__, "__kwdefaults__", {"bounce_bytes": 512})
    with fake_card(monkeypatch, 0, early=0.0) as card:
        upload = pinned_copy.Upload(CARD)
        found = {
            name: upload.tensor(at, torch.bfloat16)
            for name, at in read_header(tmp_path / "w.safetensors").tensors.items()
        }
        card.run_own()
        upload.close()
    for name, want in kept.items():
        assert torch.equal(found[name], want.to(torch.bfloat16) if stored.is_floating_point else want), name


def test_where_no_more_ram_may_be_pinned_the_bytes_arrive_all_the_same(small, monkeypatch):
    part, build = small(num_blocks=2)
    disk = VramConfig(offload_device="disk", onload_device="disk", preparing_device="disk")
    found = []
    for refuses in (False, True):
        with fake_card(monkeypatch, 0, early=0.0) as card:

            def refuse(nbytes, device, *, pinned=False, card=card, refuses=refuses):
                if pinned and refuses:
                    raise RuntimeError("CUDA error: out of memory")
                return card.allocate(nbytes, device, pinned=pinned)

            monkeypatch.setattr(pinned_copy, "allocate", refuse)
            module = build()
            placed = placement.place(module, part, disk, device=CARD)
            placed.onload()
            with torch.no_grad():
                found.append(module(**inputs()))
            placed.close()
        assert not card.faults
    assert torch.equal(*found)


def test_the_buffers_are_used_in_turn_and_waited_for(tmp_path):
    """Pieces come in order, and a buffer is filled again only after its event."""
    data, order, waits = bytes(random.Random(0).randbytes(10_000)), [], []
    (tmp_path / "f").write_bytes(data)

    class Event:
        def __init__(self, offset):
            self.offset = offset

        def synchronize(self):
            waits.append(self.offset)

    one = PinnedCopy(Reader(), torch.device("cpu"), bounce_bytes=4096)
    target = torch.zeros(10_000, dtype=torch.uint8)

    def copy(offset, piece):
        order.append((offset, piece.data_ptr()))
        target[offset : offset + piece.numel()].copy_(piece)
        return Event(offset)

    from backend.engine.loading.disk_reader import Span

    assert one.move((Span(tmp_path / "f", 0, 0, 10_000),), copy).offset == 8192
    assert bytes(target.numpy()) == data
    assert [offset for offset, _ in order] == [0, 4096, 8192] and waits == [0]
    assert order[0][1] == order[2][1] != order[1][1]
