"""Memory that truly runs out: the run goes on from its last state a rung lower, says so, and gets to its end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")]
MOST_BYTES = 280 * 2**20  # above what the process has: less than the activations of ten blocks, more than those of one


def life(argv: list[str], handed_on: Path) -> int:
    """A run in a forked process with little memory; where it would start anew, that command is written to `handed_on`."""
    import resource

    from accelerate.state import AcceleratorState

    from backend.engine import memory
    from backend.training.__main__ import main

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 99
    try:
        AcceleratorState._reset_state(reset_partial_state=True)  # runs before this one have left theirs
        memory.give_back("cpu")
        lines = Path("/proc/self/status").read_text().splitlines()
        own = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (own + MOST_BYTES,) * 2)

        def anew(program: str, command: list[str]) -> None:
            handed_on.write_text(json.dumps([program, *command]))
            os._exit(77)

        os.execv = anew
        status = main(argv)
    finally:
        os._exit(status)


def test_a_run_out_of_memory_goes_on_a_rung_lower(run_training, events, data, tmp_path: Path, pictures: Path):
    from tests.tiny_models import make_qwen_image

    model, run, handed_on = (
        make_qwen_image(tmp_path / "model", num_layers=10),
        tmp_path / "run",
        tmp_path / "command.json",
    )
    flags = ["--model", str(model), "--dataset_base_path", str(pictures), "--output_path", str(run), "--height", "256", "--width", "256",
             "--dataset_repeat", "8", "--lora_rank", "4", "--save_steps", "1"]  # fmt: skip
    assert life([*flags, "--max_steps", "1"], handed_on) == 0  # one picture at a time fits
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
    from backend.schema.knobs import from_flags
    from backend.schema.training import TrainingConfig
    from backend.training import ladder

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    flags, taken = ["--trainable_models", "dit"], []
    while found := ladder.next_rung(from_flags(TrainingConfig, flags)):
        flags += found[0]
        taken += found[0]
    assert taken == [
        "--use_gradient_checkpointing",
        "--use_gradient_checkpointing_offload",
        "--enable_optimizer_cpu_offload",
    ]
