"""Training in two stages, drawing in fewer steps, learning a difference, other kinds of adapter, masks and validation."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from PIL import Image
from safetensors.torch import load_file, save_file

from backend.schema.messages import Trouble
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig

pytestmark = pytest.mark.torch
BASE = ("--max_steps", 2, "--save_dtype", "float32", "--height", 32, "--width", 32)


def test_two_stages_give_what_one_gives(run_training, tmp_path: Path, tiny_qwen: Path):
    flags = (*BASE, "--caption_dropout", 0.3, "--flip", "--trigger_word", "zubi")
    assert run_training(tmp_path / "one", *flags) == 0
    assert run_training(tmp_path / "data", *flags, "--task", "sft:data_process") == 0
    alone = tmp_path / "only_dit"  # the second stage needs no encoder and no pictures
    alone.mkdir()
    for name in ("transformer", "tokenizer", "scheduler"):
        shutil.copytree(tiny_qwen / name, alone / name)
    assert run_training(tmp_path / "two", *flags, "--task", "sft:train", model=alone, dataset=tmp_path / "data") == 0
    one, two = load_file(tmp_path / "one" / "step-2.safetensors"), load_file(tmp_path / "two" / "step-2.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_second_stage_says_what_it_lacks(run_training, tmp_path: Path, pictures: Path, capsys):
    assert run_training(tmp_path / "run", *BASE, "--task", "sft:train") == 2
    assert "holds no encodings" in capsys.readouterr().err


def test_a_student_learns_to_draw_the_teachers_picture(run_training, events, tmp_path: Path):
    folder = tmp_path / "drawn"
    folder.mkdir()
    Image.new("RGB", (32, 32), (200, 60, 60)).save(folder / "a.png")
    (folder / "m.json").write_text(json.dumps([{"image": "a.png", "prompt": "a ball", "seed": 7}]))
    flags = (
        "--dataset_metadata_path",
        folder / "m.json",
        "--task",
        "direct_distill",
        "--distill_steps",
        2,
        "--max_steps",
        12,
        "--dataset_repeat",
        12,
        "--learning_rate",
        0.01,
    )
    assert run_training(tmp_path / "run", *flags, dataset=folder) == 0
    losses = [event["loss"] for event in events(tmp_path / "run") if event["event"] == "step"]
    assert losses[-1] < 0.8 * losses[0]


def test_a_preset_lora_is_in_the_base_and_not_in_the_result(run_training, events, tmp_path: Path):
    assert run_training(tmp_path / "first", *BASE, "--learning_rate", 0.05) == 0
    preset = tmp_path / "first" / "step-2.safetensors"
    assert run_training(tmp_path / "plain", *BASE) == 0
    assert run_training(tmp_path / "second", *BASE, "--preset_lora_path", preset, "--preset_lora_model", "dit") == 0
    losses = [
        [event["loss"] for event in events(tmp_path / run) if event["event"] == "step"] for run in ("plain", "second")
    ]
    assert losses[0][0] != losses[1][0]
    first = load_file(tmp_path / "second" / "checkpoints" / "step-000002" / "weights.safetensors")
    assert all("lora_" in name for name in first)


def put_adapter(module: torch.nn.Module, config: TrainingConfig):
    """The adapter that `config` asks for, in `module` as a transformer."""
    from backend.families import qwen_image
    from backend.planner.rules.resolve_training import resolve_adapter
    from backend.training.model.peft_adapters import add_adapter

    linear = {name: one for name, one in module.named_modules() if isinstance(one, torch.nn.Linear)}
    layers = {name: (one.out_features, one.in_features) for name, one in linear.items()}
    adapter, troubles = resolve_adapter(config.lora, layers, qwen_image, part="dit")
    assert not troubles
    add_adapter(module, adapter)
    return adapter


@pytest.mark.parametrize("kind", ["dora", "rslora", "loha", "lokr", "oft"])
def test_other_adapters_are_read_back(run_training, tmp_path: Path, tiny_qwen: Path, kind: str):
    """By the library and by the engine, whose layers then answer as those that were trained, to the rounding of what is saved."""
    from backend.catalog.models.identify import identify_lora, identify_model
    from backend.engine.loading.load import load_part
    from backend.engine.lora import adapters
    from backend.families import FAMILIES
    from backend.training.model.peft_adapters import load_adapter

    flags = ("--lora_algorithm", kind, "--lora_target_modules", "to_q,to_k", "--learning_rate", 0.05)
    assert run_training(tmp_path / "run", *BASE, *flags) == 0
    file = tmp_path / "run" / "step-2.safetensors"
    assert identify_lora(file, FAMILIES).num_modules == 4
    part = identify_model(tiny_qwen, FAMILIES).parts["dit"]
    trained, loaded = (load_part(part, dtype=torch.float32) for _ in range(2))
    config = from_values(TrainingConfig, {"lora_algorithm": kind, "lora_target_modules": "to_q,to_k", "lora_rank": 4})
    adapter = put_adapter(trained, config)
    named = {f"dit.{name}": weight for name, weight in trained.named_parameters() if weight.requires_grad}
    load_adapter(adapter, named, load_file(file))
    plain = loaded.transformer_blocks[0].attn.to_q(torch.ones(1, 48))
    receipt = adapters.load(loaded, file)
    assert receipt.layers_applied == 4 and not receipt.unused
    for name in ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_k"):
        x = torch.randn(3, 48)
        torch.testing.assert_close(loaded.get_submodule(name)(x), trained.get_submodule(name)(x), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(loaded.transformer_blocks[0].attn.to_q(torch.ones(1, 48)), plain, atol=1e-4)


def test_an_oft_says_how_it_is_meant_and_peft_reads_it_equal(run_training, tmp_path: Path, tiny_qwen: Path, capsys):
    """The fields in the header are those of PEFT's OFTConfig: peft's own layers, made of them and filled by peft, answer as ours do."""
    import peft

    from backend.catalog.formats.safetensors import read_layout
    from backend.catalog.models.identify import identify_model
    from backend.engine.loading.load import load_part
    from backend.engine.lora import adapters
    from backend.families import FAMILIES

    flags = ("--lora_algorithm", "oft", "--lora_target_modules", "to_q,to_k", "--learning_rate", 0.05)
    assert run_training(tmp_path / "run", *BASE, *flags) == 0
    file = tmp_path / "run" / "step-2.safetensors"
    said = json.loads(read_layout(file).metadata["lora_adapter_metadata"])
    fields = {key.removeprefix("transformer."): value for key, value in said.items()}
    assert fields["use_cayley_neumann"] is True and fields.pop("peft_type") == "OFT"
    part = identify_model(tiny_qwen, FAMILIES).parts["dit"]
    theirs, ours = (load_part(part, dtype=torch.float32) for _ in range(2))
    peft.inject_adapter_in_model(peft.OFTConfig(**fields), theirs)
    loaded = peft.set_peft_model_state_dict(theirs, load_file(file))
    assert not loaded.unexpected_keys and not any("oft_" in key for key in loaded.missing_keys)
    assert not any("rotations" in note for note in adapters.load(ours, file).notes)
    x = torch.randn(3, 48)
    for name in ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_k"):
        plain = load_part(part, dtype=torch.float32).get_submodule(name)(x)
        torch.testing.assert_close(ours.get_submodule(name)(x), theirs.get_submodule(name)(x), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(ours.get_submodule(name)(x), plain, atol=1e-3)
    other = tmp_path / "other.safetensors"  # as earlier versions wrote them: Cayley's map, and not a word of it
    save_file(load_file(file), other, {"software": "Loft 0.1", "algorithm": "oft"})
    assert run_training(tmp_path / "again", *BASE, *flags, "--lora_checkpoint", other) == 2
    assert "meant by Cayley's map" in capsys.readouterr().err
    exact = load_part(part, dtype=torch.float32)
    peft.inject_adapter_in_model(peft.OFTConfig(**{**fields, "use_cayley_neumann": False}), exact)
    peft.set_peft_model_state_dict(exact, load_file(file))
    old = load_part(part, dtype=torch.float32)
    adapters.load(old, other)
    torch.testing.assert_close(old.get_submodule(name)(x), exact.get_submodule(name)(x), rtol=1e-5, atol=1e-5)
    state = tmp_path / "run" / "checkpoints" / "step-000002" / "state.json"
    facts = json.loads(state.read_text())
    assert facts["facts"].pop("turning")["use_cayley_neumann"] is True
    state.write_text(json.dumps(facts))
    more = ("--max_steps", 4, "--resume_from_checkpoint", str(state.parent))
    assert run_training(tmp_path / "run", *BASE, *flags, *more) == 2
    assert "as earlier versions trained it" in capsys.readouterr().err


def test_a_lora_to_begin_from_is_read_as_it_is_meant(tmp_path: Path):
    """Its alpha from PEFT's configuration, its 8-bit factors times their scales, one module under two names once."""
    from backend.training.model.peft_adapters import load_file_adapter

    def begin(tensors: dict, alpha: float) -> torch.Tensor:
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        module = torch.nn.Sequential(torch.nn.Linear(6, 4))
        context = {"lora_target_modules": "all-linear", "lora_rank": 2, "lora_alpha": alpha}
        adapter = put_adapter(module, from_values(TrainingConfig, context))
        named = {f"dit.{name}": weight for name, weight in module.named_parameters() if weight.requires_grad}
        load_file_adapter(adapter, named, tmp_path / "adapter_model.safetensors")
        return module[0].lora_A["default"].weight.detach()

    a, b = torch.randn(2, 6), torch.randn(4, 2)
    file = {"base_model.model.0.lora_A.weight": a, "base_model.model.0.lora_B.weight": b}
    assert torch.equal(begin(file, 2.0), a)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 16}))
    with pytest.raises(Trouble, match=r"has alpha 16 .* this run 2"):
        begin(file, 2.0)
    codes = (a * 8).to(torch.float8_e4m3fn)
    scaled = {
        **file,
        "base_model.model.0.lora_A.weight": codes,
        "base_model.model.0.lora_A.weight_scale": torch.tensor(0.125),
    }
    assert torch.equal(begin(scaled, 16.0), codes.float() * 0.125)
    assert torch.equal(begin({**file, "0.lora_A.weight": a.clone()}, 16.0), a)
    with pytest.raises(Trouble, match="differ"):
        begin({**file, "0.lora_A.weight": a + 1}, 16.0)


def test_dora_over_a_row_of_zeros_has_numbers():
    module = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False))
    with torch.no_grad():
        module[0].weight[1] = 0
    x = torch.randn(3, 6)
    plain = module(x).detach()
    config = from_values(
        TrainingConfig, {"lora_algorithm": "dora", "lora_target_modules": "all-linear", "lora_rank": 2}
    )
    put_adapter(module, config)
    torch.testing.assert_close(module(x), plain)
    module(x).square().sum().backward()
    gradients = [weight.grad for weight in module.parameters() if weight.requires_grad]
    assert all(bool(one.isfinite().all()) for one in gradients) and any(bool(one.any()) for one in gradients)


def test_oft_says_what_it_has_not(run_training, tmp_path: Path, capsys):
    for flags, words in ((("--lora_rank", 7), "blocks of 7 inputs"), (("--lora_alpha", 2), "it has no alpha")):
        assert run_training(tmp_path / "run", *BASE, "--lora_algorithm", "oft", *flags) == 2
        assert words in capsys.readouterr().err


def test_a_lora_file_can_be_gone_on_from(run_training, tmp_path: Path, capsys):
    assert run_training(tmp_path / "first", *BASE) == 0
    file = tmp_path / "first" / "step-2.safetensors"
    assert run_training(tmp_path / "again", *BASE, "--lora_checkpoint", file, "--learning_rate", 0) == 0
    one, two = load_file(file), load_file(tmp_path / "again" / "step-2.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert run_training(tmp_path / "wrong", *BASE, "--lora_checkpoint", file, "--lora_rank", 8) == 2
    assert "Set --lora_rank" in capsys.readouterr().err
    assert run_training(tmp_path / "strong", *BASE, "--lora_checkpoint", file, "--lora_alpha", 8) == 2
    assert "has alpha 4" in capsys.readouterr().err


def test_targets_are_names_expressions_all_or_a_set_of_the_family(tiny_qwen: Path):
    from backend.catalog.lora.target_modules import target_modules
    from backend.catalog.models.identify import identify_model
    from backend.engine.loading.load import build_meta
    from backend.families import FAMILIES, qwen_image
    from backend.planner.costs.model_sizes import sizes_of
    from backend.planner.rules.resolve_training import layers_of
    from backend.schema.messages import Trouble

    spec = identify_model(tiny_qwen, FAMILIES)
    dit = build_meta(spec.parts["dit"])
    linear = [name for name, module in dit.named_modules() if isinstance(module, torch.nn.Linear)]
    assert layers_of(sizes_of(spec).parts["dit"], spec.parts["dit"]).keys() == set(linear)  # as the headers have them
    assert layers_of(sizes_of(spec).parts["dit"]).keys() == set(linear)
    counted = {
        "to_q": 2,
        "attn.to_q,img_mlp.net.2": 4,
        r"transformer_blocks\.1\.attn\.to_[qkv]": 3,
        "attention": 16,
        "attention_and_mlp": 24,
        "all": 24,
        "": 24,
        "all-linear": sum(isinstance(module, torch.nn.Linear) for module in dit.modules()),
    }
    assert {wanted: len(target_modules(linear, wanted, qwen_image.LORA, part="dit")) for wanted in counted} == counted
    for nothing in ("to_q,no_such", r".*no_such\d"):
        with pytest.raises(Trouble, match="No module of dit"):
            target_modules(linear, nothing, qwen_image.LORA, part="dit")


def test_ranks_and_alphas_by_module(run_training, tmp_path: Path):
    flags = (
        "--lora_target_modules",
        r".*attn\.to_[qk]",
        "--lora_rank_pattern",
        '{"to_q": 2}',
        "--lora_alpha_pattern",
        '{"to_k": 1}',
    )
    assert run_training(tmp_path / "run", *BASE, *flags) == 0
    found = load_file(tmp_path / "run" / "step-2.safetensors")
    block = "transformer_blocks.1.attn."
    assert found[f"{block}to_q.lora_A.weight"].shape[0] == 2 and found[f"{block}to_k.lora_A.weight"].shape[0] == 4
    assert float(found[f"{block}to_k.alpha"]) == 1.0 and float(found[f"{block}to_q.alpha"]) == 4.0


def test_masks_and_validation(run_training, events, tmp_path: Path, pictures: Path):
    shutil.copytree(pictures, tmp_path / "set")
    Image.new("L", (64, 64), 0).save(tmp_path / "set" / "0.mask.png")
    flags = ("--masked_loss", "file", "--mask_floor", 0.0, "--validation_split", 0.4, "--validation_every", 1)
    assert run_training(tmp_path / "run", *BASE, *flags, dataset=tmp_path / "set") == 0
    losses = [event["loss"] for event in events(tmp_path / "run") if event["event"] == "validation"]
    assert len(losses) == 2 and all(0 < loss < 100 for loss in losses)
    facts = json.loads((tmp_path / "run" / "checkpoints" / "step-000002" / "state.json").read_text())["facts"]
    assert facts["processes"] == 1


@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "torch.optim.RMSprop"])
def test_optimizers_by_name(run_training, tmp_path: Path, optimizer: str):
    assert run_training(tmp_path / "run", *BASE, "--customized_optimizer", optimizer) == 0


def distilled(folder: Path, *rows: str) -> tuple[str, ...]:
    """A dataset as the documents describe it for direct distillation, and the flags of their command."""
    folder.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (32, 32), (200, 60, 60)).save(folder / f"{name}.jpg")
    table = folder / "metadata.csv"
    table.write_text("\n".join(["image,prompt,seed,rand_device,num_inference_steps,cfg_scale", *rows]) + "\n")
    return (
        "--dataset_base_path",
        str(folder),
        "--dataset_metadata_path",
        str(table),
        "--data_file_keys",
        "image",
        "--extra_inputs",
        "seed,rand_device,num_inference_steps,cfg_scale",
        "--height",
        "32",
        "--width",
        "32",
        "--task",
        "direct_distill",
    )


def test_a_distillation_takes_steps_and_seeds_from_its_table(run_training, events, tmp_path: Path, capsys):
    flags = distilled(tmp_path / "set", "a.jpg,a ball,0,cpu,1,1", "b.jpg,a box,1,cpu,3,1")
    assert run_training(tmp_path / "own", *flags, "--max_steps", 2, dataset=None) == 0
    same = (*flags, "--extra_inputs", "seed", "--max_steps", 2)
    assert run_training(tmp_path / "general", *same, "--distill_steps", 3, dataset=None) == 0
    own, general = (
        [event["loss"] for event in events(tmp_path / run) if event["event"] == "step"] for run in ("own", "general")
    )
    assert sum(one == other for one, other in zip(own, general, strict=True)) == 1  # the one with three steps
    assert run_training(tmp_path / "pair", *flags, "--batch_size", 2, dataset=None) == 2
    assert "in 1, 3 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a.jpg,a ball,0,cuda,4,1", "rand_device 'cuda'"),
        ("a.jpg,a ball,0,cpu,4,4", "cfg_scale '4'"),
        ("a.jpg,a ball,0,cpu,many,1", "'many' num_inference_steps"),
        ("a.jpg,a ball,,cpu,4,1", "has no seed"),
    ],
)
def test_columns_that_a_distillation_cannot_take_are_named(run_training, tmp_path: Path, capsys, row: str, words: str):
    assert run_training(tmp_path / "run", *distilled(tmp_path / "set", row), dataset=None) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--extra_inputs", "controlnet_image"), "cannot be trained with the input controlnet_image"),
        (("--extra_inputs", "seed"), "which the task sft does not use"),
        (("--devices", "2"), "--multi_gpu --num_processes 2"),
        (("--customized_optimizer", "prodigy"), "pip install prodigyopt"),
        (("--customized_optimizer", "pagedadamw8bit"), "pip install bitsandbytes"),
        (("--enable_tensorboard_log",), "pip install tensorboard"),
        (("--enable_wandb_log",), "pip install wandb"),
        (("--enable_swanlab_log",), "pip install swanlab"),
        (("--num_frames", "81"), "no 81 frames to train"),
        (("--processor_path", "Qwen/Qwen-Image-Edit:processor/"), "no processor of pictures"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(
    run_training, tmp_path: Path, capsys, flags, words: str, monkeypatch
):
    for name in ("prodigyopt", "bitsandbytes", "tensorboard", "wandb", "swanlab"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    assert run_training(tmp_path / "run", *BASE, *flags) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
