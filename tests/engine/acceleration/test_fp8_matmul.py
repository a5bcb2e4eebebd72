"""FP8 products, computed for real (torch's CPU kernels have them): what is rounded and what is not, when they are used, and who is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.acceleration import fp8_matmul
from backend.engine.devices import capabilities
from backend.engine.loading.fp8_storage import store
from backend.engine.pipeline.pipeline import Pipeline
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest
from tests.families_exam_test import write_lora

pytestmark = pytest.mark.torch
REQUEST = GenerationRequest(prompt="a red apple", width=64, height=64, num_inference_steps=2)
CODES = torch.float8_e4m3fn


@given(some.floats(1e-20, 1e20), some.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_each_row_is_brought_to_fill_the_format_by_a_power_of_two(size, seed):
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed)) * size
    up, down = fp8_matmul.scales(rows)
    largest = (rows * up).abs().amax(1)
    assert bool((largest <= 448).all()) and bool((largest > 223).all())
    assert torch.equal(torch.frexp(up)[0], torch.full((3, 1), 0.5)) and torch.equal(up * down, torch.ones(3, 1))
    assert torch.isfinite(torch.cat(fp8_matmul.scales(torch.zeros(2, 16)))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_product_rounds_the_input_and_nothing_else(dtype, by_row):
    numbers = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 5, 64, generator=numbers) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 5.0])[:, None]).to(dtype)
    codes = torch.empty(32, 64, dtype=CODES)
    exponent = store(torch.randn(32, 64, generator=numbers) * 0.02, codes)
    factor = torch.rand(32, generator=numbers) if by_row else torch.tensor([2.0**-exponent])
    got = fp8_matmul.product(x, codes, factor)
    up, down = fp8_matmul.scales(x.reshape(-1, 64))
    rounded = ((x.reshape(-1, 64).float() * up).to(CODES).float() * down).view(2, 5, 64)
    want = rounded @ (codes.float() * factor[:, None]).t()
    assert got.dtype is dtype and got.shape == (2, 5, 32)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 8e-3}[dtype]
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()) / 10)


@pytest.fixture
def products(monkeypatch) -> list:
    """The products that were computed in FP8."""
    found, real = [], fp8_matmul.product
    monkeypatch.setattr(fp8_matmul, "product", lambda x, *rest: (found.append(x.shape), real(x, *rest))[1])
    return found


def load(folder, **options) -> Pipeline:
    return Pipeline(identify_model(folder, families.FAMILIES), dtype=torch.float32, device="cpu", **options)


def draw(pipeline: Pipeline, **asked) -> numpy.ndarray:
    return numpy.asarray(pipeline.generate(replace(REQUEST, **asked))[0], dtype=float)


def test_a_model_multiplies_in_8_bits_only_when_asked_and_stays_close(deep_qwen, products):
    exact = draw(load(deep_qwen))
    stored = load(deep_qwen, configs={"dit": VramConfig(preparing_dtype="float8_e4m3fn")})
    pipeline = load(deep_qwen, fp8_products=True)
    assert draw(pipeline).tolist() == draw(stored).tolist() and not products  # FP8 storage, exact products
    ours = draw(pipeline, fp8_products=True)
    assert "FP8" in pipeline.notes[0] and not stored.notes
    assert len(products) == 2 * 4 * 14  # steps x blocks x linear layers of a block
    assert 0 < numpy.abs(ours - exact).mean() < 12
    name = "transformer_blocks.1.attn.to_q.weight"
    assert torch.equal(pipeline.placements["dit"].read(name), stored.placements["dit"].read(name))
    assert draw(pipeline).tolist() == draw(stored).tolist() and len(products) == 2 * 4 * 14


def test_hot_loras_act_beside_and_what_needs_the_numbers_gets_them(deep_qwen, products, tmp_path):
    from safetensors.torch import load_file, save_file

    pipeline = load(deep_qwen, fp8_products=True)
    path = write_lora(pipeline, tmp_path / "l.safetensors")
    before, stored = draw(pipeline, fp8_products=True), draw(pipeline)
    receipt = pipeline.add_lora("dit", path)
    assert receipt.mode == "hot"
    effect = numpy.abs(draw(pipeline) - stored).mean()
    assert numpy.abs(draw(pipeline, fp8_products=True) - draw(pipeline)).mean() < effect / 2
    pipeline.remove_lora(receipt)
    assert draw(pipeline, fp8_products=True).tolist() == before.tolist()
    weight = pipeline.placements["dit"].read("transformer_blocks.1.attn.to_q.weight")
    whole = {"transformer_blocks.1.attn.to_q.diff": torch.randn(weight.shape) * 0.1}
    save_file(whole, tmp_path / "diff.safetensors")
    pipeline.add_lora("dit", tmp_path / "diff.safetensors")
    products.clear()
    draw(pipeline, fp8_products=True)
    assert len(products) == 2 * (4 * 14 - 1)  # the layer whose whole matrix is changed computes with numbers
    assert load_file(path)


def test_streamed_from_a_file_that_is_8_bit_already(write_part, products):
    from backend.engine.offload import placement
    from tests.engine.small import Small, inputs

    torch.manual_seed(0)
    module = Small(4).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=0.1)
    keys = [f"blocks.{i}.{leaf}.weight" for i in range(4) for leaf in ("up", "down")]
    part = write_part(module, dtype=torch.bfloat16, scales=dict.fromkeys(keys, 0.001))
    with torch.device("meta"):
        placed_module = Small(4)
    disk = VramConfig(offload_device="disk", onload_device="disk", preparing_device="disk")
    placed = placement.place(placed_module, part, disk, vram_limit_bytes=0, device="cpu")
    fp8_matmul.prepare(placed)
    placed.onload()
    with torch.no_grad():
        stored = placed_module(**inputs())
        placed.set_casting(whole=False, codes=fp8_matmul.chosen)
        ours = placed_module(**inputs())
    assert len(products) == 8 and placed.moved_bytes > 0
    assert 0 < float((ours - stored).norm() / stored.norm()) < 0.1
    with pytest.raises(Trouble, match="no gradient"):
        placed_module.blocks[0](
            *(torch.randn(1, 3, 48, dtype=torch.bfloat16, requires_grad=True),) * 2, time=torch.zeros(1, 48).bfloat16()
        )
    placed.close()


def test_who_is_refused(deep_qwen, monkeypatch):
    with pytest.raises(Trouble, match="loaded without fp8_products"):
        draw(load(deep_qwen), fp8_products=True)
    with pytest.raises(Trouble, match="stored as float8_e4m3fn"):
        load(deep_qwen, fp8_products=True, configs={"dit": VramConfig(preparing_dtype="float8_e5m2")})
    assert "NVIDIA" in capabilities.why_no_fp8_products(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GeForce RTX 3060")
    with pytest.raises(Trouble, match=r"3060 has compute capability 8\.6"):
        fp8_matmul.check(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    fp8_matmul.check(torch.device("cuda", 0))
