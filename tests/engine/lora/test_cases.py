"""Files of many dialects with exactly known answers: added into the weights, and beside them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.engine.lora import adapters
from backend.pipelines import FluxImagePipeline, ModelConfig, QwenImagePipeline
from backend.schema.messages import Trouble
from tests.lora_models import CASES, assert_acts_as, assert_changed_by, same, shared, snapshot

pytestmark = pytest.mark.torch
ALL = {path.stem: json.loads(path.read_text()) for path in sorted(CASES.glob("*.json"))}
DELTAS = [name for name, case in ALL.items() if case["outcome"] == "delta"]
ERRORS = [name for name, case in ALL.items() if case["outcome"] == "error"]
CHECKPOINTS = [name for name, case in ALL.items() if case["outcome"] == "weights"]
KINDS = {
    "incomplete_pair": "incomplete_pair",
    "no_keys_match": "no_keys_match",
    "corrupt_file": "damaged",
    "shape_mismatch": "shape_mismatch",
}


@pytest.mark.parametrize("name", DELTAS)
def test_into_the_weights(name):
    case, model = ALL[name], shared(ALL[name]["model"])
    before, expected = snapshot(model), load_file(CASES / case["expected_file"])
    receipt = adapters.load(model, CASES / case["file"], strength=case["strength"], hot=False)
    try:
        assert_changed_by(model, before, expected)
        assert receipt.mode == "cold" and receipt.layers_applied > 0
        _check_report(case, receipt)
    finally:
        adapters.clear(model)
    assert same(model, before)


@pytest.mark.parametrize("name", DELTAS)
def test_beside_the_weights(name):
    case, model = ALL[name], shared(ALL[name]["model"])
    before, expected = snapshot(model), load_file(CASES / case["expected_file"])
    receipt = adapters.load(model, CASES / case["file"], strength=case["strength"], hot=True)
    try:
        assert receipt.mode == "hot"
        assert same(model, before)
        assert_acts_as(model, expected)
        adapters.of(model).set_strength(receipt, -0.5)
        assert_acts_as(model, expected, strength=-0.5)
    finally:
        adapters.clear(model)
    assert not any(hasattr(module, "_adapters") for module in model.modules())


def _check_report(case, receipt):
    report = case.get("must_report", {})
    for module in report.get("unmatched_modules", ()):
        assert module in receipt.unused
    for word in report.get("trigger_words", ()):
        assert any(word in note for note in receipt.notes)
    assert receipt.layers_found == receipt.layers_applied + len(report.get("unmatched_modules", ()))


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_change_nothing(name, hot):
    case, model = ALL[name], shared(ALL[name]["model"])
    before = snapshot(model)
    with pytest.raises(Trouble) as caught:
        adapters.load(model, CASES / case["file"], hot=hot)
    assert caught.value.kind == KINDS[case["error"]["kind"]]
    assert same(model, before) and not adapters.of(model).loaded


def test_errors_say_what_people_need():
    model = shared("tiny_qwen_image")

    def sentence(name: str) -> str:
        with pytest.raises(Trouble) as caught:
            adapters.load(model, CASES / f"{name}.safetensors")
        return str(caught.value)

    assert "transformer_blocks.0.attn.to_out.0" in sentence("err_missing_up")
    assert "SDXL" in sentence("err_sdxl_on_qwen") and "Qwen-Image" in sentence("err_sdxl_on_qwen")
    assert "9216" in sentence("err_truncated") and "1000" in sentence("err_truncated")
    assert "64" in sentence("err_wrong_width") and "48" in sentence("err_wrong_width")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(name, dtype):
    case = ALL[name]
    pipe = QwenImagePipeline.from_pretrained(
        torch_dtype=dtype,
        device="cpu",
        model_configs=[ModelConfig(path=str(CASES / case["file"]))],
        tokenizer_config=None,
    )
    expected, weights = load_file(CASES / case["expected_file"]), pipe.dit.state_dict()
    assert set(weights) == set(expected)
    for key, tensor in weights.items():
        wrong = float((tensor.double() - expected[key].double()).abs().max())
        assert wrong <= (1e-6 if dtype == torch.float32 else 0.004) * float(expected[key].abs().max()), key


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize(
    ("kind", "model", "case"),
    [
        (QwenImagePipeline, "tiny_qwen_image", "qwen_kohya_musubi"),
        (QwenImagePipeline, "tiny_qwen_image", "qwen_dora_in"),
        (FluxImagePipeline, "tiny_flux", "flux_kohya_fused"),
    ],
)
def test_through_a_pipeline(kind, model, case, hot):
    path = CASES / "models" / model / "diffusion_pytorch_model.safetensors"
    pipe = kind.from_pretrained(
        torch_dtype=torch.float32, device="cpu", model_configs=[ModelConfig(path=str(path))], tokenizer_config=None
    )
    before, expected = snapshot(pipe.dit), load_file(CASES / f"{case}.expected.safetensors")
    pipe.load_lora(pipe.dit, str(CASES / f"{case}.safetensors"), hotload=hot)
    if hot:
        assert_acts_as(pipe.dit, expected)
    else:
        assert_changed_by(pipe.dit, before, expected)
    pipe.clear_lora()
    assert same(pipe.dit, before)


@pytest.mark.parametrize("form", ["one factor", "a factor a row", "int8", "a factor a block", "int8 by blocks"])
def test_newer_scaled_checkpoints(form, tmp_path):
    """ComfyUI's newer names (`weight_scale`, `input_scale`, `comfy_quant`), under its prefix."""
    weights, expected, file = (
        load_file(CASES / "models" / "tiny_qwen_image" / "diffusion_pytorch_model.safetensors"),
        {},
        {},
    )
    for name, tensor in weights.items():
        key = f"model.diffusion_model.{name}"
        if not (name.startswith("transformer_blocks.") and name.endswith(".weight") and tensor.ndim == 2):
            file[key] = expected[name] = tensor
            continue
        integers, blocks = form.startswith("int8"), "block" in form
        largest = tensor.abs().amax(1, keepdim=True) if form == "a factor a row" else tensor.abs().max()
        if blocks:
            largest = tensor.unflatten(1, (-1, 16)).unflatten(0, (-1, 8)).abs().amax((1, 3))
        scale = largest / (127 if integers else 448)
        whole = torch.kron(scale, torch.ones(8, 16)) if blocks else scale
        codes = (tensor / whole).round().to(torch.int8) if integers else (tensor / whole).to(torch.float8_e4m3fn)
        layer, kind = key.removesuffix(".weight"), "float8_e4m3fn"
        if integers:
            kind = "int8_blockwise" if blocks else "int8_tensorwise"
        file |= {key: codes, f"{layer}.weight_scale": scale, f"{layer}.input_scale": torch.tensor(1.0)}
        file[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)
        expected[name] = codes.double() * whole.double()
    save_file(file, tmp_path / "m.safetensors")
    pipe = QwenImagePipeline.from_pretrained(
        torch_dtype=torch.float32,
        device="cpu",
        model_configs=[ModelConfig(path=str(tmp_path / "m.safetensors"))],
        tokenizer_config=None,
    )
    loaded = pipe.dit.state_dict()
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert float((loaded[name].double() - tensor).abs().max()) <= 1e-6 * float(tensor.abs().max()), name
    before = snapshot(pipe.dit)
    pipe.load_lora(pipe.dit, str(CASES / "qwen_kohya_musubi.safetensors"), hotload=False)
    assert_changed_by(pipe.dit, before, load_file(CASES / "qwen_kohya_musubi.expected.safetensors"), 2e-5)
    pipe.clear_lora()
    assert same(pipe.dit, before)
