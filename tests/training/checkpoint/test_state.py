"""States and results are whole or not there: killed at any moment, on a full disk, and cleaned up after."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from backend.schema.messages import Trouble
from backend.schema.paths import PROJECT
from backend.training.checkpoint.async_writer import AsyncWriter
from backend.training.checkpoint.state import (
    TrainingState,
    list_states,
    load_state,
    prune_states,
    random_state,
    save_exported,
    save_state,
    set_random_state,
    step_of,
)

pytestmark = pytest.mark.torch


def state(step: int, megabytes: int = 1) -> TrainingState:
    weights = {"dit.a": torch.full((megabytes, 2**18), float(step))}
    optimizers = [{"state": {0: {"mean": weights["dit.a"] / 2}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}]
    return TrainingState(
        step=step, weights=weights, optimizers=optimizers, ema=dict(weights), random=[random_state()], facts={"a": [1]}
    )


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
    for name, spoil, words in (
        ("weights.safetensors", lambda file: file.write_bytes(b"torn"), "cannot be read"),
        ("optimizers.pt", Path.unlink, "is missing"),
        ("state.json", lambda file: file.write_text("{}"), "cannot be read"),
    ):
        spoil(folder / name)
        with pytest.raises(Trouble) as caught:
            load_state(folder)
        assert caught.value.kind == "damaged" and caught.value.hint == "There is no other: begin anew."
        assert caught.value.message == f"The saved state {folder} is damaged: its {name} {words}."
    whole = save_state(tmp_path, state(2))
    with pytest.raises(Trouble) as caught:
        load_state(folder)
    assert str(whole) in caught.value.hint


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_runs_killed_thirty_times_lose_little_and_end_as_the_uninterrupted(tmp_path: Path):
    """Nothing under a final name is ever torn, whatever the run was at; kills did come while files were being written."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "tests.training.kill_campaign", str(tmp_path / "campaign"), "30"]
    done = subprocess.run(argv, env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert (
        counts["most_lost"] <= 3
        and counts["rounds"] == 30
        and counts["complete"] >= 1
        and counts["inside"] >= 3
        and len(counts["phases"]) >= 3
    )


def test_what_is_to_be_saved_is_saved_where_no_thread_can_be_started(tmp_path: Path, monkeypatch):
    def no_room(thread) -> None:
        raise RuntimeError("can't start new thread")

    def fail(kept) -> None:
        raise Trouble("disk_full", "full")

    monkeypatch.setattr(threading.Thread, "start", no_room)
    writer = AsyncWriter()
    writer.start(lambda kept: save_state(tmp_path, state(3)))
    writer.wait()
    assert load_state(list_states(tmp_path)[0]).step == 3
    writer.start(fail)
    with pytest.raises(Trouble):
        writer.wait()
    writer.finish()


def test_a_step_waits_for_the_disk_but_not_for_clearing_up_and_is_told_of_a_failure():
    may_write, may_clear, found = threading.Event(), threading.Event(), []
    writer = AsyncWriter()

    def write(kept) -> None:
        assert may_write.wait(20)
        found.append("written")
        kept()
        assert may_clear.wait(20)
        found.append("cleared")

    def fail(kept) -> None:
        raise Trouble("disk_full", "full")

    writer.wait()  # for nothing
    writer.start(write)
    threading.Timer(0.05, may_write.set).start()
    writer.wait()
    assert found == ["written"]
    may_clear.set()
    writer.start(fail)
    assert found == ["written", "cleared"]
    with pytest.raises(Trouble):
        writer.wait()
    writer.finish()  # it was told once
    writer.start(fail)
    with pytest.raises(Trouble):
        writer.start(lambda kept: found.append("not reached"))
    writer.finish()
    assert found == ["written", "cleared"]


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
        lambda: save_exported(small_disk / "r.safetensors", {"a": torch.ones(2**22)}, {}),
    ):
        with pytest.raises(Trouble) as caught:
            attempt()
        assert caught.value.kind == "disk_full"
        assert "could not be saved" in caught.value.message and "full" in caught.value.message
    assert sorted(path.name for path in small_disk.rglob("*") if path.name.startswith(".")) == []
    assert [load_state(path).step for path in list_states(small_disk)] == [1]


def test_a_full_disk_ends_a_run_in_a_sentence_unless_an_older_state_makes_room(run_training, events, small_disk: Path):
    run, ballast = small_disk / "run", small_disk / "ballast"
    flags = ("--save_steps", 2, "--lora_rank", 16, "--lora_target_modules", "all-linear")
    again = ("--resume_from_checkpoint", "latest", "--max_steps", 6)
    assert run_training(run, *flags, "--max_steps", 2) == 0
    one = sum(path.stat().st_size for path in list_states(run)[0].iterdir())
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - one * 9 // 10))
    assert run_training(run, *flags, *again) == 2  # there is but one state, which stays
    said = events(run)
    assert [event["kind"] for event in said if event["event"] == "trouble"] == ["disk_full"]
    assert [step_of(path) for path in list_states(run)] == [2] and said[-1]["event"] == "trouble"
    assert [event["step"] for event in said if event["event"] == "step"][-1] == 4
    ballast.unlink()
    assert run_training(run, *flags, "--resume_from_checkpoint", "latest", "--max_steps", 4) == 0
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - one * 9 // 10))
    assert run_training(run, *flags, *again) == 0  # there are two, and the older one goes
    assert [step_of(path) for path in list_states(run)] == [4, 6]
    assert not [path for path in run.rglob(".*") if path.name.endswith(".tmp")]
