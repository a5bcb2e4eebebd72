"""What of residence needs a card: the same answers in every state, limits and pinned RAM kept, FP8 cast exactly. `run.py` prints the figures."""

from __future__ import annotations

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch import nn

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.devices import device_memory
from backend.engine.loading import fp8_storage, load
from backend.engine.offload import placement
from backend.engine.pipeline.pipeline import Pipeline
from backend.schema.memory_plan import VramConfig
from backend.schema.request import GenerationRequest
from tests.engine.offload.test_autograd import adapt
from tests.engine.small import inputs
from tests.families_exam_test import write_lora

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

FP8 = "float8_e4m3fn"
RAM = {"offload_device": "cpu", "onload_device": "cpu"}
DISK = {"offload_device": "disk", "onload_device": "disk"}
STORED_FP8 = {"offload_dtype": FP8, "onload_dtype": FP8, "preparing_dtype": FP8}
CONFIGS = {
    "resident": {},
    "part offload": {"offload_device": "cpu"},
    "streamed from RAM": {**RAM, "preparing_device": "cpu"},
    "streamed from disk": {**DISK, "preparing_device": "disk"},
    "disk to RAM, streamed": {"offload_device": "disk", "onload_device": "cpu", "preparing_device": "cpu"},
    "some stay": RAM,
    "some stay, the others from disk": DISK,
    "FP8 on the card": {"offload_device": "cpu", **STORED_FP8},
    "FP8 streamed": {**RAM, **STORED_FP8, "preparing_device": "cpu"},
    "disk, FP8 stays": {**DISK, "preparing_dtype": FP8},
}


# bytes of grace: what a placement makes beside blocks, such as the number that stands for weights that are away, is less
GRACE = 1 << 16


def on(device, values: dict) -> dict:
    return {name: value.to(device) for name, value in values.items()}


def placed_on(device, module: nn.Module, part, config: dict, limit=None) -> placement.Placement:
    """`limit`: bytes beside what the device holds already, as a user's limit is meant."""
    if limit:
        limit += device_memory.allocated(device) if device.type != "cpu" else 0
    return placement.place(module, part, VramConfig(**config), vram_limit_bytes=limit, device=device)


@pytest.mark.parametrize("limit", [None, 0, 200_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_answers_and_gradients_are_the_resident_modules(small, device, name, limit):
    part, build = small()
    module = build()
    placed = placed_on(device, module, part, CONFIGS[name], limit)
    with torch.no_grad():
        first = module(**on(device, inputs()))
    placed.onload()
    with torch.no_grad():
        for _ in range(3):
            got = module(**on(device, inputs()))
    plain = build()
    for key in part.tensors:
        load.assign(plain, key, placed.read(key))
    with torch.no_grad():
        want = plain(**on(device, inputs()))
    assert torch.equal(got, want)
    assert "FP8" in name or torch.equal(first, want)
    found = []
    for one in (module, plain.requires_grad_(False)):
        added = adapt(one)
        for adapter in added:
            adapter.data = adapter.data.to(device)
        one(**on(device, inputs(2))).float().square().mean().backward()
        found.append([adapter.grad for adapter in added])
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))
    placed.close()


@pytest.mark.parametrize("name", ["part offload", "streamed from RAM", "streamed from disk", "disk to RAM, streamed"])
def test_pictures_are_the_resident_models_with_a_lora_beside_the_weights_too(tiny_qwen, tmp_path, device, name):
    request = GenerationRequest(prompt="a red apple", width=64, height=64, num_inference_steps=2, seed=1)
    pictures = {}
    for config in ({}, CONFIGS[name]):
        spec = identify_model(tiny_qwen, families.FAMILIES)
        configs = dict.fromkeys(spec.parts, VramConfig(**config))
        pipeline = Pipeline(spec, dtype=torch.bfloat16, device=device, configs=configs)
        plain = numpy.asarray(pipeline.generate(request)[0])
        pipeline.add_lora("dit", write_lora(pipeline, tmp_path / "lora.safetensors"), strength=0.7, hot=True)
        pictures[len(pictures)] = plain, numpy.asarray(pipeline.generate(request)[0])
        pipeline.close()
    for resident, placed in zip(pictures[0], pictures[1], strict=True):
        assert numpy.array_equal(resident, placed)
    assert not numpy.array_equal(*pictures[0])


class Wide(nn.Module):
    """Eight blocks of one matrix; on a card 128 MiB each."""

    def __init__(self, width: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            for _ in range(2):
                x = torch.nn.functional.rms_norm(block(x), x.shape[-1:])
        return x


@pytest.fixture
def wide(write_part, device):
    """wide() -> a new `Wide` on meta; wide.part: where its weights are stored."""
    width = 512 if device.type == "cpu" else 8192

    def build():
        with torch.device("meta"):
            return Wide(width)

    build.width, build.part = width, write_part(Wide(width), dtype=torch.bfloat16)
    return build


def test_the_peak_stays_below_the_limit(wide, device):
    limit, module = wide.part.nbytes // 2 + GRACE, wide()
    x = torch.randn(16, wide.width, dtype=torch.bfloat16, device=device)
    x @ x.t()  # the products' own workspace is no part of it
    device_memory.empty_cache(device)
    before, peak = device_memory.allocated(device), device_memory.Peak(device)
    placed = placed_on(device, module, wide.part, DISK, limit)
    placed.onload()
    with torch.no_grad():
        for _ in range(3):
            module(x)
    print(f"limit {limit >> 20} MiB, peak {(peak.look() - before) >> 20} MiB, stay {placed.resident_blocks()}")
    assert len(placed.resident_blocks()) == 2  # two of four that fit are staging
    if device.type != "cpu":  # the process' other memory comes and goes there
        assert peak.look() - before <= limit + 16 * x.numel() * 2
        placed.close()
        device_memory.empty_cache(device)
        assert device_memory.allocated(device) <= before
    placed.close()


def test_pinned_ram_is_little_more_than_the_part_and_given_back(wide, device):
    if not device_memory.can_pin(device):
        pytest.skip("nothing is pinned for this device")
    device_memory.empty_cache(device)
    before = device_memory.pinned(device)
    placed = placed_on(device, wide(), wide.part, {**RAM, "preparing_device": "cpu"})
    placed.onload()
    held = device_memory.pinned(device) - before
    print(f"{wide.part.nbytes >> 20} MiB in RAM, {held >> 20} MiB pinned")
    assert device.type != "cuda" or wide.part.nbytes <= held <= 1.15 * wide.part.nbytes
    assert all(unit.stored.buffer.is_pinned() for unit in placed.blocks)
    placed.close()
    device_memory.empty_cache(device)
    assert device_memory.pinned(device) == before


@pytest.mark.parametrize("name", fp8_storage.FORMATS)
def test_fp8_is_cast_and_rounded_on_the_card_as_on_the_cpu(device, name):
    form = fp8_storage.FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8).view(form.dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        there = fp8_storage.cast(codes.to(device), torch.empty(256, dtype=dtype, device=device), factor=0.25)
        here = fp8_storage.cast(codes, torch.empty(256, dtype=dtype), factor=0.25)
        assert torch.equal(there.cpu().nan_to_num(7.0, 8.0, 9.0), here.nan_to_num(7.0, 8.0, 9.0)), dtype
    weight = torch.randn(300, 100, generator=torch.Generator().manual_seed(0)).mul(0.02).to(torch.bfloat16)
    found = [torch.empty(weight.shape, dtype=form.dtype, device=where) for where in ("cpu", device)]
    exponents = [fp8_storage.store(weight.to(one.device), one) for one in found]
    assert exponents[0] == exponents[1]
    assert torch.equal(found[0].view(torch.uint8), found[1].cpu().view(torch.uint8))
