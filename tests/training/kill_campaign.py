"""Kills whole runs at random moments and goes on with them: `python -m tests.training.kill_campaign FOLDER ROUNDS [SEED]`.

A tiny model trains, saves at every third step, draws and encodes, in a forked process that gets SIGKILL at a random moment; the next round goes on from what is there, and a run that is complete is compared with the uninterrupted one, bit for bit, before
the next begins with an empty cache. After every kill everything under a final name is read whole, and no more steps are lost than those between two saves. At last one is killed
whose save does not come to its end. Prints one JSON object: rounds, runs completed, how often the last event before the kill was of which
phase, kills with a half-written state or file beside the whole ones, the most steps lost. A process of its own, for it forks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file

from backend.training.checkpoint.state import list_states, load_state, step_of

STEPS, SAVE_STEPS = 9, 3
FLAGS = (
    "--max_pixels",
    "4096",
    "--lora_rank",
    "4",
    "--learning_rate",
    "1e-3",
    "--max_steps",
    str(STEPS),
    "--save_steps",
    str(SAVE_STEPS),
    "--lora_dropout",
    "0.1",
    "--save_dtype",
    "float32",
    "--sample_prompts",
    "a ball",
    "--sample_inference_steps",
    "2",
    "--sample_width",
    "32",
    "--sample_height",
    "32",
    "--sample_every",
    "3",
    "--batch_size",
    "2",
    "--ema_decay",
    "0.9",
)


def make_pictures(folder: Path) -> Path:
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (64, 64) if number % 2 else (80, 48), (40 * number, 90, 200)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a ball, number {number}")
    return folder


def train(model: Path, pictures: Path, output: Path, *flags: str) -> int:
    """One life of a run, in this process."""
    from accelerate.state import AcceleratorState

    from backend.training.__main__ import main

    AcceleratorState._reset_state(reset_partial_state=True)

    resume = ("--resume_from_checkpoint", "latest") if (output / "events.jsonl").exists() else ()
    return main(
        [
            "--model",
            str(model),
            "--dataset_base_path",
            str(pictures),
            "--output_path",
            str(output),
            *FLAGS,
            *resume,
            *flags,
        ]
    )


def forked(work) -> int:
    """A child that does `work` and ends with its status."""
    child = os.fork()
    if child:
        return child
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    try:
        os._exit(work())
    finally:
        os._exit(9)


def check(run: Path, cache: Path) -> int:
    """The newest step saved, after everything under a final name was read whole."""
    newest = 0
    for path in list_states(run):
        state = load_state(path)
        assert state.step == step_of(path) and all(torch.isfinite(weight).all() for weight in state.weights.values())
        newest = state.step
    for path in [*run.glob("*.safetensors"), *cache.rglob("[!.]*.safetensors")]:
        assert load_file(path), path
    for path in run.rglob("[!.]*.png"):
        Image.open(path).load()
    for path in (run / "config.json", run / "process.json", cache / "pictures.json"):
        assert not path.exists() or json.loads(path.read_text())
    return newest


def same(run: Path, whole: dict) -> bool:
    """Whether the run's last result is that of the uninterrupted one, bit for bit."""
    last = load_file(run / f"step-{STEPS}.safetensors")
    return last.keys() == whole.keys() and all(torch.equal(last[name], whole[name]) for name in whole)


def unfinished(run: Path) -> set[Path]:
    """States, results and pictures that are being written, or were when their writer was killed."""
    return {*run.glob("checkpoints/.step-*.tmp"), *run.glob(".*.safetensors.*.tmp"), *run.glob("samples/*/.*.tmp")}


def said(run: Path) -> list[dict]:
    """The events so far; a torn last line is none."""
    try:
        lines = (run / "events.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def num_words(run: Path) -> int:
    """How many events there are so far, quickly."""
    try:
        return (run / "events.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def moment(events: list[dict]) -> str:
    """What the run was about when it last spoke: the name of a phase."""
    names = [event["name"] for event in events if event["event"] == "phase"]
    return names[-1] if names else "starting"


def kill_in_time(child: int, run: Path, number: int, chance: random.Random, *, words: int, seconds: float) -> bool:
    """Ends `child` with SIGKILL; whether it was writing a state, a result or a picture then.

    In turn: after a random time of a life (`seconds`); after a random number of its `words`, so that slow lives are killed late too;
    and as soon after that as a file is half written.
    """
    left, before = unfinished(run), num_words(run)
    end = time.monotonic() + (seconds * chance.random() if number % 3 == 0 else 10 * seconds)
    last, torn = chance.randrange(words), number % 3 == 2
    while time.monotonic() < end and os.waitpid(child, os.WNOHANG) == (0, 0):
        if number % 3 and num_words(run) - before > last and (not torn or unfinished(run) - left):
            time.sleep(0 if torn else chance.uniform(0, 0.02))
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    return bool(unfinished(run) - left)


def last_made(run: Path) -> int:
    return max((event["step"] for event in said(run) if event["event"] == "step"), default=0)


class Held:
    """A run whose next save is held up for as long as this is open: the picture that goes into a result's header is a pipe that nobody fills.

    `flags` begin the run so that it finds that picture. Once it is open, the save is waiting.
    """

    flags = ("--resume_from_checkpoint", "latest", "--sample_every", "1000")

    def __init__(self, run: Path):
        self.pipe = run / "samples" / "step-000001" / "0.png"
        self.pipe.parent.mkdir(parents=True)
        os.mkfifo(self.pipe)

    def __enter__(self) -> Held:
        end = time.monotonic() + 120
        while True:
            try:
                self.filling = os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK)  # only where somebody reads
                return self
            except OSError:
                assert time.monotonic() < end, "nothing was saved"
                time.sleep(0.01)

    def __exit__(self, *error) -> None:
        self.pipe.unlink()
        os.close(self.filling)


def killed_while_saving(model: Path, pictures: Path, run: Path, cache: Path) -> int:
    """Steps that are lost by a kill long after a save began that is not done."""
    held = Held(run)
    child = forked(lambda: train(model, pictures, run, *Held.flags))
    with held:
        time.sleep(0.5)  # in which some thirty steps could be made
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return last_made(run) - check(run, cache)


def main(folder: Path, rounds: int, seed: int = 0) -> dict:
    from tests.tiny_models import make_qwen_image

    torch.set_num_threads(1)  # a forked child has none of the others
    data = folder / "data"
    data.mkdir(parents=True)
    os.environ["LOFT_DATA"] = str(data)
    model, pictures = make_qwen_image(folder / "model"), make_pictures(folder / "pictures")
    assert train(model, pictures, folder / "whole") == 0  # imports everything, which the forked need not do again
    gc.freeze()
    shutil.rmtree(data / "cache")
    length = -time.monotonic()
    assert os.waitpid(forked(lambda: train(model, pictures, folder / "again")), 0)[1] == 0
    length, words = length + time.monotonic(), len(said(folder / "again"))
    whole = load_file(folder / "whole" / f"step-{STEPS}.safetensors")
    chance, phases, complete, inside, lost = random.Random(seed), Counter(), 0, 0, 0
    run = folder / "run"
    shutil.rmtree(data / "cache")
    for number in range(rounds):
        before = len(said(run))
        child = forked(lambda: train(model, pictures, run))
        inside += kill_in_time(child, run, number, chance, words=words, seconds=length)
        newest, events = check(run, data / "cache"), said(run)
        phases[moment(events[before:])] += 1
        lost = max(lost, last_made(run) - newest)
        assert lost <= SAVE_STEPS
        if newest == STEPS:
            if not complete:
                child = forked(lambda: train(model, pictures, run))
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2 and "already complete" in str(
                    said(run)[-1]
                )
            assert same(run, whole)
            complete += 1
            shutil.rmtree(run)
            shutil.rmtree(data / "cache")
    in_save = killed_while_saving(model, pictures, folder / "held", data / "cache")
    assert in_save == SAVE_STEPS
    child = forked(lambda: train(model, pictures, folder / "held"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and same(folder / "held", whole)
    assert all(path.read_bytes() for path in pictures.iterdir()) and len(list(pictures.iterdir())) == 12
    return {
        "rounds": rounds,
        "complete": complete,
        "phases": dict(phases),
        "inside": inside,
        "most_lost": lost,
        "lost_while_saving": in_save,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
