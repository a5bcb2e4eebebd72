"""Tools one after the other, against sums in float64: converted, merged, resized, baked and extracted again, in files of every dtype."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.engine.lora import adapters
from backend.engine.lora.tools.commands import run_tool
from tests.lora_models import build, saved, shared

pytestmark = pytest.mark.torch
STRENGTHS = (1.0, 0.5, -0.3, 0.7)
WAYS = (  # dtype, spelling of a module's tensors, alpha
    (torch.float32, ("transformer.{}.lora_A.weight", "transformer.{}.lora_B.weight", ""), 4.0),
    (torch.float16, ("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight", "lora_unet_{}.alpha"), 1.0),
    (torch.bfloat16, ("diffusion_model.{}.lora_down.weight", "diffusion_model.{}.lora_up.weight", "diffusion_model.{}.alpha"), 7.0),
    (torch.float16, ("transformer.{}.lora_A.weight", "transformer.{}.lora_B.weight", ""), 4.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """The linear layers of the tiny transformer, in float64."""
    layers = {n: m for n, m in shared("tiny_qwen_image").named_modules() if isinstance(m, torch.nn.Linear)}
    return {name: layer.weight.detach().double().clone() for name, layer in layers.items()}


@pytest.fixture(scope="module")
def files(weights, tmp_path_factory) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """(path, what it changes in float64) of four LoRAs on every linear layer."""
    folder, found = tmp_path_factory.mktemp("loras"), []
    for number, (dtype, (inner, outer, alpha), value) in enumerate(WAYS):
        generator, tensors, changes = torch.Generator().manual_seed(number), {}, {}
        for name, weight in weights.items():
            key = name.replace(".", "_") if inner.startswith("lora_unet") else name
            down = (torch.randn(4, weight.shape[1], generator=generator) * 0.3).to(dtype)
            up = (torch.randn(weight.shape[0], 4, generator=generator) * 0.3).to(dtype)
            tensors |= {inner.format(key): down, outer.format(key): up}
            if alpha:
                tensors[alpha.format(key)] = torch.tensor(value)
            changes[name] = value / 4 * (up.double() @ down.double())
        save_file(tensors, folder / f"{number}.safetensors")
        found.append((str(folder / f"{number}.safetensors"), changes))
    return found


@pytest.fixture
def summed(files) -> dict[str, torch.Tensor]:
    names = files[0][1]
    return {
        name: sum(strength * changes[name] for strength, (_, changes) in zip(STRENGTHS, files, strict=True))
        for name in names
    }


def error(path, wanted: dict[str, torch.Tensor], weights) -> float:
    """What a file changes, loaded as any user would, against `wanted`: the share of its length."""
    model = shared("tiny_qwen_image")
    adapters.load(model, path, hot=False)
    after = model.state_dict()
    got = {name: after[f"{name}.weight"].double() - weights[name] for name in wanted}
    adapters.clear(model)
    return share(got, wanted)


def share(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    lost = sum(float((got[name] - wanted[name]).square().sum()) for name in wanted)
    return (lost / sum(float(one.square().sum()) for one in wanted.values())) ** 0.5


@pytest.mark.parametrize("layouts", itertools.permutations(("diffusers", "comfyui", "kohya"), 2))
def test_converted_twice(files, weights, layouts, tmp_path):
    for number, (path, changes) in enumerate(files):
        for layout in layouts:
            out = str(tmp_path / f"{number}-{layout}.safetensors")
            run_tool({"tool": "convert", "path": path, "out": out, "layout": layout, "family": "qwen_image"})
            path = out
        assert error(path, changes, weights) < 1e-6


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-6), ("float16", 4e-4), ("bfloat16", 3e-3)])
def test_merged_resized_baked_and_extracted(files, weights, summed, dtype, rounding, tmp_path):
    def tool(name: str, out: str, **settings) -> dict:
        return run_tool({"tool": name, "out": str(tmp_path / f"{out}.safetensors"), **settings})

    paths = {"paths": [path for path, _ in files], "strengths": list(STRENGTHS)}
    said = tool("merge", "merged", **paths, layout="kohya", family="qwen_image", dtype=dtype)["said"]
    assert error(tmp_path / "merged.safetensors", summed, weights) < rounding
    assert ("rounded to" in said) == (dtype != "float32") and "exactly" in said
    merged = {"path": str(tmp_path / "merged.safetensors"), "family": "qwen_image"}
    tool("resize", "whole", **merged, rank=16)
    assert error(tmp_path / "whole.safetensors", summed, weights) < rounding
    stated = tool("resize", "small", **merged, rank=4)["error"]
    values = [torch.linalg.svdvals(one) for one in summed.values()]
    least = (sum(float(v[4:].square().sum()) for v in values) / sum(float(v.square().sum()) for v in values)) ** 0.5
    assert error(tmp_path / "small.safetensors", summed, weights) == pytest.approx(least, rel=1e-3)
    assert stated == pytest.approx(least, rel=1e-2)

    base = str(saved("tiny_qwen_image", tmp_path / "base"))
    tool("bake", "baked", base=base, **paths)
    baked = load_file(tmp_path / "baked.safetensors")
    assert share({name: baked[f"{name}.weight"].double() - weights[name] for name in summed}, summed) < 1e-6
    tool("extract", "extracted", tuned=str(tmp_path / "baked.safetensors"), base=base, rank=16, dtype=dtype)
    assert error(tmp_path / "extracted.safetensors", summed, weights) < rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_several_fused_into_narrow_weights_are_rounded_once(files, summed, dtype):
    model = build("tiny_qwen_image").to(dtype)
    before = {name: model.get_submodule(name).weight.detach().clone() for name in summed}
    loaded = adapters.Adapters({"dit": model})
    for strength, (path, _) in zip(STRENGTHS, files, strict=True):
        loaded.add(path, strength=strength, hot=False)
    got = {name: model.get_submodule(name).weight.double() - before[name].double() for name in summed}
    nearest = {
        name: (before[name].double() + change).to(dtype).double() - before[name].double()
        for name, change in summed.items()
    }
    assert share(got, nearest) < 1e-4 and share(got, summed) <= share(nearest, summed) * 1.001
    loaded.clear()
    assert all(torch.equal(model.get_submodule(name).weight, before[name]) for name in summed)
