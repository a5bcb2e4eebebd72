"""What a run takes is counted phase by phase, foreseen, kept for the next estimate, and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.models.identify import identify_model
from backend.engine.devices import device_memory
from backend.families import FAMILIES
from backend.planner import history
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.page_estimate import estimate_for_page
from backend.schema.paths import ASSETS
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from backend.training.encoding.peak_meter import LargestBatch
from backend.training.run import peak_report

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
STARTER = ASSETS / "starter"
SAMPLE = ("--sample_prompts", "a ball", "--sample_inference_steps", 1)


def ran(events, folder: Path) -> dict:
    """The last word of a run on its memory."""
    return [event for event in events(folder) if event["event"] == "memory"][-1]


# every way to keep weights, activations and results; two of them draw and save between steps
@pytest.mark.parametrize(
    "flags",
    [
        ("--max_steps", 3, "--save_steps", 2, *SAMPLE),
        ("--max_steps", 2, "--use_gradient_checkpointing", "--fp8_models", "dit"),
        ("--max_steps", 3, "--save_steps", 2, "--batch_size", 2, "--mixed_precision", "no"),
        ("--max_steps", 2, "--enable_model_cpu_offload"),
        (
            "--max_steps",
            2,
            "--batch_size",
            8,
            "--dataset_repeat",
            3,
            "--use_gradient_checkpointing",
            "--lora_target_modules",
            "attention",
        ),
        ("--max_steps", 2, "--trainable_models", "dit", *SAMPLE),
        ("--max_steps", 2, "--trainable_models", "dit", "--use_gradient_checkpointing_offload", "--batch_size", 2),
    ],
    ids=lambda flags: " ".join(str(flag).removeprefix("--") for flag in flags[2:]),
)
def test_every_phase_takes_what_was_predicted(run_training, events, tmp_path: Path, flags):
    assert run_training(tmp_path / "run", *flags, model=STARTER) == 0
    phases = ran(events, tmp_path / "run")["phases"]
    assert phases.keys() == {"forward", "backward", "optimizer", "save", *(["sample"] if SAMPLE[0] in flags else [])}
    off = {name: round(predicted / found - 1, 4) for name, (predicted, found) in phases.items()}
    assert max(map(abs, off.values())) <= 0.02, off


def test_a_run_teaches_the_next_estimate_and_the_page_says_so(run_training, events, data, tmp_path: Path):
    flags = ("--max_steps", 2, "--no-data_cache")
    for number in range(2):
        assert run_training(tmp_path / str(number), *flags, model=STARTER) == 0
    said = ran(events, tmp_path / "1")
    kept = json.loads((data.user / "measured.json").read_text())
    [(family, runs)] = kept.items()
    assert family.endswith("/qwen_image") and len(runs) == 2
    assert (runs[-1]["predicted_live"], runs[-1]["measured_live"]) == (said["predicted_bytes"], said["measured_bytes"])
    assert max(found for _, found in said["phases"].values()) == said["measured_bytes"]
    assert any("Memory at most: predicted" in event.get("message", "") for event in events(tmp_path / "1"))

    config = from_values(TrainingConfig, json.loads((tmp_path / "1" / "config.json").read_text()))
    card, spec = device_memory.probe(CPU), identify_model(STARTER, FAMILIES)
    found = estimate_for_page(spec, card, config, user=data.user)
    assert found.last_time.startswith("Last time: predicted") and found.last_time.count("MiB") == 2
    # the page knows from that run how large its pictures and how long its captions are
    step = next(phase for phase in found.plan.phases if phase.name == "step")
    assert step.live_bytes == pytest.approx(said["measured_bytes"], rel=0.02)
    disk, [result] = found.plan.disk, (tmp_path / "1").glob("step-*.safetensors")
    header = 8 + int.from_bytes(result.read_bytes()[:8], "little")
    assert disk["result"] == result.stat().st_size - header and disk["picture"] == 0  # it kept no encodings
    state = sum(file.stat().st_size for file in (tmp_path / "1" / "checkpoints").rglob("*") if file.is_file())
    assert disk["state"] == pytest.approx(state, abs=10 * header) and found.plan.disk_words in found.sentences
    other = from_values(TrainingConfig, {"batch_size": 4}, base=config)
    assert not estimate_for_page(spec, card, other, user=data.user).last_time


def test_what_was_learnt_corrects_training_and_not_drawing(data):
    spec, card, file = identify_model(STARTER, FAMILIES), device_memory.probe(CPU), data.user / "measured.json"
    sizes, largest, config = sizes_of(spec), LargestBatch(65536, 20, 256, 256, 1), TrainingConfig()
    before = peak_report.predicted_bytes(config, sizes, card, largest)
    for _ in range(2):
        history.remember(
            file, card, "qwen_image", kind=history.kind_of(config), predicted_bytes=10**6, measured_bytes=10**6 + 5000
        )
    after = peak_report.predicted_bytes(config, sizes, card, largest)
    assert {after[name] - before[name] for name in before} == {5000}
    assert history.corrected(peak_report.fixed_of(card), card, "qwen_image", file).learnt_bytes == 0
