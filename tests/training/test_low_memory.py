"""The ways to need less memory: each gives the gradients and results of the plain way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file

from backend.catalog.quantization.methods import METHODS
from backend.training.model import activation_checkpointing

pytestmark = pytest.mark.torch
BASE = ("--max_steps", 3, "--save_dtype", "float32", "--height", 32, "--width", 32)


def weights(run: Path) -> torch.Tensor:
    found = load_file(run / "checkpoints" / "step-000003" / "weights.safetensors")
    return torch.cat([tensor.flatten() for _, tensor in sorted(found.items())])


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(8, 8), torch.nn.Dropout(0.3)

    def forward(self, x, y, scale):
        return self.dropout(torch.tanh(self.linear(x)) * scale), y + x


@pytest.mark.parametrize("casting", [False, True])
def test_recomputed_blocks_have_the_gradients_of_plain_ones(casting: bool):
    found, checkpoints = [], activation_checkpointing.OffloadedCheckpoints()
    for again in (lambda block, *values: block(*values), checkpoints.recompute):
        torch.manual_seed(0)
        blocks = [Block(), Block()]
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=casting):
            for block in blocks:
                x, y = again(block, x, y, 0.5)
            ((x * y).sum() + y.mean()).backward()
        found.append([weight.grad for block in blocks for weight in block.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert checkpoints.pending == []  # nothing is kept when the backward pass is over


def test_checkpointing_and_its_offload_change_nothing(run_training, tmp_path: Path):
    exact = (*BASE, "--mixed_precision", "no")
    assert run_training(tmp_path / "plain", *exact) == 0
    for flag in ("--use_gradient_checkpointing", "--use_gradient_checkpointing_offload"):
        assert run_training(tmp_path / flag, *exact, flag) == 0
        torch.testing.assert_close(weights(tmp_path / flag), weights(tmp_path / "plain"), rtol=1e-4, atol=1e-7)


def test_an_optimizer_in_ram_changes_nothing(run_training, tmp_path: Path):
    flags = (*BASE, "--ema_decay", 0.9)
    assert run_training(tmp_path / "plain", *flags) == 0
    beside = (*flags, "--enable_optimizer_cpu_offload")
    assert run_training(tmp_path / "beside", *beside, "--save_steps", 2) == 0
    shutil.rmtree(tmp_path / "beside" / "checkpoints" / "step-000003")
    assert run_training(tmp_path / "beside", *beside, "--resume_from_checkpoint", "latest") == 0
    assert torch.equal(weights(tmp_path / "beside"), weights(tmp_path / "plain"))


def test_frozen_parts_in_the_file_change_nothing(run_training, tmp_path: Path):
    flags = ("--offload_models", "dit,text_encoder,vae", "--initialize_model_on_cpu", "--no-data_cache")
    assert run_training(tmp_path / "plain", *BASE) == 0
    assert run_training(tmp_path / "away", *BASE, *flags, "--use_gradient_checkpointing") == 0
    torch.testing.assert_close(weights(tmp_path / "away"), weights(tmp_path / "plain"), rtol=0, atol=1e-4)


def test_fp8_base_is_near_the_full_one(run_training, events, tmp_path: Path):
    flags = ("--fp8_models", "dit,text_encoder,vae", "--no-data_cache")
    assert run_training(tmp_path / "plain", *BASE) == 0
    assert run_training(tmp_path / "fp8", *BASE, *flags) == 0
    losses = [
        [event["loss"] for event in events(tmp_path / run) if event["event"] == "step"] for run in ("plain", "fp8")
    ]
    assert losses[0] != losses[1]
    assert all(abs(one - other) < 0.05 * one for one, other in zip(*losses, strict=True))
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "fp8")
    assert float(torch.nn.functional.cosine_similarity(one, other, dim=0)) > 0.9


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--fp8_models", "unet"), "names 'unet', which is no part of this model"),
        (("--fp8_models", "dit", "--trainable_models", "dit"), "cannot be kept in FP8"),
        (("--fp8_models", "dit", "--lora_algorithm", "dora"), "DoRA needs the weights"),
        (("--enable_model_cpu_offload", "--lora_algorithm", "dora"), "DoRA needs the weights"),
        (("--offload_models", "dit", "--trainable_models", "dit"), "cannot be offloaded"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(run_training, tmp_path: Path, capsys, flags, words):
    assert run_training(tmp_path / "run", *BASE, *flags) == 2
    assert words in capsys.readouterr().err


def test_fp8_without_effect_is_said(run_training, events, tmp_path: Path):
    flags = ("--fp8_models", "dit,text_encoder", "--offload_models", "dit")
    assert run_training(tmp_path / "run", *BASE, *flags) == 0
    notes = [event["message"] for event in events(tmp_path / "run") if event["event"] == "note"]
    assert [note for note in notes if note.startswith("--fp8_models has no effect on dit here")]


def test_entries_of_the_command_line_name_parts(run_training, tmp_path: Path, tiny_qwen: Path, capsys):
    import json

    files = [
        str(tiny_qwen / folder / name)
        for folder, name in (
            ("transformer", "diffusion_pytorch_model.safetensors"),
            ("text_encoder", "model.safetensors"),
            ("vae", "diffusion_pytorch_model.safetensors"),
        )
    ]
    paths = json.dumps(files)
    assert run_training(tmp_path / "a", *BASE, "--model_paths", paths, "--fp8_models", files[0], model=None) == 0
    assert (
        run_training(tmp_path / "b", *BASE, "--model_paths", paths, "--fp8_models", "nonsense.safetensors", model=None)
        == 2
    )
    assert "names 'nonsense.safetensors'" in capsys.readouterr().err


class Slowing(torch.optim.AdamW):
    """Keeps something in its groups, as Prodigy does: every step is half of the one before."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["share"] = group.get("share", 2.0) / 2
            group["lr"] *= group["share"]
        return super().step(closure)


def test_a_try_says_the_peaks_and_changes_nothing(run_training, events, tmp_path: Path):
    flags = (
        *BASE,
        "--sample_prompts",
        "a ball",
        "--sample_inference_steps",
        1,
        "--customized_optimizer",
        f"{__name__}.Slowing",
        "--allow_custom_code",
    )
    assert run_training(tmp_path / "plain", *flags) == run_training(tmp_path / "tried", *flags, "--preflight") == 0
    assert torch.equal(weights(tmp_path / "plain"), weights(tmp_path / "tried"))
    said = next(event for event in events(tmp_path / "tried") if event.get("phase") == "preflight")
    assert min(said[f"{name}_bytes"] for name in ("forward", "backward", "optimizer", "sample", "save")) > 2**16
    assert said["step_bytes"] == max(said[f"{name}_bytes"] for name in ("forward", "backward", "optimizer"))
    assert said["predicted"].keys() == {"forward", "backward", "optimizer", "sample", "save"}
    assert not list((tmp_path / "tried").glob(".preflight*"))


def test_out_of_memory_goes_on_one_rung_lower(run_training, events, tmp_path: Path, monkeypatch):
    import os

    from backend.training import loop

    started = []
    monkeypatch.setattr(os, "execv", lambda program, argv: started.append(argv))

    def full(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(loop, "train_step", full)
    for flags, expected in (
        ((), ["--use_gradient_checkpointing"]),
        (("--use_gradient_checkpointing",), ["--use_gradient_checkpointing_offload"]),
        (("--use_gradient_checkpointing_offload",), ["--fp8_models", "dit"]),
        (("--use_gradient_checkpointing_offload", "--fp8_models", "dit"), ["--enable_model_cpu_offload"]),
    ):
        assert run_training(tmp_path / "run", *BASE, *flags) == 2
        assert started.pop()[-len(expected) - 2 :] == [*expected, "--resume_from_checkpoint", "latest"]
    last = ("--use_gradient_checkpointing_offload", "--lora_algorithm", "dora")
    assert run_training(tmp_path / "run", *BASE, *last) == 2
    assert started == []
    said = events(tmp_path / "run")[-1]
    assert said["kind"] == "out_of_memory" and "--max_pixels" in said["hint"]


QUANTIZED = (
    "int8",
    "bitsandbytes_nf4",
    "bitsandbytes_fp4",
    "bitsandbytes_int8",
    "torchao_int8_w8a16",
    "torchao_fp8_w8a16",
    "comfy_kitchen_int8_w8a8",
    "comfy_kitchen_fp8_w8a8",
)


@pytest.mark.parametrize("method", QUANTIZED)
def test_a_quantized_base_teaches_nearly_what_the_full_one_does(run_training, events, tmp_path: Path, method: str):
    if METHODS[method].package:
        pytest.importorskip(METHODS[method].package)
    assert run_training(tmp_path / "plain", *BASE) == 0
    flags = ("--quant_options", f"dit:{method}/img_mod.1,proj_out;text_encoder:{method}", "--no-data_cache")
    assert run_training(tmp_path / "rounded", *BASE, *flags, "--save_steps", 2) == 0
    losses = [
        [event["loss"] for event in events(tmp_path / run) if event["event"] == "step"] for run in ("plain", "rounded")
    ]
    assert losses[0] != losses[1]
    assert all(abs(one - other) < 0.1 * one for one, other in zip(*losses, strict=True))
    assert (
        float(torch.nn.functional.cosine_similarity(weights(tmp_path / "plain"), weights(tmp_path / "rounded"), dim=0))
        > 0.9
    )
    plain, rounded = (load_file(tmp_path / run / "step-3.safetensors") for run in ("plain", "rounded"))
    assert {name: value.shape for name, value in plain.items()} == {
        name: value.shape for name, value in rounded.items()
    }
    whole = weights(tmp_path / "rounded")
    shutil.rmtree(tmp_path / "rounded" / "checkpoints" / "step-000003")
    assert run_training(tmp_path / "rounded", *BASE, *flags, "--resume_from_checkpoint", "latest") == 0
    assert torch.equal(weights(tmp_path / "rounded"), whole)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs the kernel's account of pages")
def test_of_a_quantized_base_the_file_is_not_resident_as_well():
    from backend.engine.quantization.config import QuantizeConfig
    from backend.schema.training.config import ModelSection
    from backend.training.model.base_model import find_base_model, load_parts

    base, cpu = find_base_model(ModelSection()), torch.device("cpu")
    spec = base.spec.parts["dit"]
    asked = {"trained": (), "dtype": torch.bfloat16, "device": cpu, "quantized": {"dit": QuantizeConfig("int8")}}
    before = resident(spec.files[0])
    module = load_parts(base, ["dit"], **asked)["dit"]
    held = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    assert held < 0.6 * spec.nbytes and resident(spec.files[0]) - before < 0.15 * spec.nbytes


def resident(file: Path) -> int:
    """Bytes of `file` that this process has mapped and in RAM."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            counts = line.endswith(str(file))
        elif counts and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--quant_options", "dit"), "is not `model:method`"),
        (("--quant_options", ";;"), "is ';;', which names no part"),
        (("--quant_options", "dit:nf5"), "no quantization method 'nf5'"),
        (("--quant_options", "unet:int8"), "names 'unet', which is no part"),
        (("--quant_options", "dit:int8/no_such"), "leaves out 'no_such'"),
        (("--quant_options", "vae:int8"), "no linear layer to quantize"),
        (("--quant_options", "dit:int8", "--trainable_models", "dit"), "cannot be quantized"),
        (("--quant_options", "dit:int8", "--lora_algorithm", "dora"), "DoRA needs the weights"),
        (("--quant_options", "dit:int8", "--fp8_models", "dit"), "is quantized (--quant_options)"),
        (("--quant_options", "dit:int8", "--enable_model_cpu_offload"), "is quantized (--quant_options)"),
        (("--cpu_offload_split_threshold", "10"), "but none are offloaded"),
    ],
)
def test_what_cannot_be_quantized_or_split_is_refused(run_training, tmp_path: Path, capsys, flags, words):
    assert run_training(tmp_path / "run", *BASE, *flags) == 2
    assert words in capsys.readouterr().err


def test_methods_say_what_they_lack(tiny_qwen: Path, monkeypatch):
    import importlib.util
    from dataclasses import replace

    from backend.catalog.models.identify import identify_model
    from backend.families import FAMILIES, qwen_image
    from backend.planner.costs.model_sizes import sizes_of
    from backend.planner.rules.check_training import check_training
    from backend.planner.rules.resolve_training import resolve
    from backend.schema.messages import Trouble
    from backend.schema.settings import from_values
    from backend.schema.training.config import TrainingConfig
    from backend.training.model.quantization import configs_of

    spec = identify_model(tiny_qwen, FAMILIES)

    def check(options: str) -> None:
        config = from_values(TrainingConfig, {"quant_options": options})
        check_training(config, sizes_of(spec), qwen_image, spec=spec)

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else there(name))
    with pytest.raises(Trouble, match="needs the package bitsandbytes") as missing:
        check("dit:bitsandbytes_nf4")
    assert "pip install bitsandbytes" in missing.value.hint
    with pytest.raises(Trouble, match="torchao_int4_w4a16 of dit"):
        check("dit:torchao_int4_w4a16")
    shards = [tiny_qwen / "transformer" / f"a-{number}.safetensors" for number in (1, 2)]
    for shard in shards:
        shutil.copy(spec.parts["dit"].files[0], shard)
    tensors = list(spec.parts["dit"].tensors.items())
    split = {name: replace(at, file=shards[place % 2]) for place, (name, at) in enumerate(tensors)}
    spec = replace(spec, parts={"dit": replace(spec.parts["dit"], tensors=split)})
    text = f'["{shards[0]}", "{shards[1]}"]:int8/to_q,to_k'
    config = from_values(TrainingConfig, {"quant_options": text})
    found = configs_of(resolve(config, sizes_of(spec), spec=spec).parts)
    assert (found["dit"].method, found["dit"].exclude_modules) == ("int8", ["to_q", "to_k"])
    for shard in shards:
        shard.unlink()
