"""Fusing adds the change in float32, or so near to it that the weight's own rounding hides it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from backend.engine.lora import fuse
from backend.engine.lora.algorithms.delta import Change, LowRank

pytestmark = pytest.mark.torch


def factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return tuple((torch.randn(shape, generator=numbers) * 0.05).to(dtype) for shape in ((256, 16), (16, 192)))


@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, 16), (torch.float16, 48), (torch.float32, 48)])
def test_factors_of_more_digits_are_sums_of_bfloat16_ones(dtype, columns):
    up, down = factors(dtype)
    ups, downs = fuse._in_bf16(up, down)
    assert ups.dtype is downs.dtype is torch.bfloat16 and ups.shape[1] == downs.shape[0] == columns
    error = (ups.double() @ downs.double() - up.double() @ down.double()).abs()
    assert bool((error <= 2**-16 * (up.double().abs() @ down.double().abs())).all())


@pytest.mark.parametrize("products", [True, False], ids=["bfloat16 products", "strips"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_fused_weight_is_the_exact_sum_rounded_once(monkeypatch, dtype, products):
    if products and not fuse._has_bf16_products():
        pytest.skip("this processor has no bfloat16 products")
    monkeypatch.setattr(fuse, "_has_bf16_products", lambda: products)
    up, down = factors(dtype)
    weight = (torch.randn(256, 192, generator=torch.Generator().manual_seed(1)) * 0.05).to(torch.bfloat16)
    exact = weight.double() + 0.7 * 0.5 * (up.double() @ down.double())
    fuse.fuse(weight, Change("x", "weight", LowRank(up, down, 0.5)), 0.7)
    differ = weight != exact.to(torch.bfloat16)
    assert differ.double().mean() < 1e-3  # numbers that lie half-way between two
    summands = up.double().abs() @ down.double().abs()  # where weight and change cancel, the error is theirs
    assert bool(((weight.double() - exact).abs() <= 1.001 * 2.0**-8 * exact.abs() + 0.35 * 2**-16 * summands).all())
