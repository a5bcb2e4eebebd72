"""One rule book: what the trainer would refuse of a run's settings, the form and the plan refuse in the same words, at the same setting."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from backend.catalog.hub import part_entries
from backend.catalog.lora import target_modules
from backend.catalog.models.identify import identify_model
from backend.families import FAMILIES
from backend.planner.costs import optimizers
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.rules import check_training, input_rules, resolve_training, storage_rules
from backend.schema.messages import Trouble
from backend.schema.paths import PROJECT
from backend.schema.settings import from_flags, knobs_of
from backend.schema.training.config import TrainingConfig

pytestmark = pytest.mark.torch
DRAWN = ("--sample_prompts", "a ball")
# what is asked -> (the setting to be changed, words of the sentence); of the tiny Qwen-Image
REFUSED: dict[tuple[str, ...], tuple[str, str]] = {
    ("--num_frames", "5"): ("num_frames", "makes single pictures"),
    ("--zero_cond_t",): ("zero_cond_t", "free of noise"),
    ("--processor_path", "x"): ("processor_path", "no processor of pictures"),
    ("--extra_inputs", "edit_image"): ("extra_inputs", "cannot be trained to edit"),
    ("--sample_edit_images", "a.png"): ("sample_edit_images", "drawn from no others"),
    ("--extra_inputs", "depth"): ("extra_inputs", "cannot be trained with the input depth"),
    ("--extra_inputs", "seed"): ("extra_inputs", "does not use"),
    ("--trainable_models", "vae"): ("trainable_models", "'vae' cannot be trained"),
    ("--lora_base_model", "dit", "--trainable_models", "dit"): ("lora_base_model", "cannot both train whole"),
    ("--lora_target_modules", "to_qq"): ("lora_target_modules", "No module of dit is called 'to_qq'"),
    ("--lora_target_modules", "(to_q"): ("lora_target_modules", "is no regular expression"),
    ("--lora_rank_pattern", "{"): ("lora_rank_pattern", "not a JSON object"),
    ("--lora_alpha_pattern", '{"to_qq": 4}'): ("lora_alpha_pattern", "gets no LoRA"),
    ("--lora_rank_pattern", '{"to_q": 0.5}'): ("lora_rank_pattern", "a whole number above 0"),
    ("--lora_algorithm", "oft", "--lora_alpha", "4"): ("lora_alpha", "has no alpha"),
    ("--lora_algorithm", "oft", "--lora_rank", "7"): ("lora_rank", "blocks of 7 inputs"),
    ("--preset_lora_model", "dit"): ("preset_lora_model", "but none is named"),
    ("--preset_lora_model", "vae", "--preset_lora_path", "LORA"): ("preset_lora_model", "cannot go into 'vae'"),
    ("--preset_lora_path", "LORA"): ("preset_lora_path", "does not fit the chosen model"),
    ("--fp8_models", "unet"): ("fp8_models", "no part of this model"),
    ("--offload_models", '["a", 3]'): ("offload_models", "not a JSON list of files"),
    ("--quant_options", ";"): ("quant_options", "names no part"),
    ("--quant_options", "dit"): ("quant_options", "is not `model:method`"),
    ("--quant_options", "dit:int3"): ("quant_options", "no quantization method 'int3'"),
    ("--quant_options", "dit:int8;dit:int8/to_q"): ("quant_options", "names the part dit twice"),
    ("--quant_options", "dit:int8", "--trainable_models", "dit"): ("quant_options", "while its own weights train"),
    ("--quant_options", "dit:torchao_int4_w4a8"): ("quant_options", "passes no gradients"),
    ("--quant_options", "dit:int8/no_such"): ("quant_options", "leaves out 'no_such'"),
    ("--quant_options", "vae:int8"): ("quant_options", "no linear layer to quantize"),
    ("--quant_options", "text_encoder:LACKING"): ("quant_options", "needs the package"),
    ("--fp8_models", "dit", "--trainable_models", "dit"): ("fp8_models", "cannot be kept in FP8"),
    ("--offload_models", "dit", "--trainable_models", "dit"): ("offload_models", "cannot be offloaded"),
    ("--offload_models", "dit", "--quant_options", "dit:int8"): ("quant_options", "neither moved nor stored"),
    ("--resident_blocks", "1"): ("resident_blocks", "none are offloaded"),
    ("--fp8_models", "dit", "--lora_algorithm", "dora"): ("lora_algorithm", "DoRA needs the weights"),
    ("--customized_optimizer", "adamww"): ("customized_optimizer", "no optimizer called 'adamww'"),
    ("--customized_optimizer", "dadaptation.DAdaptAdam"): ("customized_optimizer", "needs the package dadaptation"),
    ("--optimizer_args", "[1]"): ("optimizer_args", "not a JSON object"),
    ("--optimizer_args", '{"beta": 1}'): ("optimizer_args", "does not take 'beta'"),
    ("--optimizer_args", '{"betas": [0.9, 2]}'): ("optimizer_args", "from 0 to below 1"),
    ("--learning_rates", "vae=1e-4"): ("learning_rates", "names 'vae', which does not train"),
    ("--learning_rates", "dit=x"): ("learning_rates", "not a number"),
    ("--learning_rates", "dit=11"): ("learning_rates", "between 0 and 10"),
    ("--learning_rates", "dit=1,dit=2"): ("learning_rates", "names the part dit twice"),
    ("--lr_schedulers", "dit=wavy"): ("lr_schedulers", "not a part that trains and its schedule"),
    ("--mixed_precision", "fp16", "--customized_optimizer", "muon"): ("mixed_precision", "Muon does not train in fp16"),
    ("--mixed_precision", "fp16"): ("mixed_precision", "does not train in fp16"),
    ("--sample_strengths", "strong"): ("sample_strengths", "not numbers"),
    (*DRAWN, "--sample_strengths", "0.5", "--lora_algorithm", "dora"): ("sample_strengths", "need a LoRA"),
    ("--vram", "much"): ("vram", "it can be auto"),
    ("--lora_checkpoint", "nowhere.safetensors"): ("lora_checkpoint", "There is no LoRA file"),
    ("--lora_checkpoint", "TEXT"): ("lora_checkpoint", "is no LoRA"),
    ("--lora_checkpoint", "PICKLE"): ("lora_checkpoint", "is no safetensors file"),
    ("--lora_checkpoint", "LORA", "--trainable_models", "dit"): ("lora_checkpoint", "no LoRA trains here"),
    ("--task", "sft:train", "--masked_loss", "file"): ("masked_loss", "a second stage does not have"),
}
OF_A_MODEL_THAT_EDITS: dict[tuple[str, ...], tuple[str, str]] = {
    ("--regularisation_path", "x"): ("regularisation_path", "edited from nothing"),
    ("--task", "sft:train", *DRAWN): ("sample_edit_images", "need pictures to edit"),
}
OF_A_MODEL_IN_PARTS: dict[tuple[str, ...], tuple[str, str]] = {  # the text encoder alone
    ("--extra_inputs", "edit_image", "--task", "sft:data_process"): ("extra_inputs", "not among the files"),
    (): ("lora_base_model", "has no dit among the files"),
    ("--task", "sft:data_process"): ("model_paths", "has no vae here"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Files that settings name, by the words that stand for them above."""
    folder = tmp_path_factory.mktemp("files")
    q = "transformer_blocks.0.attn.to_q"
    save_file(
        {f"{q}.lora_A.weight": torch.zeros(2, 7), f"{q}.lora_B.weight": torch.zeros(7, 2)}, folder / "lora.safetensors"
    )
    save_file({"layers.0.weight": torch.zeros(2, 2)}, folder / "weights.safetensors")
    (folder / "lora.pt").write_bytes(b"")
    lacking = next(
        (
            name
            for name, method in resolve_training_methods().items()
            if method.package and not is_there(method.package) and method.gradients
        ),
        "int8",
    )
    return {
        "LORA": str(folder / "lora.safetensors"),
        "TEXT": str(folder / "weights.safetensors"),
        "PICKLE": str(folder / "lora.pt"),
        "text_encoder:LACKING": f"text_encoder:{lacking}",
    }


def resolve_training_methods() -> dict:
    from backend.catalog.quantization.methods import METHODS

    return METHODS


def is_there(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


def config_of(flags: tuple[str, ...], files: dict[str, str], model: Path) -> TrainingConfig:
    return from_flags(TrainingConfig, [files.get(flag, flag) for flag in flags] + ["--model", str(model)])


def said_by_the_form(config: TrainingConfig, spec, *, device: str = "") -> list[Trouble]:
    """As the Train tab and `python -m backend plan` ask it."""
    family = next(family for family in FAMILIES if spec.family == family.NAME)
    named = list(check_training.file_troubles(config.lora))
    return [*named, *check_training.troubles_of(config, sizes_of(spec), family, spec=spec, device=device)]


@pytest.fixture(scope="module")
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


@pytest.fixture
def said_by_the_trainer(loaded, data, accelerator, tmp_path):
    """The sentence with which a run ends before anything is encoded."""
    from backend.training.model.apply_plan import apply_plan
    from backend.training.setup import make_loader

    def ask(config: TrainingConfig) -> Trouble:
        with pytest.raises(Trouble) as refused:
            check_training.check_files(config.lora)
            apply_plan(config, accelerator, None)
            make_loader(config, accelerator, tmp_path)
        return refused.value

    return ask


def cases() -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    for model, table in (
        ("tiny_qwen", REFUSED),
        ("tiny_edit", OF_A_MODEL_THAT_EDITS),
        ("encoder_alone", OF_A_MODEL_IN_PARTS),
    ):
        for flags, (setting, words) in table.items():
            yield model, flags, setting, words


@pytest.fixture(scope="session")
def encoder_alone(tiny_qwen, tmp_path_factory) -> Path:
    import shutil

    folder = tmp_path_factory.mktemp("alone") / "model"
    shutil.copytree(tiny_qwen, folder, ignore=shutil.ignore_patterns("transformer", "vae"))
    return folder


@pytest.mark.parametrize(("model", "flags", "setting", "words"), list(cases()), ids=str)
def test_the_trainer_and_the_form_refuse_in_one_sentence_at_one_setting(
    said_by_the_trainer, request, files, monkeypatch, model, flags, setting, words
):
    monkeypatch.chdir(request.getfixturevalue("tmp_path"))
    folder = request.getfixturevalue(model)
    try:
        config = config_of(flags, files, folder)
    except Trouble as trouble:  # a value that no config can hold is said by the form's own reading of its fields
        assert words in str(trouble)
        return
    if words == "needs the package" and config.model.quant_options == "text_encoder:int8":
        pytest.skip("all packages are installed")
    found = said_by_the_form(config, identify_model(folder, FAMILIES), device="cpu")
    assert found, "the form says nothing"
    said = next((one for one in found if words in str(one)), found[0])
    assert words in str(said) and said.setting == setting
    assert setting in {item.name for item in knobs_of(TrainingConfig)}
    assert str(said_by_the_trainer(config)) == str(found[0])


def test_a_family_that_is_not_drawn_with_is_not_trained(tiny_qwen):
    sizes = replace(sizes_of(identify_model(tiny_qwen, FAMILIES)), title="Another")
    family = next(family for family in FAMILIES if not family.DRAWS)
    assert "cannot be trained here" in str(check_training.troubles_of(TrainingConfig(), sizes, family)[0])


BOOK: tuple[ModuleType, ...] = (
    check_training, input_rules, storage_rules, resolve_training, optimizers, part_entries, target_modules
)  # fmt: skip


def sites(module: ModuleType) -> set[tuple[str, int]]:
    """(file, line) of every call that makes a Trouble."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Trouble",))
    return {(Path(module.__file__).name, call.lineno) for call in calls}


def test_every_rule_of_the_book_has_a_case_above(files, tiny_qwen, tiny_edit, encoder_alone, monkeypatch, tmp_path):
    """A rule that is added is a case that is added."""
    made: set[tuple[str, int]] = set()
    begin = Trouble.__init__

    def noted(self, *words, **more):
        frame = sys._getframe(1)
        made.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        begin(self, *words, **more)

    monkeypatch.setattr(Trouble, "__init__", noted)
    monkeypatch.chdir(tmp_path)
    folders = {"tiny_qwen": tiny_qwen, "tiny_edit": tiny_edit, "encoder_alone": encoder_alone}
    specs = {name: identify_model(folder, FAMILIES) for name, folder in folders.items()}
    for model, flags, _, _ in cases():
        try:
            config = config_of(flags, files, folders[model])
        except Trouble:
            continue
        said_by_the_form(config, specs[model], device="cpu")
    left = {site for module in BOOK for site in sites(module)} - made
    assert not left, f"no case leads to {sorted(left)}"


# Where else a run ends with a sentence: what settings and headers alone do not tell. A module that is not here asks the rule book.
ELSEWHERE = {
    "training/__main__.py": "the run's folder, another process, a fault",
    "training/checkpoint/reporter.py": "the disk",
    "training/checkpoint/state.py": "a saved state",
    "training/encoding/encoded_dataset.py": "what a first stage has left",
    "training/encoding/encoding_cache.py": "a picture",
    "training/encoding/open_images.py": "a picture",
    "training/encoding/prepare.py": "the pictures",
    "training/encoding/sample_source.py": "the cache",
    "training/loop.py": "the loss",
    "training/model/apply_plan.py": "what fits, which the plan shows",
    "training/model/base_model.py": "files that are not there",
    "training/model/fsdp.py": "the launcher's configuration",
    "training/model/peft_adapters.py": "the factors of a LoRA to begin from",
    "training/model/tokenizers.py": "files that are not there",
    "training/optim/optimizers.py": "the constructor of a class of another package",
    "training/run/oom_restart.py": "memory",
    "training/run/resume.py": "a saved state",
    "training/run/save.py": "the disk",
}


def test_whatever_else_ends_a_run_is_no_rule_of_its_settings():
    found = {
        path.relative_to(PROJECT / "backend").as_posix()
        for path in (PROJECT / "backend" / "training").rglob("*.py")
        if "Trouble(" in path.read_text(encoding="utf-8")
    }
    assert found == set(ELSEWHERE)
