"""What the README says can be done as it stands."""

from __future__ import annotations

import ast
import re
import shlex

import launch
from backend.schema.paths import PROJECT
from backend.schema.settings import from_flags
from backend.schema.training.config import TrainingConfig

README = (PROJECT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)


def block_with(words: str) -> str:
    return next(text for _, text in BLOCKS if words in text)


def test_every_link_and_picture_is_there():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(targets) > 10
    missing = [target for target in targets if not target.startswith("http") and not (PROJECT / target).exists()]
    assert missing == []


def test_the_tree_is_the_tree():
    named = [line.split()[0] for line in block_with("launch.py          makes").splitlines() if line.strip()]
    assert [name for name in named if not (PROJECT / name).exists()] == []


def test_the_flags_of_the_launcher_exist():
    rows = re.findall(r"^\| `(--[^`]+)` \|", README, flags=re.MULTILINE)
    assert len(rows) == 8
    for row in rows:
        launch.flags(shlex.split(row))


def test_the_training_command_is_understood():
    words = shlex.split(block_with("accelerate launch").replace("\\\n", " "))
    assert words[:4] == ["accelerate", "launch", "-m", "backend.training"]
    config = from_flags(TrainingConfig, words[4:])
    assert config.output.output_path == "./models/train/my_lora"
    assert (PROJECT / config.dataset.dataset_base_path).is_dir()


def test_the_python_block_is_python_and_uses_what_the_command_makes():
    block = block_with("from_pretrained")
    ast.parse(block)
    epochs = from_flags(
        TrainingConfig, shlex.split(block_with("accelerate launch").replace("\\\n", " "))[4:]
    ).training.num_epochs
    assert f"models/train/my_lora/epoch-{epochs - 1}.safetensors" in block
