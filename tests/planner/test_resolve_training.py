"""What a run's settings mean for the parts of its model is read once: the plan counts what the trainer does, whatever an entry looks like."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from backend.catalog.hub.part_entries import entries_of
from backend.catalog.models.identify import identify_model
from backend.catalog.spec import ModelSpec
from backend.engine.loading.load import build_meta
from backend.families import FAMILIES
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.rules.resolve_training import resolve
from backend.planner.workload import work_of_training
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from backend.training.model.frozen_weights import keeping
from backend.training.model.peft_adapters import add_adapter
from backend.training.model.quantization import configs_of

pytestmark = pytest.mark.torch
PARTS = ("dit", "text_encoder", "vae")
CPU = torch.device("cpu")


@pytest.fixture
def model(data, tiny_qwen: Path, monkeypatch) -> ModelSpec:
    """The tiny model in the folder of models, its transformer's tensors in three shards under names that say nothing of the part, its text
    encoder's file called like a transformer."""
    folder = data.models / "Some" / "Model"
    shutil.copytree(tiny_qwen, folder)
    spec = identify_model(folder, FAMILIES)
    monkeypatch.chdir(data.models)
    shards = [folder / "transformer" / f"{name}.safetensors" for name in ("vae", "b-2", "my model")]
    named = folder / "text_encoder" / "transformer.safetensors"
    for file in (*shards, named):
        file.write_bytes(b"")
    tensors = {
        name: replace(at, file=shards[number % 3])
        for number, (name, at) in enumerate(spec.parts["dit"].tensors.items())
    }
    encoder = {name: replace(at, file=named) for name, at in spec.parts["text_encoder"].tensors.items()}
    parts = {
        **spec.parts,
        "dit": replace(spec.parts["dit"], tensors=tensors),
        "text_encoder": replace(spec.parts["text_encoder"], tensors=encoder),
    }
    return replace(spec, parts=parts)


def entries(spec: ModelSpec, part: str) -> list[str]:
    """Everything by which a command line may mean the part alone."""
    files = [str(file) for file in spec.parts[part].files]
    folder = Path(files[0]).parent
    near = [os.path.relpath(file) for file in files]
    return [
        part,
        *files,
        *near,
        str(folder),
        os.path.relpath(folder),
        json.dumps(files),
        json.dumps([files[0], "elsewhere.safetensors"]),
        f"Some/Model:{folder.name}/*.safetensors",
        f"Some/Model:{folder.name}/",
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choices=some.data())
def test_plan_and_trainer_mean_the_same_part(model: ModelSpec, choices):
    """Of each part, FP8, quantization and offloading by any spelling of an entry."""
    meant = {
        way: choices.draw(some.sets(some.sampled_from(PARTS if way != "quantized" else PARTS[:2])), label=way)
        for way in ("fp8", "offloaded", "quantized")
    }
    spell = {
        way: [choices.draw(some.sampled_from(entries(model, part)), label=part) for part in sorted(parts)]
        for way, parts in meant.items()
    }
    config = from_values(
        TrainingConfig,
        {
            "fp8_models": ",".join(spell["fp8"]),
            "offload_models": ",".join(spell["offloaded"]),
            "quant_options": ";".join(f"{entry}:int8/to_q" for entry in spell["quantized"]),
        },
    )
    sizes = sizes_of(model)
    resolved = resolve(config, sizes, spec=model)
    assert not resolved.troubles
    kept = keeping(resolved.parts, device=CPU, dtype=torch.bfloat16)
    planned = work_of_training(config, sizes)[1].parts
    for part in PARTS:
        assert (part in kept) == (part in meant["fp8"] | meant["offloaded"])
        assert (part in configs_of(resolved.parts)) == (part in meant["quantized"])
        layout = planned.get(part)
        assert (layout is not None and layout.mode == "streamed") == (part in meant["offloaded"])
        stored = "float8_e4m3fn" if part in meant["fp8"] else "int8/to_q" if part in meant["quantized"] else ""
        assert (layout.storage if layout else "") == stored


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"lora_rank_pattern": '{"attn.to_q": 2, "img_mlp.net.2": 16}'},
        {"lora_target_modules": r"transformer_blocks\.1\.attn\.to_[qkv]"},
        {"lora_target_modules": "all-linear", "lora_algorithm": "dora"},
        {"lora_base_model": "text_encoder"},
        {"lora_algorithm": "lokr"},
        {"trainable_models": "text_encoder", "lora_base_model": "dit"},
        {"trainable_models": "dit, text_encoder"},
    ],
    ids=str,
)
def test_the_plan_counts_the_numbers_that_train(tiny_qwen: Path, values: dict):
    spec = identify_model(tiny_qwen, FAMILIES)
    config = from_values(TrainingConfig, {"lora_rank": 4} | values)
    resolved = resolve(config, sizes_of(spec), spec=spec)
    trains = 0
    for name in resolved.trained:
        trains += sum(weight.numel() for weight in build_meta(spec.parts[name]).parameters())
    if resolved.adapter:
        module = build_meta(spec.parts[resolved.adapter.part])
        add_adapter(module, resolved.adapter)
        trains += sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    assert work_of_training(config, sizes_of(spec))[0].trained_numel == trains
    assert resolved.trains == config.parts_that_train


def test_shards_of_one_part_are_one_entry():
    assert entries_of('dit,["a.safetensors", "b,c.safetensors"], vae') == (
        "dit", '["a.safetensors", "b,c.safetensors"]', "vae",
    )  # fmt: skip
    assert entries_of('["a", ') == ('["a",',) and entries_of(" , ") == () and entries_of(None) == ()
