"""The Python API: the documented block as written, any selection of parts, patterns, four states, LoRAs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from backend.schema.messages import Trouble
from backend.schema.paths import PROJECT

pytestmark = pytest.mark.torch

DOCUMENTED = """
from backend.pipelines import QwenImagePipeline, ModelConfig
import torch
pipe = QwenImagePipeline.from_pretrained(
    torch_dtype=torch.bfloat16, device="cpu",
    model_configs=[
        ModelConfig(model_id="loft/starter", origin_file_pattern="transformer/diffusion_pytorch_model*.safetensors"),
        ModelConfig(model_id="loft/starter", origin_file_pattern="text_encoder/model*.safetensors"),
        ModelConfig(model_id="loft/starter", origin_file_pattern="vae/diffusion_pytorch_model.safetensors"),
    ],
    tokenizer_config=ModelConfig(model_id="loft/starter", origin_file_pattern="tokenizer/"),
)
pipe.load_lora(pipe.dit, "models/train/my_lora/epoch-4.safetensors", alpha=1)
image = pipe("a red apple", seed=0, num_inference_steps=20)
image.save("image.jpg")
pipe.clear_lora()
"""
LIGHT = """
import sys
heavy = [name for name in ("diffusers", "transformers", "peft", "modelscope", "torch._dynamo") if name in sys.modules]
assert not heavy, heavy
"""
COMPILER = "\nimport sys\nassert 'torch._dynamo.eval_frame' not in sys.modules, 'the compiler was loaded'"


def values(picture) -> numpy.ndarray:
    return numpy.asarray(picture, dtype=float)


def write_lora(pipe, path: Path, *, size: float = 0.1) -> Path:
    """A LoRA on the attention of `pipe.dit`, in the names that the trainer writes."""
    import torch
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, module in pipe.dit.named_modules():
        if name.endswith((".to_q", ".to_v")):
            tensors[f"{name}.lora_A.default.weight"] = torch.randn(4, module.in_features, generator=generator) * size
            tensors[f"{name}.lora_B.default.weight"] = torch.randn(module.out_features, 4, generator=generator) * size
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def load(folder: Path, **options):
    from backend.pipelines import ModelConfig, QwenImagePipeline

    states = options.pop("states", {})
    files = {
        "dit": "transformer/diffusion_pytorch_model*.safetensors",
        "text_encoder": "text_encoder/model*.safetensors",
        "vae": "vae/*.safetensors",
    }
    configs = [ModelConfig(path=sorted(folder.glob(pattern)), **states) for pattern in files.values()]
    import torch

    return QwenImagePipeline.from_pretrained(torch_dtype=torch.float32, device="cpu", model_configs=configs, **options)


def test_the_documented_block_runs_as_written_and_importing_is_light(data):
    from backend.pipelines import ModelConfig, QwenImagePipeline

    dit = ModelConfig(model_id="loft/starter", origin_file_pattern="transformer/*.safetensors")
    pipe = QwenImagePipeline.from_pretrained(device="cpu", model_configs=[dit])
    write_lora(pipe, data.root / "models" / "train" / "my_lora" / "epoch-4.safetensors")
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_WAIT_POLICY": "PASSIVE"}
    imports, pipe, rest = DOCUMENTED.partition("pipe =")
    done = subprocess.run(
        [sys.executable, "-c", imports + LIGHT + pipe + rest + COMPILER],
        cwd=data.root,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    from PIL import Image

    with Image.open(data.root / "image.jpg") as picture:
        assert picture.size == (128, 128) and values(picture).std() > 20


def test_its_size_is_the_models_own_and_seeds_repeat(tiny_qwen):
    pipe = load(tiny_qwen)
    one, same, other = (pipe("a cat", seed=seed, num_inference_steps=2) for seed in (1, 1, 2))
    assert one.size == (64, 64)  # of the folder's model_index.json
    assert values(one).tolist() == values(same).tolist() != values(other).tolist()
    assert pipe("a cat", num_inference_steps=1, width=32, height=48).size == (32, 48)  # and without a seed
    for name, value in (
        ("num_inference_steps", 1.5),
        ("seed", "x"),
        ("cfg_scale", float("nan")),
        ("step_cache", "x"),
        ("prompt", None),
    ):
        with pytest.raises(Trouble, match=r"\(--"):
            pipe(**{"prompt": "a cat", name: value})


def test_a_transformer_alone_loads_and_says_what_it_lacks(tiny_qwen):
    from backend.pipelines import ModelConfig, QwenImagePipeline

    config = ModelConfig(path=tiny_qwen / "transformer")
    pipe = QwenImagePipeline.from_pretrained(device="cpu", model_configs=[config], tokenizer_config=None)
    assert type(pipe.dit).__name__ == "QwenImageTransformer2DModel"
    assert pipe.vae is None and pipe.text_encoder is None
    with pytest.raises(Trouble, match="text_encoder"):
        pipe("a cat")
    with pytest.raises(AttributeError):
        _ = pipe.nonsense


def test_a_sharded_model_equals_the_whole_one(tiny_qwen, tmp_path):
    from tests.tiny_models import make_qwen_image

    sharded = make_qwen_image(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((sharded / "transformer").glob("*.safetensors"))) > 2
    ours, whole = (load(folder)("a cat", seed=0, num_inference_steps=2) for folder in (sharded, tiny_qwen))
    assert values(ours).tolist() == values(whole).tolist()


@pytest.mark.parametrize(
    "states, limit",
    [
        (
            {"offload_device": "cpu", "offload_dtype": "float32", "onload_device": "cpu", "onload_dtype": "float32"},
            None,
        ),
        ({"offload_device": "disk", "onload_device": "disk", "preparing_device": "cpu"}, 0),
        ({"offload_device": "disk", "onload_device": "disk", "preparing_device": "cpu"}, 1.5),
    ],
)
def test_the_four_states_draw_the_resident_picture(tiny_qwen, states, limit):
    import torch

    states = {**states, "preparing_device": "cpu", "preparing_dtype": torch.float32}
    states |= {"computation_device": "cpu", "computation_dtype": torch.float32}
    placed = load(tiny_qwen, states=states, vram_limit=limit)
    assert set(placed.pipeline.placements) == {"dit", "text_encoder", "vae"}
    resident = load(tiny_qwen)("a cat", seed=0, num_inference_steps=2)
    assert values(placed("a cat", seed=0, num_inference_steps=2)).tolist() == values(resident).tolist()


@pytest.mark.parametrize("hotload", [None, True])
def test_loras_act_and_leave_without_a_trace(tiny_qwen, tmp_path, hotload):
    pipe = load(tiny_qwen)
    path = write_lora(pipe, tmp_path / "l.safetensors", size=0.3)
    before = pipe("a cat", seed=0, num_inference_steps=2)
    receipt = pipe.load_lora(pipe.dit, path, alpha=1, hotload=hotload)
    assert receipt.layers_applied == receipt.layers_found == 4 and receipt.mode == ("hot" if hotload else "cold")
    changed = pipe("a cat", seed=0, num_inference_steps=2)
    assert numpy.abs(values(changed) - values(before)).mean() > 0.5
    pipe.clear_lora()
    assert values(pipe("a cat", seed=0, num_inference_steps=2)).tolist() == values(before).tolist()
    pipe.enable_lora_hotloading(pipe.dit)
    from safetensors.torch import load_file

    assert pipe.load_lora(pipe.dit, state_dict=load_file(path)).mode == "hot"
    with pytest.raises(Trouble):
        pipe.load_lora(pipe, path)
    with pytest.raises(Trouble):
        pipe.load_lora(pipe.dit)


STATES = {
    "resident": {},
    "streamed from disk": {"offload_device": "disk", "onload_device": "disk", "preparing_device": "disk"},
    "8 bits": {"offload_dtype": "float8_e4m3fn", "onload_dtype": "float8_e4m3fn", "preparing_dtype": "float8_e4m3fn"},
}


@pytest.mark.parametrize("states", STATES)
def test_several_loras_whose_strength_changes_and_that_leave_one_by_one(tiny_qwen, tmp_path, states):
    pipe = load(tiny_qwen, states=STATES[states], vram_limit=None if states != "streamed from disk" else 0)
    draw = lambda: values(pipe("a cat", seed=0, num_inference_steps=2)).tolist()  # noqa: E731
    one, other = (write_lora(pipe, tmp_path / f"{size}.safetensors", size=size) for size in (0.3, 0.2))
    plain = draw()
    first = pipe.load_lora(pipe.dit, one, alpha=0.5)
    assert first.mode == ("cold" if states == "resident" else "hot")
    alone = draw()
    pipe.load_lora(pipe.dit, str(other))
    together = draw()
    assert plain != alone != together != plain
    one.rename(tmp_path / "away")  # a strength needs no file where the LoRA is hot
    if states != "resident":
        assert pipe.set_lora_strength(first, 1.0).strength == 1.0 and draw() != together
        pipe.set_lora_strength(first, 0.5)
    assert draw() == together
    (tmp_path / "away").rename(one)
    pipe.remove_lora(other)
    assert draw() == alone
    pipe.clear_lora(pipe.dit)
    assert draw() == plain
    if states == "resident":  # the very bytes of the file again
        from safetensors.torch import load_file

        stored = load_file(tiny_qwen / "transformer" / "diffusion_pytorch_model.safetensors")
        assert all(tensor.equal(stored[name]) for name, tensor in pipe.dit.state_dict().items())


@pytest.mark.parametrize("states", ["resident", "streamed from disk"])
def test_a_lora_of_the_text_encoder_changes_what_a_prompt_means_and_leaves(tiny_qwen, states):
    import torch

    pipe = load(tiny_qwen, states=STATES[states])
    draw = lambda: values(pipe("a cat", seed=0, num_inference_steps=2)).tolist()  # noqa: E731
    before, tensors = draw(), {}
    for name, module in pipe.text_encoder.named_modules():
        if name.endswith("q_proj"):
            tensors[f"{name}.lora_A.weight"] = torch.ones(2, module.in_features)
            tensors[f"{name}.lora_B.weight"] = torch.ones(module.out_features, 2)
    receipt = pipe.load_lora(pipe.text_encoder, tensors, alpha=0.5)
    assert receipt.layers_applied == receipt.layers_found == 2 and draw() != before
    pipe.clear_lora()
    assert draw() == before
    with pytest.raises(Trouble, match="none of its"):
        pipe.load_lora(pipe.text_encoder, {"nowhere.lora_A.weight": tensors.popitem()[1][:, :2]})


def test_words_of_diffsynth_scripts_work_or_say_what_to_do(tiny_qwen, monkeypatch):
    from PIL import Image

    from backend.pipelines import ModelConfig, QwenImagePipeline

    pipe = load(tiny_qwen)
    asked = {"seed": 3, "num_inference_steps": 1}
    plain = values(pipe("a cat", **asked))
    carried = {
        "rand_device": "cpu",
        "tiled": False,
        "tile_size": 128,
        "tile_stride": 64,
        "edit_image": None,
        "kv_cache": None,
    }
    assert (
        values(pipe("a cat", cfg_scale=4.0, progress_bar_cmd=lambda steps: steps, **carried, **asked)).tolist()
        == plain.tolist()
    )
    elsewhere = pipe("a cat", rand_device="cpu:0", **asked)  # drawn on that device, which here is the same
    assert values(elsewhere).tolist() == plain.tolist()
    tiled = values(pipe("a cat", tiled=True, tile_size=6, tile_stride=4, **asked))
    assert 0 < abs(tiled - plain).mean() < 25  # of random weights, whose tiles show
    for word, sentence in (
        ({"edit_image": "a picture"}, "no picture a picture"),
        ({"edit_image": Image.new("RGB", (8, 8))}, "draws from words alone"),
        ({"edit_image": [3]}, "3 is no picture"),
        ({"edit_image": Image.new("RGB", (0, 8))}, "has 0 x 8 pixels"),
        ({"input_image": Image.new("F", (8, 8))}, "cannot be read: it holds floating-point numbers"),
        ({"edit_image_auto_resize": False}, "about a million pixels"),
        ({"zero_cond_t": True}, "config.json"),
        ({"tiled": True, "tile_size": 8, "tile_stride": 9}, "tile_stride is 9"),
        ({"num_inference_step": 3}, "Did you mean num_inference_steps"),
        ({"cfg_scale": 50.0}, "the most is 20"),
        ({"rand_device": "cuda:7"}, "cuda"),
    ):
        with pytest.raises(Trouble, match=sentence):
            pipe("a cat", **word)
    with pytest.raises(Trouble, match="vram_limit"):
        pipe.enable_vram_management()
    with pytest.raises(Trouble, match=r"no setting 'procesor_config'.*Did you mean processor_config"):
        QwenImagePipeline.from_pretrained(device="cpu", model_configs=[], procesor_config=ModelConfig(path="x"))
    assert pipe.enable_lora_hot_loading(pipe.dit) is pipe.dit
    with monkeypatch.context() as patch:
        patch.setattr("backend.engine.acceleration.compile_blocks.BACKEND", "eager")  # which needs no compiler
        pipe.compile_pipeline(mode="default", dynamic=True, compile_models=["dit"])
    assert pipe.compile
    with pytest.raises(Trouble, match="mode is torch's default"):
        pipe.compile_pipeline(mode="max-autotune")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Trouble, match=r"C\+\+ compiler"):
        QwenImagePipeline.from_pretrained(
            device="cpu", model_configs=[ModelConfig(path="nowhere.safetensors")], compile=True
        )


def test_input_pictures_may_be_pictures_or_files(tiny_qwen, tmp_path):
    from PIL import Image

    pipe = load(tiny_qwen)
    picture = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=numpy.uint8))
    picture.save(tmp_path / "in.png")
    asked = {"seed": 0, "num_inference_steps": 4, "denoising_strength": 0.5}
    by_picture, by_file = (pipe("a cat", input_image=one, **asked) for one in (picture, tmp_path / "in.png"))
    assert values(by_picture).tolist() == values(by_file).tolist()


def test_progress_is_told(tiny_qwen):
    seen, bars = [], []

    def bar(steps):
        for step in steps:
            bars.append(step)
            yield step

    load(tiny_qwen)("a cat", num_inference_steps=3, progress_bar_cmd=bar, on_step=lambda step: seen.append(step.step))
    assert seen == [1, 2, 3] and bars == [0, 1, 2]


def test_settings_that_make_no_sense_are_said(tiny_qwen):
    from backend.pipelines import ModelConfig, QwenImagePipeline

    def refused(*configs, **options) -> str:
        with pytest.raises(Trouble) as caught:
            QwenImagePipeline.from_pretrained(device="cpu", model_configs=configs, **options)
        return str(caught.value)

    dit = tiny_qwen / "transformer" / "diffusion_pytorch_model.safetensors"
    assert "empty" in refused()
    assert "nowhere.safetensors" in refused(ModelConfig(path="nowhere.safetensors"))
    assert "model_id" in refused(ModelConfig())
    assert "Two model configs" in refused(ModelConfig(path=dit), ModelConfig(path=dit))
    assert "disk" in refused(ModelConfig(path=dit, computation_device="disk"))
    with pytest.raises(Trouble, match="nix"):
        QwenImagePipeline.from_pretrained(device="nix", model_configs=[ModelConfig(path=dit)])


def test_limits_and_dtypes_that_are_none_are_said():
    import torch

    from backend.pipelines import QwenImagePipeline

    wrong = [("vram_limit", value) for value in (-1, float("nan"), float("inf"), "8")]
    wrong += [("torch_dtype", value) for value in (torch.int8, torch.float8_e4m3fn, "bfloat16")]
    for name, value in wrong:
        with pytest.raises(Trouble, match=f"^{name} is "):
            QwenImagePipeline.from_pretrained(device="cpu", **{name: value})


EDITS = """
pipe = QwenImagePipeline.from_pretrained(
    torch_dtype=torch.float32,
    device="cpu",
    model_configs=[
        ModelConfig(model_id="Qwen/Qwen-Image-Edit-2511", origin_file_pattern="transformer/diffusion_pytorch_model*.safetensors"),
        ModelConfig(model_id="Qwen/Qwen-Image", origin_file_pattern="text_encoder/model*.safetensors"),
        ModelConfig(model_id="Qwen/Qwen-Image", origin_file_pattern="vae/diffusion_pytorch_model.safetensors"),
    ],
    processor_config=ModelConfig(model_id="Qwen/Qwen-Image-Edit", origin_file_pattern="processor/"),
)
drawn = pipe("a girl", seed=0, num_inference_steps=1, height=48, width=64)
edited = pipe("both of them", edit_image=[drawn, Image.new("RGBA", (60, 120))], seed=1, num_inference_steps=1,
    edit_image_auto_resize=True, zero_cond_t=True)
"""


def test_a_diffsynth_script_that_edits_runs_and_the_size_follows_the_last_picture(tiny_edit, data):
    import torch
    from PIL import Image

    from backend.pipelines import ModelConfig, QwenImagePipeline

    parts = {"transformer": "-Edit-2511", "text_encoder": "", "vae": "", "processor": "-Edit"}
    for part, name in parts.items():
        shutil.copytree(tiny_edit("edit-2509") / part, data.models / "Qwen" / f"Qwen-Image{name}" / part)
    shutil.copy(
        tiny_edit("edit-2509") / "model_index.json", data.models / "Qwen" / "Qwen-Image-Edit"
    )  # says how large references are
    names = {"QwenImagePipeline": QwenImagePipeline, "ModelConfig": ModelConfig, "torch": torch, "Image": Image}
    exec(EDITS, names)
    pipe = names["pipe"]
    assert pipe.pipeline.spec.variant == "edit-2511" and pipe.dit.zero_cond_t and pipe.vision is not None
    assert names["drawn"].size == (64, 48) and names["edited"].size == (32, 96)
