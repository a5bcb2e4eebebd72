"""A disk without room: a sentence, nothing half-written, nothing running that nobody knows of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backend.host.engine import pending_requests
from backend.host.runs import runs
from backend.schema.messages import Trouble
from backend.schema.paths import Places
from backend.schema.request import GenerationRequest
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from backend.system.atomic_files import write_text

CONFIG = from_values(TrainingConfig, {"name": "small"})
SLEEPING = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def disk(tmp_path: Path):
    """A disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small disk can be mounted by root on Linux only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes every byte that is left."""
    path = folder / "filler"
    with pytest.raises(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return path


def test_a_file_is_old_or_new_never_torn(disk):
    write_text(disk / "a.json", "old")
    fill(disk)
    with pytest.raises(OSError):
        write_text(disk / "a.json", "new" * 5000)
    assert (disk / "a.json").read_text() == "old"
    assert sorted(path.name for path in disk.iterdir()) == ["a.json", "filler"]


def test_a_run_that_finds_no_room_is_not_made(disk):
    fill(disk)
    with pytest.raises(
        Trouble, match=r"The run's folder could not be written: No space left on device\. Free some space"
    ):
        runs.create(CONFIG, Places(disk))
    assert list((disk / "runs").iterdir()) == []


def test_a_run_whose_record_finds_no_room_does_not_go_on(disk):
    places = Places(disk)
    folder = runs.create(CONFIG, places)
    fill(disk)
    with pytest.raises(Trouble, match="The run's record could not be written"):
        runs.start(folder, places=places, argv=SLEEPING)
    assert runs.processes.marked(f"run:{folder.resolve()}") == []
    assert runs.read(folder).status == "queued"


def test_a_run_can_be_asked_to_stop(disk):
    places = Places(disk)
    folder = runs.create(CONFIG, places)
    runs.start(folder, places=places, argv=SLEEPING)
    fill(disk)
    runs.stop(folder)
    assert runs.read(folder).status == "stopping" and (folder / "stop").exists()
    assert runs.kill(folder, grace_seconds=0)
    assert runs.read(folder).status == "stopped"


def test_a_request_that_finds_no_room_is_refused(disk):
    fill(disk)
    with pytest.raises(Trouble, match="The request could not be written: No space left"):
        pending_requests.save(pending_requests.new(GenerationRequest(prompt="x")), disk / "queue")
    assert list((disk / "queue").iterdir()) == []
