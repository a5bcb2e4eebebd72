"""Run folders that others may have written: each is an entry, none hides another, and no record decides what is ended."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from backend.host import background_estimates, lora_tool_process, shutdown
from backend.host.engine import worker_process
from backend.host.process import event_log, processes
from backend.host.runs import runs, status
from backend.schema.messages import to_line
from backend.schema.settings import to_file_text
from backend.schema.training.config import TrainingConfig
from backend.system import process_record
from tests.waiting import wait_for

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def hostile(places, name: str, *lines: str | bytes, **files: str | bytes) -> Path:
    """A run's folder with these events and files."""
    folder = places.runs / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(files.pop("config", "{}"))
    data = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    (folder / "events.jsonl").write_bytes(data)
    for file, content in files.items():
        path = folder / file.replace("_json", ".json")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


LINES = {
    "a name of 5,000 characters": json.dumps({"event": "saved", "path": "y" * 5000}),
    "a state's name of 300": json.dumps({"event": "checkpoint", "step": 1, "path": "y" * 300}),
    "a sample's name of 300": json.dumps({"event": "sample", "step": 1, "path": "y" * 300}),
    "a NUL": '{"event": "saved", "path": "a\\u0000b"}',
    "half a character": '{"event": "sample", "step": 1, "prompt": "\\ud800", "path": "\\udfff"}',
    "deep": '{"event": "step", "x": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "deep and open": "[" * 200_000,
    "wrong types": '{"event": "step", "step": [1], "total_steps": {}, "loss": "x", "seconds": [], "epoch": null}',
    "infinities": '{"event": "step", "step": Infinity, "loss": 1e999, "seconds": -Infinity, "time": Infinity}',
    "large numbers": '{"event": "step", "step": 1' + "0" * 400 + ', "loss": 1' + "0" * 4000 + ', "time": 1e300}',
    "a number of 5,000 digits": '{"event": "step", "step": ' + "9" * 5000 + "}",
    "memory": '{"event": "memory", "device_bytes": "x", "ram_bytes": [1], "measured_bytes": 1e300, "phases": 5}',
    "trouble": '{"event": "trouble", "kind": [], "message": {"a": 1}, "hint": 5, "detail": null}',
    "resumed": '{"event": "resumed", "step": "x", "not_restored": {"a": {}}, "restored": 5}',
    "phase": '{"event": "phase", "name": ["a"], "done": "x", "total": null}',
    "validation": '{"event": "validation", "step": {}, "loss": 1e308}',
    "finished": '{"event": "finished", "reason": ["complete"], "step": null}',
    "bytes": b"\xff\xfe\x00{}[]\x00",
}  # fmt: skip


@pytest.mark.parametrize("what", LINES)
def test_any_line_of_events_leaves_the_list_and_the_tab(data, what):
    from studio.panels import run_status
    from studio.state.context import Studio

    good = hostile(data, "2026-01-02_00-00-00_good", to_line("started", total_steps=3))
    bad = hostile(data, "2026-01-01_00-00-00_bad", LINES[what], to_line("step", step=2, total_steps=9, loss=0.5))
    found = {one.folder: one for one in runs.list_runs(data)}
    assert set(found) == {good, bad} and found[bad].step == 2 and found[bad].loss is not None
    studio = Studio(data, None, ())
    for draw in (
        lambda: run_status.head(found[bad], now=time.time()),
        lambda: run_status.loss_curve(found[bad], runs.loss_series(bad)),
        lambda: run_status.samples(studio, found[bad]) + run_status.results(studio, found[bad]),
        lambda: run_status.runs_list(list(found.values()), shown=found[bad], now=time.time()),
    ):
        draw().encode()


@pytest.mark.parametrize(
    "config", ["", "{", "[]", '{"lora_rank": "x"}', '{"evil": 1}', '{"name": "\\u0000"}', "[" * 200_000, '{"seed": 1e999}']
)  # fmt: skip
def test_settings_that_cannot_be_read_are_an_entry_with_a_sentence(data, config):
    from studio.panels import run_status

    folder = hostile(data, "2026-01-01_00-00-00_bad", config=config)
    good = runs.create(TrainingConfig(), data)
    found = {one.folder: one for one in runs.list_runs(data)}
    assert (found[folder].status, found[good].status) == ("unreadable", "queued")
    assert found[folder].sentence.endswith(".") and not found[folder].can_resume
    assert run_status.head(found[folder], now=0.0) and not run_status.buttons(found[folder])["stop"]
    assert runs.discard(folder, places=data).is_dir()


RECORDS = (
    "", "{", "[]", "null", '{"pid": 1}', '{"pid": "1", "created": 1}', '{"pid": 1e999, "created": 1}', '{"pid": 1, "created": NaN}',
    '{"pid": 1, "created": 1e300, "argv": 5}', '{"pid": -1, "created": 1, "events_at": "x"}', '{"pid": 1, "created": 1, "argv": [[], {}]}',
    '{"pid": 99999999999999999999999, "created": 5}', "[" * 200_000,
)  # fmt: skip


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_of_a_process_may_hold_anything(data, record):
    hostile(data, "2026-01-01_00-00-00_bad", process_json=record)
    (data.user / "tool").mkdir(parents=True)
    (data.user / "memory").mkdir()
    for name in ("studio.json", "worker.json", "tool/process.json", "memory/process"):
        (data.user / name).write_text(record)
    assert [one.live for one in runs.list_runs(data)] == [False] and runs.live_runs(data) == []
    assert shutdown.sweep(data) == []
    worker_process.end_left_behind(data)
    background_estimates.end(data)
    lora_tool_process.read(data)
    lora_tool_process.cancel(data)


@pytest.fixture
def foreign(tmp_path):
    """A process that is none of Loft's."""
    process = processes.start(SLEEP, log=tmp_path / "foreign.txt")
    yield process
    assert process_record.alive(process), "a foreign process was ended"
    processes.end_tree(process, grace_seconds=0)


@pytest.mark.parametrize("argv", [SLEEP, ["x"], [sys.executable, "-m", "backend.training", "x"]])
def test_a_record_that_names_a_foreign_process_ends_nothing_and_holds_nothing_up(data, foreign, argv):
    record = process_record.record_text(
        process_record.Process(foreign.pid, foreign.created, tuple(argv)), by="studio", tool="x", out="/x"
    )
    folder = hostile(data, "2026-01-01_00-00-00_bad", process_json=record)
    (data.user / "tool").mkdir(parents=True)
    (data.user / "memory").mkdir()
    for name in ("studio.json", "worker.json", "tool/process.json", "memory/process", "memory/reader"):
        (data.user / name).write_text(record)
    assert runs.live_runs(data) == [] and status.at_work(data) == "" and not runs.read(folder).live
    runs.stop_all(data, grace_seconds=0)
    runs.kill(folder, grace_seconds=0)
    worker_process.end_left_behind(data)
    background_estimates.end(data)
    lora_tool_process.cancel(data)
    assert shutdown.sweep(data) == []


def test_a_record_of_another_runs_process_is_not_this_run(data):
    mine = runs.create(TrainingConfig(), data)
    process = runs.start(mine, places=data, argv=SLEEP)
    try:
        other = hostile(data, "2026-01-01_00-00-00_bad", process_json=process_record.record_text(process, by="studio"))
        assert [one.folder for one in runs.live_runs(data)] == [mine]
        runs.kill(other, grace_seconds=0)
        assert process_record.alive(process)
    finally:
        runs.kill(mine, grace_seconds=0)


def test_a_run_that_was_started_by_hand_is_asked_and_not_killed(data, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(60)")
    folder = hostile(data, "2026-01-01_00-00-00_hand")
    process = processes.start([sys.executable, str(script), f"--output_path={folder}"], log=tmp_path / "log.txt")
    try:
        (folder / "process.json").write_text(process_record.record_text(process))
        assert runs.read(folder).live
        with pytest.raises(runs.Trouble, match="started by hand"):
            runs.kill(folder)
        assert process_record.alive(process) and (folder / "stop").exists()
        assert runs.stop_all(data, grace_seconds=0) == ([], [])
    finally:
        processes.end_tree(process, grace_seconds=0)


@pytest.mark.parametrize("what", ["a line", "no record", "a torn record", "no folder"])
def test_every_live_run_is_ended_whatever_lies_in_folders(data, what):
    hostile(data, "2026-01-01_00-00-00_x", LINES["a name of 5,000 characters"])
    folder = runs.create(TrainingConfig(), data)
    process = runs.start(folder, places=data, argv=SLEEP)
    if what == "no record":
        (folder / "process.json").unlink()
    elif what == "a torn record":
        (folder / "process.json").write_text('{"pid": ')
    elif what == "no folder":
        folder.rename(data.root / "elsewhere")
    ended, left = runs.stop_all(data, grace_seconds=0.1)
    assert [one.name for one in ended] == [folder.name] and left == []
    wait_for(lambda: not process_record.alive(process), seconds=10)


def test_what_could_not_be_ended_is_said_and_the_exit_code_is_1(data, monkeypatch, capsys):
    folder = runs.create(TrainingConfig(), data)
    runs.start(folder, places=data, argv=SLEEP)
    end_tree = processes.end_tree
    monkeypatch.setattr(processes, "end_tree", lambda *args, **more: False)
    left = shutdown.sweep(data)
    assert left == [f"the run {folder.name}"] and folder.name in capsys.readouterr().err
    monkeypatch.setattr(processes, "end_tree", end_tree)
    assert shutdown.sweep(data) == []


def test_one_step_of_the_end_that_fails_keeps_no_other_from_it(data, capsys):
    class Broken:
        def stop(self):
            raise OSError("broken")

    class Ending:
        hurry = None

    folder = runs.create(TrainingConfig(), data)
    process = runs.start(folder, places=data, argv=[*SLEEP[:2], "import time, signal; time.sleep(60)"])
    runs.RUN_GRACE = 0
    left = shutdown.end_all(Broken(), data, type("E", (), {"hurry": _set()})())
    assert len(left) == 1 and "broken" in left[0]
    wait_for(lambda: not process_record.alive(process), seconds=10)


def _set():
    import threading

    event = threading.Event()
    event.set()
    return event


# Paths


def test_nothing_outside_the_folder_of_a_run_is_looked_at(data, tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.safetensors").write_text("x")
    names = [
        str(outside / "x.safetensors"),
        "../../../outside/x.safetensors",
        "//server/share/x",
        "\\\\server\\share\\x",
        "/dev/zero",
    ]
    names += ["~/x", "a/../../../../outside/x.safetensors"]
    lines = [
        json.dumps({"event": event, "step": 1, "path": name})
        for name in names
        for event in ("saved", "checkpoint", "sample")
    ]
    folder = hostile(data, "2026-01-01_00-00-00_bad", *lines)
    asked = []
    for name in ("stat", "lstat", "open", "readlink"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda path, *a, _real=real, **k: (asked.append(str(path)), _real(path, *a, **k))[1]
        )
    found = runs.read(folder)
    monkeypatch.undo()
    assert (found.saved, found.checkpoints) == ((), ())
    assert all(sample.path.is_relative_to(folder) for sample in found.samples)
    assert asked and not [path for path in asked if not path.startswith(str(folder)) and path != str(folder.parent)]


def test_a_link_that_leads_out_of_a_runs_folder_is_no_result_of_it(data, tmp_path):
    (tmp_path / "secret").write_text("x")
    folder = hostile(data, "2026-01-01_00-00-00_bad", to_line("saved", path="a"), to_line("saved", path="b"))
    (folder / "a").symlink_to(tmp_path / "secret")
    (folder / "b").write_text("x")
    assert runs.read(folder).saved == (folder / "b",)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX")
@pytest.mark.parametrize("name", ["events.jsonl", "config.json", "process.json", "log.txt", "stop"])
def test_pipes_sockets_and_devices_in_the_place_of_files_are_not_opened(data, name):
    folder = hostile(data, "2026-01-01_00-00-00_bad", to_line("started"))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    other = hostile(data, "2026-01-01_00-00-00_worse")
    (other / name).unlink(missing_ok=True)
    (other / name).symlink_to("/dev/zero")
    began = time.monotonic()
    runs.list_runs(data)
    for one in (folder, other):
        runs.read(one)
        runs.log(one)
    assert time.monotonic() - began < 5


# Size


def test_200_mb_of_events_are_read_in_bounded_time_and_memory(data):
    """The beginning, the end, and what is rare; the steps of the middle are passed over, and the run says so."""
    folder = hostile(data, "2026-01-01_00-00-00_long", to_line("started", total_steps=10**6, model="m"))
    step = to_line("step", step=1, total_steps=10**6, epoch=1, loss=0.5, learning_rate=1e-4, seconds=0.1)
    block = (step * (2**20 // len(step))).encode()
    (folder / "middle").write_text("x")
    with (folder / "events.jsonl").open("ab") as file:
        for number in range(200):
            file.write(block)
            if number == 100:
                file.write(to_line("saved", path="middle").encode())
        file.write(to_line("step", step=10**6, total_steps=10**6, loss=0.25, seconds=0.1).encode())
    before, began = psutil.Process().memory_info().rss, time.process_time()
    found = runs.read(folder)
    seconds, grown = time.process_time() - began, psutil.Process().memory_info().rss - before
    assert (found.step, found.model, found.saved) == (10**6, "m", (folder / "middle",))
    assert any("passed over" in note for note in found.notes)
    assert seconds < 10 and grown < 80 * 2**20, (seconds, grown)
    (folder / "events.jsonl").unlink()
    status.forget(folder)


def test_a_line_without_an_end_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(event_log, "BLOCK_BYTES", 300)
    events = tmp_path / "events.jsonl"
    events.write_bytes(to_line("step", step=1, loss=1.0).encode() + b"x" * 5000)
    one = event_log.Journal(tmp_path)
    one.update()
    assert (one.step, len(one.partial) <= 1000) == (1, True)
    with events.open("ab") as file:
        file.write(b"y" * 5000 + b"\n" + to_line("step", step=2, loss=1.0).encode())
    one.update()
    assert (one.step, one.count) == (2, 2)
    assert (
        one.last_offset == events.stat().st_size - len(to_line("step", step=2, loss=1.0).encode())
        or one.last_offset > 10_000
    )


def test_what_is_kept_of_many_events_is_bounded(tmp_path):
    with (tmp_path / "events.jsonl").open("w") as file:
        for number in range(9000):
            file.write(
                to_line("saved", path=f"{number}") + to_line("sample", step=number, path=f"{number}", prompt="p" * 99)
            )
            file.write(json.dumps({"event": "memory", f"{number}_bytes": number}) + "\n")
    one = event_log.Journal(tmp_path)
    one.update()
    assert len(one.saved) <= event_log.KEPT_FILES and len(one.samples) <= 2 * event_log.KEPT_FILES
    assert len(one.memory) <= event_log.MOST_FIGURES


# The claim


CLAIM = "from backend.host.process.data_folder_lock import claim; from backend.schema.paths import places; import time, sys\n"


def another_studio(data, then: str = "time.sleep(60)"):
    import subprocess

    script = f"{CLAIM}claim(places(), port=7861); print('has it', flush=True); {then}"
    argv = [sys.executable, "-c", script]
    child = subprocess.Popen(argv, env=processes.child_environment(data.root), stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "has it\n"
    return child


@pytest.mark.parametrize("lost", ["user", "studio.json", "nothing"])
def test_the_claim_on_a_data_folder_outlives_its_files_and_ends_with_its_holder(data, lost):
    import shutil

    from backend.host.process import data_folder_lock

    child = another_studio(data)
    try:
        if lost == "user":
            shutil.rmtree(data.user)
        elif lost == "studio.json":
            (data.user / "studio.json").write_text("{")
        with pytest.raises(runs.Trouble, match="open already"):
            data_folder_lock.claim(data, port=1)
        assert data_folder_lock.holder(data) is not None
    finally:
        child.kill()
        child.communicate()
    data_folder_lock.claim(data, port=1)
    assert data_folder_lock.holder(data) is None
    data_folder_lock.release(data)


def test_of_studios_that_start_at_once_one_has_the_folder(data):
    import subprocess

    script = f"{CLAIM}\ntry:\n    claim(places(), port=1); print('has it', flush=True); time.sleep(2)\nexcept Exception: print('no')"
    env = processes.child_environment(data.root)
    children = [
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    said = sorted(child.communicate()[0].strip() for child in children)
    assert said == ["has it", "no", "no", "no"]


def test_a_socket_in_a_folder_of_runs_is_no_run(data):
    data.runs.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(data.runs / "s")[-100:] if len(str(data.runs / "s")) > 100 else str(data.runs / "s"))
        assert runs.list_runs(data) == []


def test_settings_written_by_loft_are_read_by_loft(data):
    config = TrainingConfig()
    folder = hostile(data, "2026-01-01_00-00-00_good", config=to_file_text(config))
    assert runs.config_of(folder) == config
