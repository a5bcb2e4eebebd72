"""The starter as it ships: its size, its notices, and that the stock pipeline draws with it."""

import json
from pathlib import Path

import pytest

STARTER = Path(__file__).parents[3] / "assets" / "starter"


def test_it_is_small():
    assert sum(path.stat().st_size for path in STARTER.rglob("*") if path.is_file()) <= 30_000_000


def test_its_configs_hold_no_path_of_a_machine():
    for path in STARTER.rglob("*.json"):
        assert "_name_or_path" not in path.read_text("utf-8"), path


def test_whose_pictures_it_saw_is_said():
    assert "MIT License" in (STARTER / "LICENSE.fluent-emoji.txt").read_text("utf-8")
    assert "Microsoft" in (STARTER / "NOTICE").read_text("utf-8")


def test_its_index_names_the_stock_classes():
    index = json.loads((STARTER / "model_index.json").read_text("utf-8"))
    assert index["_class_name"] == "QwenImagePipeline"
    assert index["text_encoder"][1] == "Qwen2_5_VLForConditionalGeneration"


@pytest.mark.torch
@pytest.mark.slow
def test_the_stock_pipeline_draws_a_red_apple():
    torch = pytest.importorskip("torch")
    import numpy
    from diffusers import QwenImagePipeline

    torch.set_num_threads(1)
    pipe = QwenImagePipeline.from_pretrained(STARTER, torch_dtype=torch.bfloat16, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    drawn = pipe(
        ["an apple", "a blue circle"],
        negative_prompt=[" ", " "],
        true_cfg_scale=3.0,
        num_inference_steps=8,
        width=128,
        height=128,
        generator=[torch.Generator().manual_seed(seed) for seed in (0, 0)],
    ).images
    apple, circle = (numpy.asarray(picture, numpy.float32) for picture in drawn)
    red, green, blue = apple[52:76, 52:76].mean((0, 1))
    assert red > green + 60 and red > blue + 30
    red, green, blue = circle[52:76, 52:76].mean((0, 1))
    assert blue > red + 60
    for picture in (apple, circle):
        assert picture[:6, :6].mean() > 235  # no ground is said, so it is white
