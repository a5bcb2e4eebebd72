"""What of the launcher's configuration is taken over, and what is refused; the runs themselves are in `test_commands`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from backend.schema.knobs import from_values
from backend.schema.messages import Trouble
from backend.schema.places import ASSETS
from backend.schema.training import TrainingConfig
from backend.training import shards

pytestmark = pytest.mark.torch
PRESETS = sorted((ASSETS / "presets" / "accelerate").glob("*.yaml"))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """`environment(name=value)`: that of one of two processes of a launcher; as it was before in the end."""
    monkeypatch.setenv(shards.OURS, "")

    def said(**values: str) -> None:
        for name, value in {"WORLD_SIZE": "2", **values}.items():
            monkeypatch.setenv(name, value)

    return said


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}, (True, False)),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, (False, False)),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, (True, False)),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, (False, True)),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, None),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "1"}, None),
        ({}, None),
    ],
)
def test_how_weights_are_spread(environment, values: dict, wanted):
    environment(**values)
    said = shards.take_over()
    assert shards.asked() == (wanted is not None)
    assert not any(os.environ.get(f"ACCELERATE_USE_{name}") for name in ("FSDP", "DEEPSPEED"))
    if wanted:
        assert (lambda found: (found["again"], found["in_ram"]))(json.loads(os.environ[shards.OURS])) == wanted
        assert "FSDP2" in said


def test_a_file_of_deepspeed_is_read(environment, tmp_path: Path):
    file = tmp_path / "ds_z3_cpuoffload.json"
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}})
    )
    environment(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(file))
    assert "ZeRO stage 3" in shards.take_over()
    assert json.loads(os.environ[shards.OURS]) == {"again": True, "in_ram": True}
    more = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}},
        "gradient_clipping": 1.5,
        "bf16": {"enabled": "auto"},
    }
    file.write_text(json.dumps(more))
    environment(ACCELERATE_USE_DEEPSPEED="true")
    said = shards.take_over()
    assert "not by DeepSpeed's engine" in said and "waits in RAM" in said
    assert said.endswith("not taken from there: gradient_clipping (--max_grad_norm).")
    file.write_text("{}")
    environment(ACCELERATE_USE_DEEPSPEED="true")
    with pytest.raises(Trouble, match="cannot be read"):
        shards.take_over()


def test_what_cannot_be_spread_is_refused(environment):
    environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="1")
    with pytest.raises(Trouble, match="FSDP 1"):
        shards.take_over()
    environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    shards.take_over()
    config = TrainingConfig()
    shards.check(config, kept={}, quantised={})
    with pytest.raises(Trouble, match="weights of dit are spread"):
        shards.check(config, kept={}, quantised={"dit": "int8"})
    for values in (
        {"enable_optimizer_cpu_offload": True},
        {"mixed_precision": "fp16"},
        {"customized_optimizer": "Muon"},
    ):
        with pytest.raises(Trouble):
            shards.check(from_values(TrainingConfig, values), kept={}, quantised={})


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_accelerate_reads_the_presets(path: Path):
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(path))
    said = found.deepspeed_config or found.fsdp_config or {"num_machines": found.num_machines}
    assert said in ({"num_machines": 2}, found.fsdp_config) or said["zero_stage"] == int(path.stem[-1])
    assert found.fsdp_config.get("fsdp_version", 2) == 2 and found.mixed_precision == "no"
