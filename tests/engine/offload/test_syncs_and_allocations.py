"""What a card would wait for at every layer, or take memory for, without need: counted where a CPU can tell."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from backend.engine.acceleration import fp8_matmul
from backend.engine.devices import device_memory
from backend.engine.loading import gguf_dequantize, pinned_copy
from backend.engine.loading.disk_reader import Reader
from backend.engine.offload import blocks as units
from backend.engine.offload import pinned_memory, placement, prefetch, transfer
from backend.engine.tracing import live_tensors
from backend.schema.memory_plan import VramConfig
from backend.training.checkpoint import async_writer
from backend.training.optim import cpu_offload
from tests.engine.fake_cuda import CARD, fake_card
from tests.engine.small import Small, inputs

pytestmark = pytest.mark.torch

CODES = "float8_e4m3fn"
DISK = {"offload_device": "disk", "onload_device": "disk", "preparing_device": "disk"}
FP8 = {"offload_dtype": CODES, "onload_dtype": CODES, "preparing_dtype": CODES}
META = torch.device("meta")


def drawn(module) -> torch.Tensor:
    with torch.no_grad():
        return module(**inputs())


class OnHost(torch.Tensor):
    """A factor in RAM that counts how often it is brought to a device."""

    brought = 0

    def to(self, *args, **named):
        OnHost.brought += 1
        return self.as_subclass(torch.Tensor).clone()


def test_a_factor_of_rows_is_brought_to_the_device_once(write_part):
    names = [f"blocks.{n}.to_q.weight" for n in range(2)]
    torch.manual_seed(0)
    module = Small(2)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with pytest.warns(UserWarning):
        scales = {name: torch.rand(48, 1).mul(0.01).add(0.001) for name in names}
        part = write_part(module, dtype=torch.bfloat16, scales=scales)
    with torch.device("meta"):
        module = Small(2)
    placed = placement.place(module, part, VramConfig(**DISK), device="cpu")
    want = drawn(module)
    for unit in placed.blocks:
        factors = (one.as_subclass(OnHost) if isinstance(one, torch.Tensor) else one for one in unit.on_disk.factors)
        unit.on_disk.factors = tuple(factors)
    placed.transfer._factors.clear()
    placed.transfer.cast.slots.clear()
    OnHost.brought = 0
    for _ in range(3):
        assert torch.equal(drawn(module), want) and torch.isfinite(want).all()
    assert OnHost.brought == len(names)
    placed.close()
    assert not placed.transfer._factors


@pytest.mark.parametrize("kind", ["GGUF_IQ4_NL", "GGUF_IQ4_XS"])
def test_levels_are_brought_to_the_device_once_and_codes_stay_small(kind, monkeypatch):
    blocks = gguf_dequantize.GgufBlocks(kind, (4, 256))
    raw = torch.randint(0, 255, (blocks.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    want = blocks.dequantize(raw)

    class NoLongs(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            assert not (isinstance(found, torch.Tensor) and found.dtype is torch.int64 and found.numel() > 64), func
            return found

    monkeypatch.setattr(torch, "tensor", None)  # whoever makes the table again fails
    with NoLongs():
        assert torch.equal(blocks.dequantize(raw).nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("kind", ["GGUF_Q4_K", "GGUF_Q8_0", "GGUF_IQ4_NL"])
def test_a_large_matrix_is_read_in_pieces_to_the_same_numbers(kind, monkeypatch):
    blocks = gguf_dequantize.GgufBlocks(kind, (16, 512))
    raw = torch.randint(0, 255, (blocks.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    want = blocks.dequantize(raw)
    monkeypatch.setattr(gguf_dequantize, "PIECE", 1024)
    assert torch.equal(blocks.dequantize(raw).nan_to_num(), want.nan_to_num())


def test_nobody_looks_for_special_codes_where_the_cast_knows_them(small, monkeypatch):
    """Only the CPU's cast asks, and it asks when it casts."""
    part, build = small()
    module = build()
    placed = placement.place(module, part, VramConfig(**FP8), device="cpu")
    placed.onload()
    layer = next(one for one in placed.layers if one.unit.block and placed.transfer.cast_layout(one).fields)
    told = []
    on_card = [tensor.to(META) for tensor in layer.unit.stored.tensors]
    monkeypatch.setattr(placed.transfer, "tensors", lambda unit: on_card)
    monkeypatch.setattr(transfer, "has_nonfinite", None)
    monkeypatch.setattr(transfer, "convert", lambda stored, out, factor, special: told.append(special))
    layer.unit.stored.nonfinite[:] = [None] * len(on_card)
    placed.transfer._cast_into(placed.transfer.cast.take(-1, required=True), layer)
    assert told and set(told) == {None}
    placed.close()


def test_codes_are_cast_where_they_are():
    codes = torch.empty(4, 8, dtype=torch.float8_e5m2, device=META)
    assert units._cast_new(codes, 0.5).device == META
    assert units.convert(codes, torch.empty(4, 8, dtype=torch.float8_e5m2, device=META), 1.0, None) == (1.0, None)


@pytest.mark.parametrize("factor", [0.37, torch.rand(70) + 0.1])
def test_numbers_are_multiplied_a_strip_at_a_time_to_the_same_bits(factor, monkeypatch):
    from backend.engine.loading import fp8_storage

    codes = torch.randint(-127, 128, (70, 30), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    want = (codes.float() * (factor[:, None] if isinstance(factor, torch.Tensor) else factor)).to(torch.bfloat16)
    for chunk in (1, 64, 1 << 19):
        monkeypatch.setattr(fp8_storage, "CHUNK", chunk)
        out = torch.empty(70, 30, dtype=torch.bfloat16)
        fp8_storage.multiply(codes, out, factor)
        assert torch.equal(out, want)


def test_room_for_a_gradient_is_pinned_once(monkeypatch):
    weights = {name: torch.nn.Parameter(torch.zeros(8)) for name in "abc"}
    one, made = cpu_offload.OptimizerCpuOffload(weights), []

    class Stream:
        def wait_stream(self, _):
            pass

        def record_event(self):
            return None

    one.stream = Stream()
    real = cpu_offload._in_ram
    monkeypatch.setattr(cpu_offload, "_in_ram", lambda tensor: made.append(1) or real(tensor))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    for _ in range(3):
        for weight in weights.values():
            weight.grad = torch.ones(8)
        one._fetch(list(weights))
    assert len(made) == 3


def test_pieces_of_pinned_ram_are_halved_where_the_system_refuses_and_it_is_not_asked_again():
    asked = []

    def new_piece(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        if nbytes > 1024:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    source = pinned_memory.PinnedPool(torch.device("cpu"), 8000, limit_bytes=10**6, new_piece=new_piece)
    assert all(source.take(500) is not None for _ in range(5))
    assert asked == [4096, 2048, 1024, 1024, 1024]
    assert source.take(2000) is None and source.take(3000) is None  # no piece of that size: not even asked for
    assert asked == [4096, 2048, 1024, 1024, 1024]


@pytest.mark.parametrize(("said", "count"), [("", 1), ("4", 4), ("0", 1), ("x", 1)])
def test_processes_of_a_machine_divide_its_ram(monkeypatch, said, count):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    monkeypatch.setattr(device_memory, "ram", lambda: (1 << 20, 1 << 20))
    assert device_memory.processes_here() == count
    source = pinned_memory.PinnedPool(
        torch.device("cpu"), 1, new_piece=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
    )
    assert sum(source.take(1 << 16) is not None for _ in range(20)) == 8 // count
    share = int(async_writer.RAM_SHARE * (1 << 20) / count)
    assert async_writer.fits_in_ram(share) and not async_writer.fits_in_ram(share + 1)


def test_rows_of_a_product_in_codes_lie_one_after_the_other(monkeypatch):
    """A batch of one that was transposed keeps its strides through reshaping and multiplying."""
    seen = []

    def scaled_mm(rounded, codes, **named):
        seen.append(rounded.stride())
        return torch.zeros(rounded.shape[0], codes.shape[1], dtype=named["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x = torch.randn(1, 32, 33).transpose(1, 2)
    fp8_matmul.product(x, torch.zeros(16, 32).to(torch.float8_e4m3fn), torch.ones(1))
    assert seen == [(32, 1)]


def test_a_device_that_is_named_without_a_number_is_any_of_its_kind():
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = torch.empty(1000, device="cuda:0")
        assert device_memory.is_on(there, torch.device("cuda")) and device_memory.is_on(there, torch.device("cuda:0"))
        assert not device_memory.is_on(there, torch.device("cuda:1")) and not device_memory.is_on(
            there, torch.device("cpu")
        )
        seen = live_tensors._Seen(torch.device("cuda"))
        seen.watch()
        kept = there + 1
        seen.rest()
    assert seen.now == kept.untyped_storage().nbytes() == 4000


@pytest.mark.parametrize("config", [DISK, {"offload_device": "cpu", "onload_device": "cpu", "preparing_device": "cpu"}])
@pytest.mark.parametrize("num_staging", [2, 3])
def test_without_streams_no_second_thread_uses_the_device(small, monkeypatch, config, num_staging):
    """As on Apple's GPUs: the thread reads into RAM, and whoever needs the block copies it."""
    part, build = small()
    plain = build()
    from backend.engine.loading import load

    for name, at in part.tensors.items():
        load.assign(plain, name, load.read_tensor(at))
    reads = []

    class Watched(Reader):
        def read(self, spans, buffer) -> None:
            reads.append((threading.current_thread() is threading.main_thread(), buffer.untyped_storage()._cdata))
            super().read(spans, buffer)

    with fake_card(monkeypatch, 0, early=0.0) as card, monkeypatch.context() as patched:
        for module in (prefetch, pinned_copy):
            patched.setattr(module, "streams_of", lambda device: None)
        patched.setattr(device_memory, "can_pin", lambda device: False)
        module = build()
        placed = placement.place(module, part, VramConfig(**config), device=CARD, reader=Watched(), staging=num_staging)
        placed.onload()
        found = [drawn(module) for _ in range(3)]
        there = {key for key, room in card._rooms.items()}
        assert not any(key in there for main, key in reads if not main)
        placed.close()
    assert any(not main for main, _ in reads) == (config is DISK)
    assert all(torch.equal(one, drawn(plain)) for one in found) and not card.faults


def test_the_next_block_that_is_to_stay_comes_while_one_computes(small, monkeypatch):
    part, build = small()
    ram = VramConfig(offload_device="cpu", onload_device="cpu")
    with fake_card(monkeypatch, 0, early=0.0) as card:
        module, waiting = build(), []
        placed = placement.place(module, part, ram, device=CARD)
        placed.onload()
        for block in module.blocks:
            block.to_q.register_forward_hook(lambda *_: waiting.append(len(card._queue)))
        first = drawn(module)
        assert waiting == [1, 1, 1, 0]  # copies under way while each block computes
        assert placed.resident_blocks() == (0, 1, 2, 3) and torch.equal(drawn(module), first)
        placed.close()
    assert not card.faults


def test_a_machine_of_apples_has_one_device(monkeypatch):
    class Module:
        is_available = staticmethod(lambda: True)

    monkeypatch.setattr(device_memory, "_module", lambda kind: Module)
    assert device_memory.check_device("mps") == device_memory.check_device("mps:0") == torch.device("mps")
