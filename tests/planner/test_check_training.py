"""What cannot be is refused before anything is loaded or encoded; the plan, the form and the trainer ask one rule book."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from backend.catalog.hub.part_entries import means, parts_meant
from backend.catalog.models.identify import identify_model
from backend.families import FAMILIES, qwen_image
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.rules.check_training import check_training
from backend.schema.messages import Trouble
from backend.schema.settings import from_flags
from backend.schema.training.config import TrainingConfig
from tests.tiny_models import make_qwen_image

pytestmark = pytest.mark.torch

SETTINGS = [
    (("--lora_target_modules", "to_qq"), "No module of dit is called 'to_qq'"),
    (("--lora_rank_pattern", '{"to_qq": 4}'), "names 'to_qq', which gets no LoRA"),
    (("--lora_algorithm", "oft", "--lora_rank", "7"), "blocks of 7 inputs"),
    (("--lora_base_model", "dit", "--trainable_models", "dit"), "cannot both train whole and get a LoRA"),
    (("--quant_options", "dit:int8/no_such"), "leaves out 'no_such'"),
    (("--quant_options", "vae:int8"), "no linear layer to quantize"),
    (("--quant_options", "dit:int8;dit:bitsandbytes_nf4/to_q"), "names the part dit twice (int8 and bitsandbytes_nf4)"),
    (("--preset_lora_model", "dit"), "but none is named"),
    (("--learning_rates", "dit=1e-4,dit=1e-5"), "names the part dit twice"),
    (("--lr_schedulers", "dit=linear,dit=cosine"), "names the part dit twice"),
    (("--sample_prompts", "a ball", "--sample_strengths", "0.5,1", "--lora_algorithm", "dora"), "need a LoRA"),
    (("--mixed_precision", "fp16", "--customized_optimizer", "muon"), "Muon does not train in fp16"),
]


def refuses(run_training, data, out: Path, *flags) -> None:
    """The run is refused, and no encoding was made for it."""
    assert run_training(out, "--max_steps", 1, *flags) == 2
    assert not list(data.cache.rglob("*.safetensors"))


@pytest.mark.parametrize(("flags", "words"), SETTINGS)
def test_settings_are_refused_by_all_before_the_first_encoding(
    run_training, data, tmp_path, capsys, tiny_qwen, flags, words
):
    refuses(run_training, data, tmp_path / "run", *flags)
    assert words in capsys.readouterr().err
    config = from_flags(TrainingConfig, list(flags))
    for spec in (
        identify_model(tiny_qwen, FAMILIES),
        None,
    ):  # with all headers at hand, or with what the plan keeps of them
        sizes = sizes_of(identify_model(tiny_qwen, FAMILIES))
        with pytest.raises(Trouble) as refused:
            check_training(config, sizes, qwen_image, spec=spec, here=False)
        assert words in str(refused.value)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another width than the tiny one."""
    return make_qwen_image(tmp_path_factory.mktemp("wide") / "wide", num_heads=6)


@pytest.fixture
def stranger(run_training, data, tmp_path: Path, wide: Path) -> Path:
    """A LoRA of a model of another width; the cache is left empty."""
    import shutil

    assert run_training(tmp_path / "wide", "--max_steps", 1, model=wide) == 0
    shutil.rmtree(data.cache)
    return tmp_path / "wide" / "step-1.safetensors"


@pytest.mark.parametrize("flag", ["--lora_checkpoint", "--preset_lora_path", "--resume_from_checkpoint"])
def test_files_of_another_model_are_refused_before_the_first_encoding(
    run_training, data, tmp_path, capsys, stranger, flag
):
    refuses(run_training, data, tmp_path / "run", flag, stranger)
    said = capsys.readouterr().err
    assert stranger.name in said or flag in said
    if flag == "--resume_from_checkpoint":
        state = stranger.parent / "checkpoints" / "step-000001"
        refuses(run_training, data, tmp_path / "state", flag, state)
        assert "it was made with other settings" in capsys.readouterr().err
        refuses(run_training, data, tmp_path / "whole", flag, stranger, "--trainable_models", "dit")
        assert "weights that train" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--lora_checkpoint", "--preset_lora_path"])
def test_what_is_no_lora_is_refused_without_torch(data, tmp_path: Path, flag: str):
    from backend.dataset.check_inputs import look

    file = tmp_path / "model.safetensors"
    save_file({"layers.0.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(Trouble, match="is no LoRA"):
        look(from_flags(TrainingConfig, [flag, str(file)]), index=tmp_path / "index.json")
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(Trouble):
        look(from_flags(TrainingConfig, [flag, str(file)]), index=tmp_path / "index.json")


def test_an_entry_means_the_parts_whose_files_it_names(data, tiny_qwen: Path, monkeypatch):
    import shutil

    model = data.models / "Some" / "Model"
    shutil.copytree(tiny_qwen, model)
    parts = {name: part.files for name, part in identify_model(model, FAMILIES).parts.items()}
    dit = parts["dit"][0]
    monkeypatch.chdir(model)
    for entry in (
        "dit", str(dit), str(dit.relative_to(model)), f'["{dit}"]', str(dit.parent), "Some/Model:transformer/*.safetensors",
        "Some/Model:transformer/", f"{dit},elsewhere.safetensors",
    ):  # fmt: skip
        assert means(entry, parts) == {"dit"}, entry
    for entry in (
        "unet",
        "Other/Model:transformer/*.safetensors",
        "Some/Model:*.safetensors",
        "transformer.safetensors",
    ):
        assert not means(entry, parts), entry
    one_file = dict.fromkeys(parts, (dit,))
    assert means(str(dit), one_file) == set(parts)
    with pytest.raises(Trouble, match="names 'unet', which is no part of this model"):
        parts_meant("unet", "fp8_models", parts)
    far = {name: () for name in parts}  # of a model that is not here the folder tells
    assert means("Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors", far) == {"dit"}


def test_the_plan_stores_what_the_run_stores(data, tiny_qwen: Path):
    """One entry, one part: named by a file without its folder's word in it."""
    from backend.planner.workload import work_of_training

    spec = identify_model(tiny_qwen, FAMILIES)
    moved = tiny_qwen / "transformer" / "mine.safetensors"
    save_file(load_file(spec.parts["dit"].files[0]), moved)
    tensors = {name: replace(at, file=moved) for name, at in spec.parts["dit"].tensors.items()}
    spec = replace(spec, parts={**spec.parts, "dit": replace(spec.parts["dit"], tensors=tensors)})
    config = from_flags(TrainingConfig, ["--fp8_models", str(moved)])
    assert work_of_training(config, sizes_of(spec))[1].parts["dit"].storage == "float8_e4m3fn"
    moved.unlink()
