"""States and results are whole or not there: killed at any moment, on a full disk, and cleaned up after."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from backend.schema.messages import Trouble
from backend.schema.places import PROJECT
from backend.training.checkpoint import (
    list_states,
    load_state,
    prune_states,
    save_result,
    save_state,
    set_random_state,
    step_of,
)
from tests.training.kill_campaign import state

pytestmark = pytest.mark.torch


def test_a_state_comes_back_as_it_was(tmp_path: Path):
    torch.manual_seed(5)
    save_state(tmp_path, state(3))
    expected = torch.rand(2), random.random()
    found = load_state(list_states(tmp_path)[0])
    assert found.step == 3 and found.facts == {"a": [1]}
    assert torch.equal(found.weights["dit.a"], state(3).weights["dit.a"])
    assert found.optimizers[0]["param_groups"] == state(3).optimizers[0]["param_groups"]
    set_random_state(found.random[0])
    assert torch.equal(torch.rand(2), expected[0]) and random.random() == expected[1]


def test_the_newest_are_kept_and_every_so_manyth(tmp_path: Path):
    for step in (10, 20, 30, 40, 50):
        save_state(tmp_path, state(step, 1))
    left = tmp_path / "checkpoints" / ".step-000060.1.tmp"
    left.mkdir()
    prune_states(tmp_path, keep=2, keep_every=20)
    assert [step_of(path) for path in list_states(tmp_path)] == [20, 40, 50]
    assert not left.exists()


def test_a_damaged_state_is_said(tmp_path: Path):
    folder = save_state(tmp_path, state(1))
    (folder / "weights.safetensors").write_bytes(b"torn")
    with pytest.raises(Trouble) as caught:
        load_state(folder)
    assert caught.value.kind == "damaged" and "step-000001" in caught.value.message


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_thirty_times_while_saving_every_state_is_whole(tmp_path: Path):
    """Nothing under a final name is ever torn, and the kills did come in the middle of saving."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "tests.training.kill_campaign", str(tmp_path), "30"]
    done = subprocess.run(argv, env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rounds, steps, inside = map(int, done.stdout.split())
    assert rounds == 30 and steps >= 30 and inside >= 5


@pytest.fixture
def small_disk(tmp_path: Path):
    """A disk of 12 MiB; skipped where none can be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_sentence_and_the_last_state_stays(small_disk: Path):
    save_state(small_disk, state(1))
    for attempt in (
        lambda: save_state(small_disk, state(2, 5)),
        lambda: save_result(small_disk / "r.safetensors", {"a": torch.ones(2**22)}, {}),
    ):
        with pytest.raises(Trouble) as caught:
            attempt()
        assert caught.value.kind == "disk_full"
        assert "could not be saved" in caught.value.message and "full" in caught.value.message
    assert sorted(path.name for path in small_disk.rglob("*") if path.name.startswith(".")) == []
    assert [load_state(path).step for path in list_states(small_disk)] == [1]


def test_a_run_on_a_full_disk_goes_on_and_ends_with_the_sentence(run_training, events, small_disk: Path):
    """Room for some states but not for the results as well: what was saved before stays readable."""
    run = small_disk / "run"
    run.mkdir()
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 150_000))
    flags = ("--max_steps", 4, "--save_steps", 2, "--lora_rank", 16, "--lora_target_modules", "all-linear")
    assert run_training(run, *flags) == 2
    said = events(run)
    troubles = [event for event in said if event["event"] == "trouble"]
    assert troubles and {event["kind"] for event in troubles} == {"disk_full"}
    assert [event["step"] for event in said if event["event"] == "step"] == [1, 2, 3, 4]
    (small_disk / "ballast").unlink()
    assert run_training(run, *flags) == 0
