"""8-bit storage: exact for every code, close for every weight, and faster than torch's own cast."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from backend.engine.loading import fp8_storage

pytestmark = pytest.mark.torch

FORMATS = list(fp8_storage.FORMATS)


def all_codes(name: str) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(fp8_storage.FORMATS[name].dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_all_256_codes_as_torch_casts_them(name, dtype):
    codes = all_codes(name)
    got = fp8_storage.cast(codes, torch.empty(256, dtype=dtype))
    want = codes.to(torch.float32).to(dtype)
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    finite = ~torch.isnan(want)
    assert torch.equal(got[finite], want[finite])
    zeros = want == 0
    assert torch.equal(torch.signbit(got[zeros]), torch.signbit(want[zeros]))


@pytest.mark.parametrize("name", FORMATS)
def test_codes_that_are_no_number_are_found(name):
    codes = all_codes(name)
    nonfinite = ~torch.isfinite(codes.to(torch.float32))
    assert fp8_storage.has_nonfinite(codes)
    assert not fp8_storage.has_nonfinite(codes[~nonfinite])
    assert sorted(fp8_storage.FORMATS[name].nonfinite) == sorted(codes.view(torch.int8)[nonfinite].tolist())


@pytest.mark.parametrize("factor", [2.0**-9, 0.00317, 3.0, -0.5])
@pytest.mark.parametrize("name", FORMATS)
def test_a_factor_rounds_once(name, factor):
    codes = all_codes(name)
    factor = float(torch.tensor(factor))  # as a file holds it
    got = fp8_storage.cast(codes, torch.empty(256, dtype=torch.bfloat16), factor=factor)
    want = codes.to(torch.float32).mul_(factor).to(torch.bfloat16)
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_a_factor_for_each_row_rounds_once():
    codes = all_codes("float8_e4m3fn").view(8, 32)
    factors = torch.rand(8) + 0.1
    got = fp8_storage.cast(codes, torch.empty(8, 32, dtype=torch.bfloat16), factor=factors)
    want = (codes.to(torch.float32) * factors[:, None]).to(torch.bfloat16)
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "bound"), [("float8_e4m3fn", 2**-4), ("float8_e4m3fnuz", 2**-4), ("float8_e5m2", 2**-3)]
)
def test_storing_keeps_what_the_format_can(name, bound, source):
    """Weights near 0.02 lie among e4m3fn's subnormal numbers; the power of two brings them into its range."""
    weight = (torch.randn(300, 700, generator=torch.Generator().manual_seed(0)) * 0.02).to(source)
    codes = torch.empty(300, 700, dtype=fp8_storage.FORMATS[name].dtype)
    exponent = fp8_storage.store(weight, codes)
    back = fp8_storage.cast(codes, torch.empty(300, 700, dtype=torch.bfloat16), factor=2.0**-exponent)
    normal = weight.abs() > weight.abs().max() * 2**-10
    assert ((back.float() - weight.float()).abs() <= bound * weight.float().abs() * 1.001)[normal].all()
    plain = weight.to(fp8_storage.FORMATS[name].dtype).float()
    assert (back.float() - weight.float()).norm() <= (plain - weight.float()).norm()


def test_storing_odd_tensors():
    dtype = torch.float8_e4m3fn
    for weight in (torch.zeros(4), torch.empty(0), torch.tensor([float("nan"), 1.0]), torch.tensor([1e-30, 0.0])):
        codes = torch.empty(weight.shape, dtype=dtype)
        exponent = fp8_storage.store(weight, codes)
        back = fp8_storage.cast(codes, torch.empty(weight.shape, dtype=torch.float32), factor=2.0**-exponent)
        assert torch.equal(torch.isnan(back), torch.isnan(weight))
        assert (back[weight == 0] == 0).all()


def test_the_cast_beats_torchs():
    codes = torch.randint(0, 120, (1 << 22,), dtype=torch.uint8).view(torch.float8_e4m3fn)
    out = torch.empty(codes.shape, dtype=torch.bfloat16)

    def seconds(cast) -> float:
        times = []
        for _ in range(15):
            begin = time.process_time()
            cast()
            times.append(time.process_time() - begin)
        return min(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours, theirs = seconds(lambda: fp8_storage.cast(codes, out, nonfinite=False)), seconds(lambda: out.copy_(codes))
    finally:
        torch.set_num_threads(threads)
    assert ours < theirs / 1.5  # half as long where nothing else computes
