"""A mistake in what a run is given to read is told within a second, before torch is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from backend.dataset.check_inputs import look
from backend.schema.messages import Trouble, to_line
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig
from backend.training.__main__ import main

SCRIPT = """
import sys
from backend.training.__main__ import main
status = main(sys.argv[1:])
print(status, "torch" in sys.modules or "accelerate" in sys.modules)
"""


def test_a_dataset_that_cannot_be_read_is_told_without_torch(data, tmp_path: Path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "m.csv").write_text("image,prompt\na.png,x\n,y\n")
    argv = [
        "--dataset_base_path",
        tmp_path,
        "--dataset_metadata_path",
        tmp_path / "m.csv",
        "--output_path",
        tmp_path / "run",
    ]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *map(str, argv)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr == (
        "Row 2 of m.csv names no picture: its image is empty. Write the picture's file there, or remove the row.\n"
    )
    assert '"trouble"' in (tmp_path / "run" / "events.jsonl").read_text()


def test_tries_that_made_nothing_do_not_pile_up(tmp_path: Path, data, capsys):
    run = tmp_path / "run"
    for _ in range(3):
        assert main(["--dataset_base_path", str(tmp_path / "gone"), "--output_path", str(run)]) == 2
    assert sorted(path.name for path in run.iterdir()) == ["config.json", "events.jsonl", "process.json"]
    (run / "events.jsonl").write_text(to_line("step", step=1, loss=1.0) + (run / "events.jsonl").read_text())
    assert main(["--dataset_base_path", str(tmp_path / "gone"), "--output_path", str(run)]) == 2
    (older,) = run.glob("events.jsonl.before-*")
    assert '"step"' in older.read_text() and '"step"' not in (run / "events.jsonl").read_text()


def test_a_start_that_comes_to_nothing_leaves_the_older_runs_states_where_they_were(tmp_path: Path, data):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    assert main(["--dataset_base_path", str(tmp_path / "gone"), "--output_path", str(run)]) == 2
    assert (run / "checkpoints" / "step-000002").is_dir() and not list(run.glob("checkpoints.before-*"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "No dataset folder is given"),
        ({"dataset_base_path": "nowhere"}, "The dataset folder nowhere does not exist"),
        ({"dataset_base_path": "set", "dataset_metadata_path": "m.csv"}, "The metadata file m.csv holds no rows"),
        ({"dataset_base_path": "set", "dataset_metadata_path": "gone.csv"}, "gone.csv does not exist"),
        (
            {"dataset_base_path": "set", "extra_inputs": "edit_image"},
            "Nothing says which pictures those in set are edited from",
        ),
        ({"dataset_base_path": "gone", "task": "sft:train"}, "The folder of encodings 'gone' does not exist"),
        ({"dataset_base_path": "set", "regularisation_path": "gone"}, "The folder gone does not exist"),
        (
            {"resume_from_checkpoint": "nowhere"},
            "There is no saved state nowhere (--resume_from_checkpoint). A state is a folder such as",
        ),
        ({"resume_from_checkpoint": "gone.safetensors"}, "There is no file gone.safetensors"),
        ({"lora_checkpoint": "gone.safetensors"}, "There is no LoRA file gone.safetensors (--lora_checkpoint)"),
        ({"preset_lora_path": "gone.safetensors"}, "There is no LoRA file gone.safetensors (--preset_lora_path)"),
    ],
)
def test_what_is_looked_for(tmp_path: Path, monkeypatch, values: dict, words: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "set" / "a.png")
    (tmp_path / "m.csv").write_text("image,prompt\n")
    with pytest.raises(Trouble) as caught:
        look(from_values(TrainingConfig, values), index=tmp_path / "index.json")
    assert words in str(caught.value)
