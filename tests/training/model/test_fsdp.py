"""What of the launcher's configuration is taken over, and what is refused; the runs themselves are in `test_commands`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS, PROJECT
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from backend.training.model import fsdp

pytestmark = pytest.mark.torch
PRESETS = sorted((ASSETS / "presets" / "accelerate").glob("*.yaml"))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """`environment(name=value)`: that of one of two processes of a launcher; as it was before in the end."""
    monkeypatch.setenv(fsdp.OURS, "")

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
    config, said = fsdp.read_launcher_environment(TrainingConfig())
    assert config == TrainingConfig() and fsdp.asked() == (wanted is not None)
    assert not any(os.environ.get(f"ACCELERATE_USE_{name}") for name in ("FSDP", "DEEPSPEED"))
    if wanted is None:
        assert bool(said) == bool(values)
    else:
        assert (lambda found: (found["again"], found["in_ram"]))(json.loads(os.environ[fsdp.OURS])) == wanted
        assert "FSDP2" in said


def test_a_file_of_deepspeed_is_read(environment, tmp_path: Path):
    file = tmp_path / "ds_z3_cpuoffload.json"
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}})
    )
    environment(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(file))
    assert "ZeRO stage 3" in fsdp.read_launcher_environment(TrainingConfig())[1]
    assert json.loads(os.environ[fsdp.OURS]) == {
        "again": True,
        "in_ram": True,
        "summed_whole": False,
        "no_more": True,
    }
    more = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}},
        "gradient_clipping": 1.5,
        "bf16": {"enabled": "auto"},
    }
    file.write_text(json.dumps(more))
    environment(ACCELERATE_USE_DEEPSPEED="true")
    _, said = fsdp.read_launcher_environment(TrainingConfig())
    assert "not by DeepSpeed's engine" in said and "waits in RAM" in said
    assert "gradients; weights are spread as well" in said and "wait in RAM too" in said
    assert said.endswith("not taken from there: gradient_clipping (--max_grad_norm).")
    file.write_text("{}")
    environment(ACCELERATE_USE_DEEPSPEED="true")
    assert "spreads nothing" in fsdp.read_launcher_environment(TrainingConfig())[1] and not fsdp.asked()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"zero_optimization": 2}', "cannot be read"),
        ('{"zero_optimization": {"stage": 4}}', "ZeRO stage 4"),
        ('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}', "offloads to gpu"),
    ],
)
def test_a_wrong_file_of_deepspeed_is_one_sentence(environment, tmp_path: Path, text: str, words: str):
    (tmp_path / "ds.json").write_text(text)
    environment(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(tmp_path / "ds.json"))
    with pytest.raises(Trouble, match=words):
        fsdp.read_launcher_environment(TrainingConfig())


def test_one_process_keeps_the_optimizer_in_ram_where_the_configuration_asks(environment):
    environment(
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu",
        ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE="cpu",
        WORLD_SIZE="1",
    )
    config, said = fsdp.read_launcher_environment(TrainingConfig())
    assert config.memory.enable_optimizer_cpu_offload and not fsdp.asked()
    assert "nothing is spread" in said and "works in RAM" in said and "--enable_model_cpu_offload" in said


def test_what_ends_a_process_stands_where_the_launcher_looks(environment, tmp_path: Path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from backend.training.__main__ import main

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert main(["--nonsense", "1"]) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert "--nonsense" in str(ChildFailedError("train.py", {0: failure}))


def test_what_cannot_be_spread_is_refused(environment):
    environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="1")
    with pytest.raises(Trouble, match="FSDP 1"):
        fsdp.read_launcher_environment(TrainingConfig())
    environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    fsdp.read_launcher_environment(TrainingConfig())
    config = TrainingConfig()
    fsdp.check(config, kept={}, quantized={})
    with pytest.raises(Trouble, match="weights of dit are spread"):
        fsdp.check(config, kept={}, quantized={"dit": "int8"})
    for values in (
        {"enable_optimizer_cpu_offload": True},
        {"mixed_precision": "fp16"},
        {"customized_optimizer": "Muon"},
    ):
        with pytest.raises(Trouble):
            fsdp.check(from_values(TrainingConfig, values), kept={}, quantized={})


def test_a_stage_of_zero_needs_no_package_and_a_refused_run_ends_with_its_sentence(data, tmp_path: Path):
    argv = [
        "-m",
        "backend.training.launch",
        "--config_file",
        str(PRESETS[-1]),
        "--main_process_port",
        "0",
        "--num_processes",
        "2",
    ]
    flags = [
        "-m",
        "backend.training",
        "--dataset_base_path",
        str(tmp_path / "none"),
        "--output_path",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *argv, *flags], env=environment, cwd=data.root, capture_output=True, text=True, timeout=120
    )
    said = (ended.stdout + ended.stderr).strip().splitlines()
    assert PRESETS[-1].stem == "zero3" and ended.returncode == 2, said
    assert "none does not exist" in said[-1] and not any("Traceback" in line for line in said)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_accelerate_reads_the_presets(path: Path):
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(path))
    said = found.deepspeed_config or found.fsdp_config or {"num_machines": found.num_machines}
    assert said in ({"num_machines": 2}, found.fsdp_config) or said["zero_stage"] == int(path.stem[-1])
    assert found.fsdp_config.get("fsdp_version", 2) == 2 and found.mixed_precision == "no"


class Block(torch.nn.Module):
    """A linear layer that notes, when it is called, which dtype its weight was gathered in."""

    def __init__(self, *, trains: bool, dtype: torch.dtype):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16, dtype=dtype).requires_grad_(trains)
        self.adapter = torch.nn.Linear(16, 2, bias=False)
        self.gathered = None

    def forward(self, x):
        self.gathered = self.layer.weight.dtype
        return self.layer(x.to(self.gathered)).to(x.dtype) + self.adapter(x.to(self.adapter.weight.dtype)).sum()


class Blocks(torch.nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, **settings):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(**settings), Block(**settings)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A group of this one process."""
    import torch.distributed as group

    group.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    group.destroy_process_group()


@pytest.mark.parametrize(
    ("trains", "stored", "computing", "gathered", "let_go"),
    [
        (True, torch.float32, torch.bfloat16, torch.bfloat16, False),  # wide weights are cast before they are sent
        (True, torch.float32, torch.float32, torch.float32, False),
        (False, torch.bfloat16, torch.bfloat16, torch.bfloat16, True),  # frozen blocks beside an adapter go after use
    ],
)
def test_how_a_block_is_gathered_and_whether_it_stays(alone, monkeypatch, trains, stored, computing, gathered, let_go):
    from types import SimpleNamespace

    from torch.distributed.tensor import DTensor

    for stage, goes in ((2, let_go), (3, True)):
        wanted = {"again": stage == 3, "in_ram": False, "summed_whole": False, "no_more": True}
        monkeypatch.setenv(fsdp.OURS, json.dumps(wanted))
        part = Blocks(trains=trains, dtype=stored)
        learner = SimpleNamespace(parts={"dit": part}, dtype=computing)
        fsdp.spread(learner, SimpleNamespace(device=torch.device("cpu"), num_processes=1))
        loss = part(torch.randn(2, 16)).float().sum()
        assert [block.gathered for block in part.blocks] == [gathered] * 2
        weight = part.blocks[0].layer.weight
        assert isinstance(weight, DTensor) == goes, (stage, trains)
        loss.backward()
        weight = part.blocks[0].layer.weight
        assert isinstance(weight, DTensor) and weight.dtype == stored
        assert (weight.grad is not None) == trains
        assert not trains or weight.grad.dtype == torch.float32
