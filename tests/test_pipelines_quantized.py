"""`ModelConfig(quantize=..., state_dict=..., clear_parameters=...)`: what DiffSynth-Studio's scripts mean by them, from loading to pictures."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numpy
import pytest

from backend.schema.messages import Trouble
from tests.test_pipelines import STATES, write_lora

pytestmark = pytest.mark.torch
KEPT = ["img_mod.1", "txt_mod.1", "norm_out.linear", "img_in", "txt_in", "proj_out"]
PACKAGES = [("int8", ""), ("bitsandbytes_nf4", "bitsandbytes"), ("torchao_int8_w8a16", "torchao")]
PACKAGES += [("comfy_kitchen_int8_w8a8", "comfy_kitchen"), ("bitsandbytes_int8", "bitsandbytes")]
SMALL = {"seed": 1, "width": 64, "height": 64, "num_inference_steps": 2, "cfg_scale": 1.0}


@pytest.fixture(params=[name for name, _ in PACKAGES])
def method(request) -> str:
    package = dict(PACKAGES)[request.param]
    if package:
        pytest.importorskip(package)
    return request.param


def pipeline(folder: Path, *, dit=None, limit=None, **said):
    """A pipeline of `folder` whose transformer is loaded as `said`, from the file `dit` if one is given."""
    import torch

    from backend.pipelines import ModelConfig, QwenImagePipeline

    return QwenImagePipeline.from_pretrained(
        torch_dtype=torch.bfloat16,
        device="cpu",
        model_configs=[
            ModelConfig(path=dit or folder / "transformer", **said),
            ModelConfig(path=folder / "text_encoder"),
            ModelConfig(path=folder / "vae"),
        ],
        tokenizer_config=ModelConfig(path=folder / "tokenizer"),
        vram_limit=limit,
    )


def picture(pipe, **more) -> numpy.ndarray:
    return numpy.asarray(pipe("a cat", **{**SMALL, **more}), dtype=float)


def config(method: str, **said):
    from backend.pipelines import QuantizeConfig

    return QuantizeConfig(method=method, exclude_modules=KEPT, **said)


def test_quantized_on_load_saved_and_loaded_again(tiny_qwen, tmp_path, method):
    from backend.catalog.models.identify import identify_files, identify_model
    from backend.engine.quantization.layers import is_quantized
    from backend.families import FAMILIES
    from backend.pipelines import ModelConfig, save_quantized_model

    plain, quantized = picture(pipeline(tiny_qwen)), pipeline(tiny_qwen, quantize=config(method))
    layers = {name: layer for name, layer in quantized.dit.named_modules() if is_quantized(layer)}
    assert "transformer_blocks.0.attn.to_q" in layers and not any(name.endswith(tuple(KEPT)) for name in layers)
    assert not quantized.dit.vram_management_enabled
    drawn = picture(quantized)
    assert 0 < numpy.abs(drawn - plain).mean() < (25 if "nf4" in method else 8)

    file = tmp_path / "saved" / "transformer.safetensors"
    digest = save_quantized_model(ModelConfig(path=tiny_qwen / "transformer", quantize=config(method)), file, "cpu")
    assert len(digest) == 64 and (file.parent / "config.json").is_file() and len(list(file.parent.iterdir())) == 2
    again = pipeline(tiny_qwen, dit=file, quantize=config(method, load_prequantized=True))
    assert numpy.array_equal(picture(again), drawn)
    assert sum(map(is_quantized, again.dit.modules())) == len(layers)

    spec = identify_files([file], FAMILIES)  # as any other file: recognised, and read in full without being asked
    assert spec.family == "qwen_image" and list(spec.parts) == ["dit"]
    assert spec.parts["dit"].nbytes < 0.8 * identify_model(tiny_qwen, FAMILIES).parts["dit"].nbytes
    whole = picture(pipeline(tiny_qwen, dit=file))
    assert numpy.abs(whole - drawn).mean() < 3
    once = pipeline(tiny_qwen, dit=file, quantize=config(method, load_prequantized=True, mode="dequant_once"))
    assert numpy.array_equal(picture(once), whole)
    assert not any(map(is_quantized, once.dit.modules()))


def test_quantized_and_dequantized_at_once_is_a_plain_model(tiny_qwen, tmp_path):
    import torch

    from backend.engine.quantization.layers import is_quantized

    quantized = pipeline(tiny_qwen, quantize=config("int8"))
    once = pipeline(tiny_qwen, quantize=config("int8", mode="dequant_once"))
    assert not any(map(is_quantized, once.dit.modules()))
    assert numpy.abs(picture(once) - picture(quantized)).mean() < 1  # one rounding more, of the bias
    before = {name: tensor.clone() for name, tensor in once.dit.state_dict().items()}
    write_lora(once, tmp_path / "a.safetensors")
    assert once.load_lora(once.dit, tmp_path / "a.safetensors").mode == "cold"
    once.clear_lora()
    after = once.dit.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_mixed_by_layer(tiny_qwen, tmp_path):
    from backend.pipelines import MixedQuantizeConfig, ModelConfig, QuantizeConfig, save_quantized_model

    other = "bitsandbytes_nf4"
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        other = "int8"
    configs = [
        QuantizeConfig(method=other, exclude_modules=KEPT),
        QuantizeConfig(method="int8", target_modules=KEPT[:2]),
    ]
    pipe = pipeline(tiny_qwen, quantize=MixedQuantizeConfig(configs=configs))
    file = tmp_path / "mixed.safetensors"
    mixed = MixedQuantizeConfig(configs=configs)
    save_quantized_model(ModelConfig(path=tiny_qwen / "transformer", quantize=mixed), file, "cpu")
    again = pipeline(tiny_qwen, dit=file, quantize=MixedQuantizeConfig(configs=configs, load_prequantized=True))
    assert numpy.array_equal(picture(again), picture(pipe))
    kinds = {name: type(layer).__name__ for name, layer in pipe.dit.named_modules()}
    assert kinds["transformer_blocks.0.img_mod.1"] == "Int8Linear" and kinds["img_in"] == "Linear"


def test_loras_act_beside_quantized_layers_and_come_off(tiny_qwen, tmp_path, method):
    pipe = pipeline(tiny_qwen, quantize=config(method))
    without = picture(pipe)
    write_lora(pipe, tmp_path / "a.safetensors")
    receipt = pipe.load_lora(pipe.dit, tmp_path / "a.safetensors", alpha=0.8)
    assert receipt.mode == "hot" and receipt.layers_applied == receipt.layers_found
    with_it = picture(pipe)
    assert not numpy.array_equal(with_it, without)
    pipe.clear_lora()
    assert numpy.array_equal(picture(pipe), without)
    with pytest.raises(Trouble, match="whose layers are quantized"):
        pipe.dit.load_state_dict({})
    with pytest.raises(Trouble, match="are quantized, so a LoRA cannot be fused"):
        pipe.load_lora(pipe.dit, tmp_path / "a.safetensors", hotload=False)


@pytest.mark.parametrize("states", ["streamed from disk", "in RAM"])
def test_quantized_weights_wait_quantized_wherever_they_are_moved(tiny_qwen, tmp_path, states):
    import torch

    from backend.pipelines import ModelConfig, save_quantized_model
    from backend.schema.paths import places

    said = STATES.get(states) or {
        f"{level}_{what}": value
        for level in ("offload", "onload", "preparing", "computation")
        for what, value in (("device", "cpu"), ("dtype", torch.bfloat16))
    }
    limit = 0.0 if states in STATES else None
    file = tmp_path / "saved.safetensors"
    save_quantized_model(ModelConfig(path=tiny_qwen / "transformer", quantize=config("int8")), file, "cpu")
    wanted = picture(pipeline(tiny_qwen, dit=file))
    pipe = pipeline(tiny_qwen, dit=file, quantize=config("int8", load_prequantized=True), limit=limit, **said)
    assert numpy.array_equal(picture(pipe), wanted)
    placed = pipe.pipeline.placements["dit"]
    held = [unit.stored.layout.nbytes for unit in placed.blocks if unit.stored]
    assert all(nbytes < 0.75 * unit.computing.nbytes for nbytes, unit in zip(held, placed.blocks, strict=False))

    pipe = pipeline(tiny_qwen, quantize=config("int8"), limit=limit, **said)  # on the way, by a file of its own
    assert numpy.array_equal(picture(pipe), wanted)
    assert list((places().cache / "quantized").glob("dit-*/*.safetensors"))
    del pipe, placed
    gc.collect()
    assert not list((places().cache / "quantized").glob("dit-*"))


def test_a_state_dict_is_the_model(tiny_qwen, tmp_path):
    import torch

    from backend.pipelines import load_state_dict

    state = load_state_dict(tiny_qwen / "transformer" / "diffusion_pytorch_model.safetensors")
    plain = picture(pipeline(tiny_qwen))
    assert numpy.array_equal(picture(pipeline(tiny_qwen, state_dict=state)), plain)
    changed = {name: tensor * 1.5 if name.endswith("to_q.weight") else tensor for name, tensor in state.items()}
    pipe = pipeline(tiny_qwen, state_dict=changed)
    other = picture(pipe)
    assert not numpy.array_equal(other, plain)
    before = {name: tensor.clone() for name, tensor in pipe.dit.state_dict().items()}
    write_lora(pipe, tmp_path / "a.safetensors")
    pipe.load_lora(pipe.dit, tmp_path / "a.safetensors", hotload=False)
    pipe.clear_lora()
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.dit.state_dict().items())
    quantized = pipeline(tiny_qwen, state_dict=changed, quantize=config("int8"))
    assert 0 < numpy.abs(picture(quantized) - other).mean() < 8
    name = "transformer_blocks.0.attn.to_q.weight"
    for wrong, words in (
        ({key: tensor for key, tensor in state.items() if key != name}, "has no tensor"),
        ({**state, name: torch.zeros(3, 3)}, r"is \[3, 3\]"),
    ):
        with pytest.raises(Trouble, match=words):
            pipeline(tiny_qwen, state_dict=wrong)


def test_a_part_without_its_parameters_is_there_in_name(tiny_qwen):
    pipe = pipeline(tiny_qwen, clear_parameters=True)
    assert not list(pipe.dit.parameters()) and "transformer_blocks.1.attn.to_q" in dict(pipe.dit.named_modules())
    assert pipe.pipeline.encode_prompt("a cat") and pipe.vae is not None
    with pytest.raises(Trouble, match="clear_parameters"):
        picture(pipe)
    with pytest.raises(Trouble, match="clear_parameters"):
        pipe.load_lora(pipe.dit, state_dict={})


def test_several_parts_in_one_config_each_get_their_layers(tiny_qwen, tmp_path):
    import torch

    from backend.engine.quantization.layers import holds_quantized
    from backend.pipelines import ModelConfig, QuantizeConfig, QwenImagePipeline

    files = [next((tiny_qwen / part).glob("*.safetensors")) for part in ("transformer", "text_encoder", "vae")]
    quantize = QuantizeConfig(method="int8", target_modules=["to_q", "q_proj"])
    pipe = QwenImagePipeline.from_pretrained(
        torch_dtype=torch.bfloat16,
        device="cpu",
        model_configs=[ModelConfig(path=files, quantize=quantize)],
        tokenizer_config=ModelConfig(path=tiny_qwen / "tokenizer"),
    )
    assert [holds_quantized(module) for module in (pipe.dit, pipe.text_encoder, pipe.vae)] == [True, True, False]
    assert picture(pipe).shape == (64, 64, 3)


def test_a_text_encoder_is_saved_with_its_vision_tower(tiny_qwen, tmp_path, method):
    import torch

    from backend.engine.quantization.layers import holds_quantized
    from backend.pipelines import ModelConfig, QuantizeConfig, QwenImagePipeline, save_quantized_model

    file = tmp_path / "encoder" / "model.safetensors"
    whole = ModelConfig(path=tiny_qwen / "text_encoder", quantize=QuantizeConfig(method=method))
    save_quantized_model(whole, file, "cpu")

    def drawn(config) -> numpy.ndarray:
        pipe = QwenImagePipeline.from_pretrained(
            torch_dtype=torch.bfloat16,
            device="cpu",
            model_configs=[ModelConfig(path=tiny_qwen / "transformer"), config, ModelConfig(path=tiny_qwen / "vae")],
            tokenizer_config=ModelConfig(path=tiny_qwen / "tokenizer"),
        )
        assert holds_quantized(pipe.text_encoder) == (config.quantize is not None)
        return picture(pipe)

    saved = QuantizeConfig(method=method, load_prequantized=True)
    assert numpy.array_equal(drawn(ModelConfig(path=file, quantize=saved)), drawn(whole))
    assert numpy.abs(drawn(ModelConfig(path=file)) - drawn(whole)).mean() < 3


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (lambda: {"quantize": config("int8", load_prequantized=True)}, "holds no quantized layer"),
        (lambda: {"quantize": config("int8", target_modules=["to_z"])}, "'to_z'"),
        (lambda: {"quantize": object()}, "is no QuantizeConfig"),
        (lambda: {"quantize": config("int8"), "clear_parameters": True}, "Leave one of them out"),
        (lambda: {"clear_parameters": 1}, "neither True nor False"),
        (lambda: {"state_dict": []}, "no table of tensors"),
        (lambda: {"state_dict": {}, **STATES["streamed from disk"]}, "given as a state_dict"),
        (
            lambda: {"quantize": config("int8", mode="dequant_once"), **STATES["streamed from disk"]},
            "what is moved is read from its file",
        ),
    ],
)
def test_what_does_not_go_together_is_a_sentence(tiny_qwen, said, words):
    with pytest.raises(Trouble) as caught:
        pipeline(tiny_qwen, **said())
    assert words in str(caught.value)


def test_what_cannot_be_saved_is_a_sentence(tiny_qwen, tmp_path):
    from backend.pipelines import ModelConfig, save_quantized_model

    files = {"path": tiny_qwen / "transformer"}
    for made, out, words in (
        (ModelConfig(**files), "a.safetensors", "needs ModelConfig"),
        (ModelConfig(**files, quantize=config("int8")), "a.bin", "does not end in"),
        (ModelConfig(**files, quantize=config("int8", load_prequantized=True)), "a.safetensors", "can be saved"),
        (ModelConfig(path=tiny_qwen / "vae", quantize=config("int8")), "a.safetensors", "no linear layer"),
    ):
        with pytest.raises(Trouble, match=words):
            save_quantized_model(made, tmp_path / out, "cpu")
    assert not list(tmp_path.iterdir())


def test_a_method_that_a_file_is_not_of_is_said(tiny_qwen, tmp_path):
    pytest.importorskip("bitsandbytes")
    from backend.pipelines import ModelConfig, save_quantized_model

    file = tmp_path / "a.safetensors"
    save_quantized_model(ModelConfig(path=tiny_qwen / "transformer", quantize=config("int8")), file, "cpu")
    shutil.copy(tiny_qwen / "transformer" / "config.json", tmp_path)
    with pytest.raises(Trouble, match="which bitsandbytes_nf4 cannot take"):
        pipeline(tiny_qwen, dit=file, quantize=config("bitsandbytes_nf4", load_prequantized=True))


def test_what_is_planned_is_what_a_loaded_part_holds(tiny_qwen):
    from backend.catalog.models.identify import identify_model
    from backend.families import FAMILIES
    from backend.planner.costs.model_sizes import sizes_of

    sizes = sizes_of(identify_model(tiny_qwen, FAMILIES)).parts["dit"]
    for said in (config("int8"), config("int8", target_modules=["to_q", "img_mlp.net.2"])):
        module = pipeline(tiny_qwen, quantize=said).dit
        held = sum(tensor.nbytes for tensor in module.state_dict().values())
        assert sizes.bytes(said.storage, "bfloat16") == held
