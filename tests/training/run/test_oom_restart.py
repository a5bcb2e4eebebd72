"""Memory that truly runs out: the run goes on from its last state a rung lower, says so, and gets to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend.schema.paths import PROJECT

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")]
MOST_BYTES = 280 * 2**20  # above what the process has: less than the activations of ten blocks, more than those of one


LIFE = """
import json, os, resource, sys
from pathlib import Path
import backend.training.setup, backend.training.loop, peft.tuners.lora, diffusers.schedulers
from backend.engine.devices import device_memory as memory
from backend.training.__main__ import main

memory.empty_cache("cpu")
own = next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (own + int(sys.argv[1]),) * 2)

def anew(program, command):
    Path(sys.argv[2]).write_text(json.dumps([program, *command]))
    os._exit(77)

os.execv = anew
sys.exit(main(sys.argv[3:]))
"""


def life(argv: list[str], handed_on: Path) -> int:
    """A run in a fresh process with little memory (one that has freed much would have it still); where it would start anew, that command
    is written to `handed_on`."""
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", LIFE, str(MOST_BYTES), str(handed_on), *argv], env=env, timeout=300
    ).returncode


def test_a_run_out_of_memory_goes_on_a_rung_lower(run_training, events, data, tmp_path: Path, pictures: Path):
    from tests.tiny_models import make_qwen_image

    model, run, handed_on = (
        make_qwen_image(tmp_path / "model", num_layers=10),
        tmp_path / "run",
        tmp_path / "command.json",
    )
    flags = [
        "--model",
        str(model),
        "--dataset_base_path",
        str(pictures),
        "--output_path",
        str(run),
        "--height",
        "256",
        "--width",
        "256",
        "--dataset_repeat",
        "8",
        "--lora_rank",
        "4",
        "--save_steps",
        "1",
    ]
    assert run_training.as_typed([*flags, "--max_steps", "1"]) == 0
    more = [*flags, "--max_steps", "2", "--batch_size", "16", "--resume_from_checkpoint", "latest"]
    assert life(more, handed_on) == 77
    program, name, _, module, *again = json.loads(handed_on.read_text())
    assert (program, name, module) == (sys.executable, sys.executable, "backend.training")
    assert again[: len(more)] == more and "--use_gradient_checkpointing" in again
    assert life(again, handed_on) == 0
    said = events(run)
    assert any(
        "Memory ran out; going on from the last state by computing activations again" in str(event) for event in said
    )
    assert [event["step"] for event in said if event["event"] == "step"] == [1, 2]
    assert [event["step"] for event in said if event["event"] == "resumed"] == [1, 1] and said[-1][
        "reason"
    ] == "complete"


def test_the_rungs_of_training_whole_parts_on_a_card(monkeypatch):
    from backend.schema.settings import from_flags
    from backend.schema.training.config import TrainingConfig
    from backend.training.run import oom_restart

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    flags, taken = ["--trainable_models", "dit"], []
    while found := oom_restart.next_fallback(from_flags(TrainingConfig, flags)):
        flags += found[0]
        taken += found[0]
    assert taken == [
        "--use_gradient_checkpointing",
        "--use_gradient_checkpointing_offload",
        "--enable_optimizer_cpu_offload",
    ]
