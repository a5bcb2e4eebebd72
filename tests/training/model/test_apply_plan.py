"""`--vram`: the trainer takes the plan for that much memory, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.models.identify import identify_model
from backend.dataset.look_ahead import look_ahead
from backend.engine.devices import device_memory
from backend.families import FAMILIES, qwen_image
from backend.planner.costs.device_speed import what_if
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.plan import plan, plan_here
from backend.schema.memory_plan import GIB
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from backend.training.encoding.peak_meter import LargestBatch
from backend.training.model.apply_plan import card_of
from backend.training.run.peak_report import predicted_bytes

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def test_a_run_takes_the_plan_s_settings(run_training, events, data, pictures, tmp_path: Path):
    spec = identify_model(ASSETS / "starter", FAMILIES)
    flags = ("--max_steps", 1, "--no-data_cache", "--batch_size", 4, "--vram")
    said = {"max_pixels": 4096, "lora_rank": 4, "batch_size": 4, "dataset_base_path": str(pictures)}
    config = from_values(TrainingConfig, said)
    known = look_ahead(config, sizes_of(spec), qwen_image).known  # the captions are short
    large = plan_here(spec, card_of("8", CPU), config, None, user=data.user, known=known)
    assert not any(large.settings.values())
    amount = large.peak_live_bytes * 0.9 / GIB
    assert run_training(tmp_path / "run", *flags, f"{amount:.6f}", model=ASSETS / "starter") == 0
    said = next(event["plan"] for event in events(tmp_path / "run") if event["event"] == "note" and "plan" in event)
    assert said["settings"].get("use_gradient_checkpointing") or said["settings"].get("offload_models")
    assert said["peak_high_bytes"] < large.peak_high_bytes
    assert run_training(tmp_path / "none", *flags, "0.001", model=ASSETS / "starter") == 2
    assert any(
        event["event"] == "trouble" and "does not fit" in event["message"] for event in events(tmp_path / "none")
    )


def test_a_run_is_predicted_as_its_config_says(data):
    spec, card = identify_model(ASSETS / "starter", FAMILIES), device_memory.probe(CPU)
    said = [
        {},
        {"use_gradient_checkpointing": True},
        {"use_gradient_checkpointing": True, "enable_model_cpu_offload": True},
    ]
    largest = LargestBatch(65536, 20, 256, 256, 1)
    found = [
        max(predicted_bytes(from_values(TrainingConfig, more), sizes_of(spec), card, largest).values()) for more in said
    ]
    assert found == sorted(found, reverse=True) and len(set(found)) == 3


def test_amounts_of_memory():
    assert card_of("12", CPU).total_bytes == card_of(" 12 GiB", CPU).free_bytes == 12 * GIB
    now = card_of("auto", CPU)
    assert now.total_bytes == device_memory.probe(CPU).total_bytes and now.reserve_bytes > 0
    for wrong in ("much", "-3", "0", "nan", "inf"):
        with pytest.raises(Trouble, match="--vram"):
            card_of(wrong, CPU)


def test_what_the_config_says_itself_stays():
    said = {
        "fp8_models": "dit",
        "enable_model_cpu_offload": True,
        "use_gradient_checkpointing": True,
        "max_pixels": 1024 * 1024,
    }
    found = plan("FLUX.1-dev", what_if("80GiB")[0], from_values(TrainingConfig, said))
    assert found.settings.keys().isdisjoint({"fp8_models", "enable_model_cpu_offload", "offload_models"})
    assert found.settings["use_gradient_checkpointing"] and found.streamed_blocks["dit"]
    assert found.settings["resident_blocks"] == len(found.resident_blocks["dit"]) > 0  # it was not said how many
    for count in (0, 9):
        found = plan("FLUX.1-dev", what_if("80GiB")[0], from_values(TrainingConfig, {**said, "resident_blocks": count}))
        assert len(found.resident_blocks["dit"]) == count == found.settings["resident_blocks"]
    less = plan("FLUX.1-dev", what_if("8GiB")[0], from_values(TrainingConfig, {**said, "resident_blocks": 40}))
    assert 0 < less.settings["resident_blocks"] < 40  # it would not fit
    assert found.configs["dit"].preparing_dtype == "float8_e4m3fn"
