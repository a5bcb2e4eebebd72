"""Compiled blocks, FP8 products and cached steps on a card: right everywhere, timed on a card only; prints what was measured."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.family import DrawSettings
from backend.engine.acceleration import compile_blocks, fp8_matmul
from backend.engine.acceleration.first_block_cache import StepCache
from backend.engine.devices import capabilities
from backend.engine.offload import placement
from backend.families import qwen_image
from backend.schema.memory_plan import VramConfig
from tests.gpu.test_streaming_on_card import RAM, seconds_of

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

FP8 = "float8_e4m3fn"
STATES = {
    "resident": {"offload_device": "cpu"},
    "streamed": {**RAM, "preparing_device": "cpu"},
    "FP8": {"offload_device": "cpu", "offload_dtype": FP8, "onload_dtype": FP8, "preparing_dtype": FP8},
}
LISTS = ("transformer_blocks",)


@pytest.fixture
def network(write_part, device):
    """network(config) -> (module placed on the device, its placement): four blocks of Qwen-Image, of half the true width on a card."""
    from diffusers import QwenImageTransformer2DModel

    heads = 1 if device.type == "cpu" else 12
    config = {"num_layers": 4, "num_attention_heads": heads, "joint_attention_dim": 64}
    torch.manual_seed(0)
    whole = QwenImageTransformer2DModel(**config).to(torch.bfloat16)
    part = write_part(whole, dtype=torch.bfloat16)
    placements = []

    def make(states: dict):
        with torch.device("meta"):
            module = QwenImageTransformer2DModel(**config)
        module.pos_embed = whole.pos_embed
        placed = placement.place(module.requires_grad_(False), part, VramConfig(**states), device=device)
        placements.append(placed)
        placed.onload()
        return module, placed

    yield make
    for placed in placements:
        placed.close()


def step(module, device, x=None):
    """One denoising step of two halves at 1024 x 1024 (a card) or 64 x 64."""
    side = 8 if device.type == "cpu" else 128
    numbers = torch.Generator().manual_seed(1)
    shape = (2, 16, side, side)
    x = torch.randn(shape, generator=numbers).to(device, torch.bfloat16) if x is None else x
    encodings = [{"embeds": torch.randn(length, 64, generator=numbers)} for length in (24, 9)]
    cond = qwen_image.collate(encodings, DrawSettings(64, 64), device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        return qwen_image.predict({"dit": module}, x, torch.tensor([0.7, 0.7], device=device), cond)


def apart(ours: torch.Tensor, other: torch.Tensor) -> float:
    return float((ours.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("states", STATES)
def test_compiled_blocks_answer_as_plain_ones(network, device, states, monkeypatch):
    if capabilities.why_no_compiler(device):
        pytest.skip(capabilities.why_no_compiler(device))
    if device.type == "cpu":
        monkeypatch.setattr(compile_blocks, "BACKEND", "eager")
    module, placed = network(STATES[states])
    plain = step(module, device)
    before = seconds_of(device, lambda: step(module, device))
    placed.set_casting(whole=True, codes=lambda unit: frozenset())
    placed.onload()
    compile_blocks.compile_blocks(module, LISTS)
    ours = step(module, device)
    after = seconds_of(device, lambda: step(module, device))
    print(f"{states}: plain {before:.3f} s, compiled {after:.3f} s, apart {apart(ours, plain):.1e}")
    assert apart(ours, plain) < 1e-2  # a few roundings of bfloat16
    assert device.type == "cpu" or after <= 1.1 * before


def test_a_product_of_codes_is_right(device):
    if capabilities.why_no_fp8_products(device):
        pytest.skip(capabilities.why_no_fp8_products(device))
    x = torch.randn(33, 256, device=device, dtype=torch.bfloat16) * torch.rand(33, 1, device=device).exp2_().bfloat16()
    codes = torch.randn(512, 256, device=device).to(torch.float8_e4m3fn)
    for factor in (torch.tensor([0.25], device=device), torch.rand(512, device=device)):
        want = x.float() @ (codes.float() * factor[:, None]).t()
        assert apart(fp8_matmul.product(x, codes, factor), want) < 0.04  # of rounding x to 8 bits


def test_fp8_products_are_close_and_quicker(network, device):
    if capabilities.why_no_fp8_products(device):
        pytest.skip(capabilities.why_no_fp8_products(device))
    module, _ = network(STATES["resident"])
    exact, plain = step(module, device), seconds_of(device, lambda: step(module, device))
    module, placed = network(STATES["FP8"])
    stored = step(module, device)
    fp8_matmul.prepare(placed)
    placed.set_casting(whole=False, codes=fp8_matmul.chosen)
    placed.onload()
    ours, quick = step(module, device), seconds_of(device, lambda: step(module, device))
    print(
        f"bfloat16 {plain:.3f} s, FP8 products {quick:.3f} s; from bfloat16: storage {apart(stored, exact):.3f}, products {apart(ours, exact):.3f}"
    )
    assert apart(stored, exact) < 0.06 and apart(ours, exact) < 0.12


def test_a_cached_step_fetches_one_block(network, device):
    module, placed = network(STATES["streamed"])
    cache = StepCache(qwen_image, module, 1e9)
    for skipped in (0, 1, 2):
        before = placed.moved_bytes
        with cache.step():
            step(module, device)
        assert cache.num_skipped == skipped
        moved = placed.moved_bytes - before
    print(f"bytes moved in a cached step: {moved / 2**20:.0f} MiB")
    assert moved <= 0.5 * sum(unit.raw.nbytes for unit in placed.blocks)
