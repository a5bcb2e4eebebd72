"""Each of two ways computes the same; which is quicker is for a measurement on a card to say."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.acceleration import fp8_matmul
from backend.engine.devices import device_memory
from backend.engine.offload import placement
from backend.engine.pipeline import denoise
from backend.engine.pipeline.pipeline import Pipeline
from backend.schema import measured_choices
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble
from tests.engine.small import inputs

pytestmark = pytest.mark.torch
DISK = VramConfig(offload_device="disk", onload_device="disk", preparing_device="disk")


def test_ways_are_read_and_what_is_none_is_refused(monkeypatch):
    monkeypatch.delenv("LOFT_WAYS", raising=False)
    assert measured_choices.chosen() == measured_choices.Ways()
    assert all(getattr(measured_choices.Ways(), name) == known[0] for name, known in measured_choices.CHOICES.items())
    monkeypatch.setenv("LOFT_WAYS", "guidance=apart, fp8_scales=rows")
    assert measured_choices.chosen() == replace(measured_choices.Ways(), guidance="apart", fp8_scales="rows")
    for text in ("guidance", "guidance=both", "speed=high"):
        monkeypatch.setenv("LOFT_WAYS", text)
        with pytest.raises(Trouble, match=text):
            measured_choices.chosen()


@pytest.mark.parametrize("count", [1, 32])
def test_a_product_whose_kernel_applies_the_scales_is_the_same_within_rounding(count):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 64, generator=generator).to(torch.bfloat16)
    codes = torch.randn(32, 64, generator=generator).to(torch.float8_e4m3fn)
    factor = torch.rand(count, generator=generator) + 0.1
    apart, by_rows = (fp8_matmul.product(x, codes, factor, by_rows=way) for way in (False, True))
    assert apart.shape == by_rows.shape and apart.dtype == by_rows.dtype
    assert (apart - by_rows).float().norm() < 2**-7 * apart.float().norm()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_layers_that_cast_nothing_need_not_be_watched(small, monkeypatch, stored):
    """In bfloat16 no layer casts; from float32 all do."""
    part, build = small(stored)
    found, hooks = [], []
    for way in measured_choices.CHOICES["hooks"]:
        monkeypatch.setenv("LOFT_WAYS", f"hooks={way}")
        module = build()
        asked = replace(DISK, computation_dtype="bfloat16")
        placed = placement.place(module, part, asked, device="cpu")
        placed.onload()
        with torch.no_grad():
            found.append(module(**inputs()))
        hooks.append(len(placed._hooks))
        placed.close()
    assert torch.equal(*found)
    assert hooks[1] == hooks[0] if stored is torch.float32 else hooks[1] < hooks[0] / 3


def test_the_autoencoder_decodes_the_same_with_pixels_side_by_side(tiny_qwen, monkeypatch):
    spec = identify_model(tiny_qwen, families.FAMILIES)
    pipeline = Pipeline(replace(spec, parts={"vae": spec.parts["vae"]}), dtype=torch.float32, device="cpu")
    latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for way in measured_choices.CHOICES["vae"]:
        monkeypatch.setenv("LOFT_WAYS", f"vae={way}")
        with torch.no_grad():
            found += [pipeline.family.decode(pipeline.parts, latents) for _ in range(2)]
    assert torch.equal(found[2], found[3]) and (found[0] - found[2]).abs().max() < 1e-4
    pipeline.close()


def test_guidance_goes_apart_only_on_a_card_where_nothing_is_fetched(monkeypatch):
    pipeline = type("P", (), {"device": torch.device("cuda", 0)})()
    monkeypatch.setattr(denoise.oom_fallback, "staying_of", lambda pipeline, part: (60, pipeline.staying))
    for way, device, staying, apart in (
        ("apart", torch.device("cuda", 0), 60, True),
        ("apart", torch.device("cuda", 0), 59, False),
        ("apart", device_memory.RAM, 60, False),
        ("together", torch.device("cuda", 0), 60, False),
    ):
        monkeypatch.setenv("LOFT_WAYS", f"guidance={way}")
        pipeline.device, pipeline.staying = device, staying
        assert denoise._quicker_apart(pipeline) is apart
