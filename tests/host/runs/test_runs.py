"""A run's status follows from its files and its process alone; starting, stopping, ending and resuming it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from backend.host.engine.client import Engine
from backend.host.process import processes
from backend.host.runs import runs
from backend.host.runs import status as run
from backend.schema.messages import Trouble, to_line
from backend.schema.paths import PROJECT
from backend.schema.request import GenerationRequest
from backend.schema.settings import from_flags, from_values
from backend.schema.training.config import TrainingConfig
from backend.system import process_record
from tests.waiting import wait_for

CONFIG = from_values(TrainingConfig, {"name": "Red cat №1 / ../x", "num_epochs": 3})
# A run in small: it says what a run says, heeds the stop file, and takes its time.
SMALL = """
import sys, time, json
from pathlib import Path
sys.path.insert(0, {project!r})
from backend.schema.messages import to_line
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
def say(name, **values):
    with (folder / "events.jsonl").open("a") as file:
        file.write(to_line(name, **values))
print("a word for the log", flush=True)
say("started", total_steps=steps, epochs=1, model="loft/starter", parts=["dit"], pid=0)
for step in range(1, steps + 1):
    say("step", step=step, total_steps=steps, epoch=1, loss=1 / step, learning_rate=1e-4, seconds=0.01)
    time.sleep(0.01)
    if (folder / "stop").exists():
        say("finished", step=step, reason="stopped")
        sys.exit()
say("finished", step=steps, reason="complete")
"""


def status(folder: Path) -> str:
    return runs.read(folder).status


@pytest.fixture
def small(tmp_path, data):
    """Makes a run and gives a function that starts it with so many steps."""
    script = tmp_path / "small.py"
    script.write_text(SMALL.format(project=str(PROJECT)))
    folder = runs.create(CONFIG, data)
    yield (
        folder,
        lambda steps: runs.start(folder, places=data, argv=[sys.executable, str(script), str(folder), str(steps)]),
    )
    runs.kill(folder, grace_seconds=0)


@pytest.fixture
def started(tmp_path):
    """`processes.start`; what a test leaves is ended."""
    all_started = []

    def start(argv, **more):
        all_started.append(processes.start(argv, log=tmp_path / "started.txt", **more))
        return all_started[-1]

    yield start
    for process in all_started:
        processes.end_tree(process, grace_seconds=0)


@pytest.fixture
def folder(data) -> Path:
    return runs.create(CONFIG, data)


def write(folder: Path, *events: tuple[str, dict]) -> None:
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        for name, values in events:
            file.write(to_line(name, **values))


STEP = ("step", {"step": 1, "total_steps": 9, "epoch": 1, "loss": 0.5, "learning_rate": 1e-4, "seconds": 1.0})


def test_a_new_run_is_a_folder_with_its_settings(data):
    first, second = runs.create(CONFIG, data), runs.create(CONFIG, data)
    assert first != second and {first.parent, second.parent} == {data.runs}
    assert first.name.endswith("_Red-cat-1-..-x")
    assert json.loads((first / "config.json").read_text(encoding="utf-8")) == {
        "name": CONFIG.output.name,
        "num_epochs": 3,
    }
    assert runs.config_of(first) == CONFIG
    assert status(first) == "queued"
    assert [run.folder for run in runs.list_runs(data)] == [second, first]
    assert [path for path in data.runs.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["", "   ", "...", "///", "x" * 300])
def test_any_name_gives_a_folder(data, name):
    config = dataclasses.replace(CONFIG, output=dataclasses.replace(CONFIG.output, name=name))
    folder = runs.create(config, data)
    assert folder.parent == data.runs and runs.config_of(folder).output.name == name


def test_settings_that_are_not_right_are_one_sentence(folder, data):
    (folder / "config.json").write_text('{"lerning_rate": 1}')
    with pytest.raises(Trouble, match=r"no setting called 'lerning_rate'\. Did you mean 'learning_rate'\?"):
        runs.start(folder, places=data)
    (folder / "config.json").unlink()
    with pytest.raises(Trouble, match="cannot be read"):
        runs.start(folder, places=data)


def test_a_run_from_start_to_end(small, data):
    folder, start = small
    process = start(20)
    assert status(folder) in ("starting", "running")
    assert [run.folder for run in runs.live_runs(data)] == [folder]
    wait_for(lambda: status(folder) == "complete")
    run = runs.read(folder)
    assert (run.step, run.total_steps, run.model, run.can_resume, run.live) == (20, 20, "loft/starter", False, False)
    assert run.process == process and run.seconds_left is None and run.sentence == "Complete at step 20 of 20."
    assert runs.log(folder) == "a word for the log"
    series = runs.loss_series(folder)
    assert series.steps == tuple(range(1, 21)) and series.losses[1] == 0.5
    wait_for(lambda: not runs.live_runs(data))
    with pytest.raises(Trouble, match="complete at step 20"):
        runs.resume(folder, places=data)


def test_two_readings_of_an_unchanged_run_have_one_revision(small):
    folder, start = small
    start(3)
    wait_for(lambda: status(folder) == "complete")
    assert runs.read(folder).revision == runs.read(folder).revision
    write(folder, STEP)
    assert runs.read(folder).revision != runs.read(folder.parent / "other").revision


def test_asked_to_stop_it_saves_and_ends(small):
    folder, start = small
    start(10_000)
    wait_for(lambda: runs.read(folder).step > 2)
    run = runs.read(folder)
    assert run.status == "running" and run.seconds_left > 1 and run.seconds_per_step == 0.01
    runs.stop(folder)
    wait_for(lambda: status(folder) == "stopped")
    assert runs.read(folder).can_resume


def test_a_second_start_is_refused_while_it_lives(small):
    _, start = small
    start(10_000)
    with pytest.raises(Trouble, match="going on already"):
        start(10_000)


def test_ten_tabs_start_it_once(small):
    _, start = small
    troubles = []

    def press():
        try:
            start(10_000)
        except Trouble as trouble:
            troubles.append(trouble.kind)

    threads = [threading.Thread(target=press) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert troubles == ["already_running"] * 9


def test_killed_by_another_it_died_and_can_be_resumed(small, data):
    folder, start = small
    process = start(10_000)
    wait_for(lambda: runs.read(folder).step > 2)
    psutil.Process(process.pid).kill()
    wait_for(lambda: status(folder) == "died")
    run = runs.read(folder)
    assert "ended after step" in run.trouble.message and "Resume" in run.trouble.hint
    assert run.trouble.detail == "a word for the log" and run.sentence == str(run.trouble)
    again = start(5)
    assert again.pid != process.pid
    assert status(folder) in ("starting", "running", "complete")
    wait_for(lambda: status(folder) == "complete")


def test_ended_at_once_by_us_it_is_stopped_not_died(small):
    folder, start = small
    process = start(10_000)
    wait_for(lambda: runs.read(folder).step > 2)
    psutil.Process(process.pid).suspend()  # it writes at any moment
    (folder / "events.jsonl").rename(folder / "kept.jsonl")  # so that it cannot say that it has stopped
    (folder / "events.jsonl").mkdir()
    psutil.Process(process.pid).resume()
    assert runs.kill(folder, grace_seconds=0)
    assert not process_record.alive(process)
    (folder / "events.jsonl").rmdir()
    (folder / "kept.jsonl").rename(folder / "events.jsonl")
    assert status(folder) == "stopped"


def test_a_resumed_run_is_not_taken_for_what_it_was_before(small, data):
    folder, start = small
    start(10_000)
    wait_for(lambda: runs.read(folder).step > 2)
    runs.stop(folder)
    wait_for(lambda: status(folder) == "stopped" and not runs.live_runs(data))
    runs.start(folder, places=data, argv=[sys.executable, "-c", "import time; time.sleep(60)"])
    assert status(folder) == "starting"
    assert not (folder / "stop").exists()


@pytest.mark.parametrize(
    ("events", "stopping", "expected"),
    [
        ([], False, "died"),
        ([], True, "stopped"),
        ([("started", {}), STEP], False, "died"),
        ([("started", {}), STEP], True, "stopped"),
        ([("started", {}), STEP, ("finished", {"step": 1, "reason": "stopped"})], True, "stopped"),
        ([("started", {}), STEP, ("finished", {"step": 9, "reason": "complete"})], True, "complete"),
        (
            [("started", {}), ("trouble", {"kind": "x", "message": "The disk is full.", "hint": "Free some."})],
            False,
            "failed",
        ),
        ([("trouble", {"message": "A step was skipped."}), STEP], False, "died"),
    ],
)
def test_status_of_a_dead_process(folder, events, stopping, expected):
    (folder / "process.json").write_text(process_record.record_text(process_record.Process(os.getpid(), 1.0, ("x",))))
    if stopping:
        (folder / "stop").write_text("")
    write(folder, *events)
    run = runs.read(folder)
    assert run.status == expected
    assert run.sentence
    if expected == "failed":
        assert run.sentence == "The disk is full. Free some."


def test_status_of_a_live_process(folder, started):
    process = started([sys.executable, "-c", "import time; time.sleep(60)"], mark=run.mark(folder))
    (folder / "process.json").write_text(process_record.record_text(process))
    assert status(folder) == "starting"
    write(folder, ("phase", {"name": "caching", "done": 3, "total": 12}))
    now = runs.read(folder)
    assert (now.status, now.phase.name, now.phase.done, now.phase.total) == ("running", "caching", 3, 12)
    runs.stop(folder)
    assert status(folder) == "stopping"
    write(folder, ("finished", {"step": 1, "reason": "stopped"}))
    assert status(folder) == "stopped"


def test_a_run_that_a_command_line_made_elsewhere_is_read_too(data):
    folder = data.models / "train" / "my_lora"
    folder.mkdir(parents=True)
    (folder / "epoch-0.safetensors").write_text("x")
    write(folder, ("started", {"total_steps": 9}), ("saved", {"path": "models/train/my_lora/epoch-0.safetensors"}))
    write(folder, ("finished", {"step": 9, "reason": "complete"}))
    run = runs.list_runs(data)[0]
    assert (run.name, run.status, run.saved) == ("my_lora", "complete", (folder / "epoch-0.safetensors",))


def test_a_data_folder_that_was_moved_keeps_its_samples(data, folder):
    (folder / "samples").mkdir()
    (folder / "samples" / "0.png").write_text("x")
    write(folder, ("sample", {"step": 5, "prompt": "a", "path": f"/elsewhere/runs/{folder.name}/samples/0.png"}))
    assert runs.read(folder).samples[0].path == folder / "samples" / "0.png"


def test_the_command_trains_the_same_by_hand():
    config = from_values(
        TrainingConfig, {"dataset_base_path": "/my pictures/it's", "learning_rate": 3e-5, "enable_csv_log": False}
    )
    words = runs.command_of(config)
    assert words[:4] == ["accelerate", "launch", "-m", "backend.training"]
    assert from_flags(TrainingConfig, words[4:]) == config
    assert shlex.split(runs.command_text(words, windows=False)) == words
    several = runs.command_of(from_values(TrainingConfig, {"devices": 3}))
    assert several[2:7] == ["--multi_gpu", "--num_processes", "3", "-m", "backend.training"]
    assert '"/my pictures/it\'s"' in runs.command_text(words, windows=True)


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_the_command_line_survives_a_shell():
    config = from_values(
        TrainingConfig, {"trigger_word": "a $HOME `x` \"y\" 'z' \\ & | ; *", "prior_prompts": "one\ntwo"}
    )
    line = runs.command_text(runs.command_of(config), windows=False)
    script = "import sys, json; print(json.dumps(sys.argv[1:]))"
    line = line.replace("accelerate", f"{shlex.quote(sys.executable)} -c {shlex.quote(script)}", 1)
    said = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=30, check=True).stdout
    assert from_flags(TrainingConfig, json.loads(said)[3:]) == config


def test_discarding_moves_to_the_trash(small, data):
    folder, start = small
    start(10_000)
    with pytest.raises(Trouble, match="Stop it first"):
        runs.discard(folder, places=data)
    runs.kill(folder)
    where = runs.discard(folder, places=data)
    assert where.parent == data.trash and (where / "config.json").exists() and runs.list_runs(data) == []
    folder.mkdir()  # for the fixture's end


def test_starting_a_run_takes_the_card_from_the_worker(small, data):
    folder, _ = small
    engine = Engine(data, fake=True)
    try:
        engine.submit(GenerationRequest(num_inference_steps=200))
        wait_for(lambda: (job := engine.snapshot().job) and job.step > 1)
        pid = engine.snapshot().pid
        argv = [sys.executable, "-c", "import time; time.sleep(60)"]
        runs.start(folder, places=data, engine=engine, argv=argv)
        assert not psutil.pid_exists(pid)
        wait_for(lambda: f"The run {folder.name.split('_', 2)[-1]} is" in engine.snapshot().waits_for)
        assert engine.snapshot().state == "off" and len(engine.snapshot().queue) == 1
        runs.kill(folder)
        wait_for(lambda: engine.snapshot().state == "generating")
    finally:
        engine.stop()


def test_ending_everything_asks_first_and_spares_the_command_line(small, data, tmp_path):
    folder, start = small
    deaf = runs.create(CONFIG, data)
    runs.start(deaf, places=data, argv=[sys.executable, "-c", "import time; time.sleep(60)"])
    by_hand = runs.create(CONFIG, data)
    process = processes.start([sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "by_hand.txt")
    (by_hand / "process.json").write_text(process_record.record_text(process))
    start(10_000)
    wait_for(lambda: runs.read(folder).step > 2)
    ended, left = runs.stop_all(data, grace_seconds=1)
    assert set(ended) == {folder, deaf} and not left
    assert (status(folder), status(deaf)) == ("stopped", "stopped")
    assert '"finished"' in (folder / "events.jsonl").read_text()  # it was let to end by itself
    assert process_record.alive(process)
    processes.end_tree(process, grace_seconds=0)


def test_in_a_hurry_it_does_not_wait(small, data):
    folder, _ = small
    runs.start(folder, places=data, argv=[sys.executable, "-c", "import time; time.sleep(60)"])
    hurry = threading.Event()
    hurry.set()
    began = time.monotonic()
    runs.stop_all(data, grace_seconds=30, hurry=hurry)
    assert time.monotonic() - began < 10 and status(folder) == "stopped"
