"""What lies beside a model's parts."""

from __future__ import annotations

import json
import shutil

import pytest

from backend.catalog.models import model_folder
from backend.catalog.models.identify import identify_files, identify_model
from backend.families import FAMILIES, qwen_image
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS

STARTER = ASSETS / "starter"
DIT = STARTER / "transformer" / "diffusion_pytorch_model.safetensors"


def test_parts_given_one_by_one_find_their_schedule_and_tokenizer():
    alone = identify_files([DIT], FAMILIES)
    assert alone.tokenizer is None and alone.scheduler["use_dynamic_shifting"]
    whole = model_folder.completed(alone, qwen_image)
    assert whole.tokenizer == STARTER / "tokenizer" and whole.path == STARTER
    assert whole.scheduler == json.loads((STARTER / "scheduler" / "scheduler_config.json").read_text())


def test_a_file_that_lies_elsewhere_keeps_what_the_family_says(tmp_path):
    shutil.copy(DIT, tmp_path / "dit.safetensors")
    alone = identify_files([tmp_path / "dit.safetensors"], FAMILIES)
    assert model_folder.completed(alone, qwen_image) == alone
    assert model_folder.request_defaults(alone, qwen_image) == qwen_image.DEFAULTS.request


def test_a_model_says_what_it_wants_to_be_asked_for(tmp_path):
    spec = identify_model(STARTER, FAMILIES)
    assert model_folder.request_defaults(spec, qwen_image)["width"] == 128
    folder = tmp_path / "own"
    shutil.copytree(STARTER, folder)
    for text, width in (
        ("{}", 1328),
        ("[1]", 1328),
        ("not json", 1328),
        ('{"_defaults": {"width": 256, "x": [1]}}', 256),
    ):
        (folder / "model_index.json").write_text(text)
        assert (
            model_folder.request_defaults(
                model_folder.completed(identify_files([folder / "transformer" / DIT.name], FAMILIES), qwen_image),
                qwen_image,
            )["width"]
            == width
        )


def test_a_model_of_one_size_refuses_others(tmp_path):
    spec = identify_model(STARTER, FAMILIES)
    model_folder.check_size(spec, qwen_image, width=128, height=128)
    with pytest.raises(Trouble, match="draws 128 x 128 pixels"):
        model_folder.check_size(spec, qwen_image, width=160, height=128)
    folder = tmp_path / "own"
    shutil.copytree(STARTER, folder)
    for text in ("{}", '{"_sizes": []}', '{"_sizes": 128}', '{"_sizes": [128]}', '{"_sizes": [[64, 64], [160, 128]]}'):
        (folder / "model_index.json").write_text(text)
        model_folder.check_size(identify_model(folder, FAMILIES), qwen_image, width=160, height=128)
