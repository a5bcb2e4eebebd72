"""How the studio learns that it shall end, in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from backend.host.process import data_folder_lock, processes
from backend.host.runs import runs
from backend.host.shutdown import sweep
from backend.schema.messages import Trouble
from backend.schema.paths import PROJECT
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig

WAITING = """
from backend.host.shutdown import Ending
ending = Ending()
print("ready", flush=True)
ending.wait()
print("asked", flush=True)
print("hurry" if ending.hurry.wait(1.0) else "calm", flush=True)
"""


@pytest.fixture
def waiting():
    """A process that waits to be asked, under a launcher."""
    env = {**os.environ, "LOFT_SUPERVISED": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING], cwd=PROJECT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def said(child) -> list[str]:
    return [child.stdout.readline().strip() for _ in range(2)]


def test_the_end_of_stdin_asks_but_does_not_hurry(waiting):
    waiting.stdin.close()
    assert said(waiting) == ["asked", "calm"]


def test_a_byte_asks_and_the_second_hurries(waiting):
    waiting.stdin.write("\n\n")
    waiting.stdin.flush()
    assert said(waiting) == ["asked", "hurry"]


def test_a_byte_and_then_the_launchers_end(waiting):
    waiting.stdin.write("\n")
    waiting.stdin.close()
    assert said(waiting) == ["asked", "calm"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_ask(waiting, name):
    waiting.send_signal(getattr(signal, name))
    time.sleep(0.2)
    waiting.send_signal(getattr(signal, name))
    assert said(waiting) == ["asked", "hurry"]


@pytest.fixture
def other(data, tmp_path):
    """Another studio that has the data folder, as far as that can be seen from its process."""
    script = """
from backend.host.process.data_folder_lock import claim
from backend.schema.paths import places
import time
claim(places(), port=7861)
print("has it", flush=True)
time.sleep(60)
"""
    env = processes.child_environment(data.root)
    child = subprocess.Popen([sys.executable, "-c", script], cwd=PROJECT, env=env, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "has it\n"
    yield child
    child.kill()
    child.communicate()


def test_a_data_folder_has_one_studio(data, other):
    with pytest.raises(Trouble, match=rf"open already on .* \(process {other.pid}, port 7861\)"):
        data_folder_lock.claim(data, port=7860)
    data_folder_lock.release(data)
    assert data_folder_lock.holder(data)[1] == 7861  # what another has is not given back
    other.kill()
    other.wait()
    data_folder_lock.claim(data, port=7860)
    data_folder_lock.claim(data, port=7860)
    data_folder_lock.release(data)
    assert not (data.user / "studio.json").exists()


def test_sweeping_ends_runs_but_not_those_of_another_studio(data, other):
    folder = runs.create(from_values(TrainingConfig, {}), data)
    runs.start(folder, places=data, argv=[sys.executable, "-c", "import time; time.sleep(60)"])
    sweep(data)
    assert runs.read(folder).live
    other.kill()
    other.wait()
    sweep(data)
    assert runs.read(folder).status == "stopped"
