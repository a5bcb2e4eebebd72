"""What a run will be given to do is known before it starts, without torch: sizes, captions, steps, samples."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from PIL import Image

from backend.catalog.models.identify import identify_model
from backend.dataset import look_ahead
from backend.families import FAMILIES, by_name
from backend.families.qwen_image import prompt_template
from backend.planner.costs.model_sizes import sizes_of
from backend.schema.paths import ASSETS
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig

SIZES = sizes_of(identify_model(ASSETS / "starter", FAMILIES))


def look(folder: Path, wait: float | None = None, **settings) -> look_ahead.Ahead:
    config = from_values(TrainingConfig, {"dataset_base_path": str(folder), "max_pixels": 65536, **settings})
    return look_ahead.look_ahead(config, SIZES, by_name("qwen_image"), wait=wait)


def pictures(folder: Path, *sizes: tuple[int, int], caption: str = "a fox") -> Path:
    folder.mkdir()
    for number, size in enumerate(sizes):
        Image.new("RGB", size).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"{caption} {number}")
    return folder


def test_steps_follow_from_epochs_pictures_batch_and_accumulation(tmp_path: Path):
    data = pictures(tmp_path / "data", *[(256, 256)] * 10)
    assert look(data, num_epochs=2).known["total_steps"] == 20
    assert look(data, num_epochs=2, batch_size=4).known["total_steps"] == 6
    assert look(data, num_epochs=3, dataset_repeat=2, gradient_accumulation_steps=4).known["total_steps"] == 15
    assert look(data, num_epochs=2, validation_split=0.2).known["total_steps"] == 16
    assert (
        look(data, num_epochs=1, prior_pictures=3).known["total_steps"] == 20
    )  # half of the samples are such pictures
    assert look(data, num_epochs=2, max_steps=7).known["total_steps"] == 7
    assert look(data, batch_size=16).known["batch"] == 10


def test_the_largest_batch_and_its_longest_caption_are_what_is_planned_for(tmp_path: Path):
    data = pictures(tmp_path / "data", (256, 128), (320, 320), (64, 64))
    (data / "2.txt").write_text("fox " * 40)  # of a small picture, which takes less with all its words
    known = look(data).known
    told = prompt_template.count_tokens(SIZES.tokenizers, ["a fox 1"], variant="base")[0]
    assert (known["width"], known["height"], known["text_tokens"]) == (256, 256, told.given)
    assert (
        known["read_tokens"]
        == prompt_template.count_tokens(SIZES.tokenizers, [" ".join(["fox"] * 40)], variant="base")[0].read
    )


def test_samples_have_sizes_and_words_of_their_own(tmp_path: Path):
    data = pictures(tmp_path / "data", (256, 128))
    known = look(data, sample_prompts="a red fox\napple", sample_width=512).known
    told = prompt_template.count_tokens(SIZES.tokenizers, ["a red fox", "apple", " "], variant="base")
    assert known["sample_size"] == (512, 128) and known["sample_tokens"] == max(one.given for one in told)


def test_a_changed_caption_is_seen_and_a_dataset_that_is_none_is_said(tmp_path: Path):
    data = pictures(tmp_path / "data", (256, 256))
    before = look(data).known["text_tokens"]
    (data / "0.txt").write_text("fox " * 300)
    assert look(data).known["text_tokens"] > before
    assert "does not exist" in look(tmp_path / "no").trouble


def test_a_keystroke_waits_for_no_large_dataset(tmp_path: Path):
    data = pictures(tmp_path / "data", (64, 64))
    for number in range(1, 1500):
        (data / f"{number}.png").hardlink_to(data / "0.png")
        (data / f"{number}.txt").write_text(f"a fox number {number} in the forest")
    first = look(data, wait=0.0)
    assert first.looking or first.known
    assert look(data).known["total_steps"] == 1500
    best = min(_seconds(data, rate) for rate in (1e-3, 2e-3, 3e-3))
    assert best < 0.05


def _seconds(data: Path, rate: float) -> float:
    began = time.process_time()
    assert look(data, wait=0.0, learning_rate=rate).known
    return time.process_time() - began


@pytest.mark.torch
def test_the_run_finds_what_was_foreseen(run_training, events, tmp_path: Path):
    data = pictures(tmp_path / "pictures", (256, 192), (128, 128), caption="a red fox in the snow " * 12)
    flags = (
        "--dataset_base_path",
        data,
        "--num_epochs",
        1,
        "--max_pixels",
        65536,
        "--sample_prompts",
        "ball",
        "--sample_inference_steps",
        1,
        "--sample_width",
        320,
    )
    known = look(data, sample_prompts="ball", sample_width=320).known
    assert run_training(tmp_path / "run", *flags, model=ASSETS / "starter") == 0
    started = next(event for event in events(tmp_path / "run") if event["event"] == "started")
    assert started["total_steps"] == known["total_steps"]
    from backend.planner import predict_peak
    from backend.planner.costs.layout import CPU_FIXED

    config = from_values(
        TrainingConfig, {"sample_prompts": "ball", "sample_width": 320, "max_pixels": 65536, "lora_rank": 4}
    )
    phases = [event for event in events(tmp_path / "run") if event["event"] == "memory"][-1]["phases"]
    lora = from_values(
        TrainingConfig, {name: value for name, value in _settings(tmp_path / "run").items()}, base=config
    )
    found = predict_peak.run_bytes(lora, SIZES, CPU_FIXED, **known)
    off = {name: round(found[name] / measured - 1, 4) for name, (_, measured) in phases.items()}
    assert max(map(abs, off.values())) <= 0.02, off


def _settings(folder: Path) -> dict:
    import json

    return json.loads((folder / "config.json").read_text())
