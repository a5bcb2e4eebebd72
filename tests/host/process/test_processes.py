"""Processes are known by pid and start time, write to files, and end with all that they started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from backend.host.process import processes
from backend.schema.messages import Trouble
from backend.system import process_record
from tests.waiting import wait_for

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# A parent whose child lives in a session of its own, as the workers of an elastic launcher do.
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""
# The same, deaf to a request to terminate.
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY


@pytest.fixture
def started(tmp_path: Path):
    """`processes.start`, and an end of whatever a failing test leaves."""
    all_started = []

    def start(argv, **more):
        all_started.append(processes.start(argv, log=tmp_path / "log.txt", **more))
        return all_started[-1]

    yield start
    for process in all_started:
        processes.end_tree(process, grace_seconds=0)


def child_of(tmp_path: Path) -> int:
    return int(wait_for(lambda: (tmp_path / "log.txt").read_text().strip()).split()[0])


def test_output_goes_to_the_log_and_the_log_is_continued(started, tmp_path):
    for word in ("one", "two"):
        process = started([sys.executable, "-c", f"import sys; print('{word}'); print('{word}!', file=sys.stderr)"])
        wait_for(lambda process=process: not process_record.alive(process))
    assert sorted((tmp_path / "log.txt").read_text().split()) == ["one", "one!", "two", "two!"]


def test_an_ended_child_is_not_alive_and_leaves_no_zombie(started):
    process = started([sys.executable, "-c", "pass"])
    wait_for(lambda: not process_record.alive(process))
    wait_for(lambda: not psutil.pid_exists(process.pid))


def test_another_process_under_the_same_pid_is_not_taken_for_it(started):
    process = started(SLEEP)
    assert process_record.alive(process)
    earlier = process_record.Process(process.pid, process.created - 60)
    assert not process_record.alive(earlier)
    assert not process_record.alive(process_record.Process(process.pid, process.created - 60, ("another", "command")))
    assert processes.end_tree(earlier, grace_seconds=0)
    assert process_record.alive(process), "a stranger was ended"


def test_a_clock_that_was_set_does_not_lose_a_process(started):
    process = started(SLEEP)
    wait_for(lambda: process_record.alive(process_record.Process(process.pid, process.created - 3600, tuple(SLEEP))))


def test_it_survives_in_a_file(started, tmp_path):
    process = started(SLEEP)
    (tmp_path / "process.json").write_text(process_record.record_text(process, events_at=7))
    assert process_record.read_record(tmp_path / "process.json") == (process, {"events_at": 7})
    for torn in ("", "{", "[]", '{"pid": 1}'):
        (tmp_path / "process.json").write_text(torn)
        assert process_record.read_record(tmp_path / "process.json") is None
    assert process_record.read_record(tmp_path / "absent.json") is None
    for pid in (-1, 0, 2**80):
        assert not process_record.alive(process_record.Process(pid, 1.0))
        assert processes.end_tree(process_record.Process(pid, 1.0), grace_seconds=0)


@pytest.mark.skipif(sys.platform == "win32", reason="sessions are POSIX's")
@pytest.mark.parametrize("script", [FAMILY, DEAF], ids=["polite", "deaf"])
def test_a_tree_ends_with_members_in_sessions_of_their_own(started, tmp_path, script):
    process = started([sys.executable, "-c", script])
    child = child_of(tmp_path)
    assert os.getsid(child) == child
    assert processes.end_tree(process, grace_seconds=0.5)
    assert not process_record.alive(process)
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.skipif(sys.platform == "win32", reason="sessions are POSIX's")
def test_orphans_of_a_killed_launcher_are_found_by_their_mark(started, tmp_path):
    process = started([sys.executable, "-c", FAMILY], mark="run:test-orphans")
    child = child_of(tmp_path)
    psutil.Process(process.pid).kill()
    wait_for(lambda: not process_record.alive(process))
    assert psutil.pid_exists(child)
    assert [found.pid for found in processes.marked("run:test-orphans")] == [child]
    assert processes.end_tree(process, grace_seconds=0.5, mark="run:test-orphans")
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert processes.marked("run:test-orphans") == []


def test_the_own_process_is_never_ended():
    assert processes.end_tree(process_record.Process(os.getpid(), 0.0), grace_seconds=0)
    assert os.getpid() not in [found.pid for found in processes.members(process_record.this_process())]


def test_a_child_outlives_its_parent(tmp_path):
    """What a run needs when the studio is killed."""
    script = f"""
import os, sys
from pathlib import Path
from backend.host.process import processes
from backend.system import process_record
log = Path({str(tmp_path / "log.txt")!r})
process = processes.start([sys.executable, "-c", "import time; time.sleep(60)"], log=log)
print(process_record.record_text(process), flush=True)
os.kill(os.getpid(), 9)
"""
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    (tmp_path / "process.json").write_text(parent.stdout)
    process, _ = process_record.read_record(tmp_path / "process.json")
    assert process_record.alive(process)
    assert processes.end_tree(process, grace_seconds=0)


def test_a_command_that_is_none_is_one_sentence(tmp_path):
    with pytest.raises(Trouble, match="no-such-program could not be started: No such file") as caught:
        processes.start([str(tmp_path / "no-such-program")], log=tmp_path / "log.txt")
    assert caught.value.kind == "not_started"


def test_the_environment_of_a_child(tmp_path, monkeypatch):
    monkeypatch.setenv(processes.SUPERVISED, "1")
    monkeypatch.setenv(processes.MARK, "of another")
    env = processes.child_environment(tmp_path)
    assert env["LOFT_DATA"] == str(tmp_path) and env["PYTHONSAFEPATH"] == "1"
    assert processes.SUPERVISED not in env and processes.MARK not in env
