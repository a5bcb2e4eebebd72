"""What training costs against the least it could: `python benchmarks/training.py [step] [pause] [start] [index] [peak]
[fp8] [ladder] [optimizers] [card] [peers --peers FOLDER]`.

Ratios of CPU seconds of one thread, medians of interleaved runs in one process, where nothing else is said; every line
says the load of the machine. The peer (`peak`, `step`) is what one writes by hand with diffusers and peft:
`training_by_hand.py`. Nothing is downloaded; temporary folders are removed.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))
SET = PROJECT / "assets" / "datasets" / "character"
MIB = 2**20
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def median_seconds(*works: Callable[[], object], rounds: int = 9) -> list[float]:
    """Median CPU seconds of each work, interleaved, after one round that does not count."""
    found: list[list[float]] = [[] for _ in works]
    for turn in range(rounds + 1):
        for times, work in zip(found, works, strict=True):
            began = time.process_time()
            work()
            if turn:
                times.append(time.process_time() - began)
    return [statistics.median(times) for times in found]


def say(what: str, value: str) -> None:
    print(f"{what}: {value}  [load {os.getloadavg()[0]:.1f}]", flush=True)


def train(folder: Path, *flags: str, data: Path) -> list[dict]:
    """Runs the trainer as a process of its own; its events."""
    argv = [sys.executable, "-m", "backend.training", "--output_path", str(folder), *flags]
    subprocess.run(argv, env={**ENVIRONMENT, "LOFT_DATA": str(data)}, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def make_run(folder: Path, *flags: str):
    """A run, ready for its first step, in this process."""
    import torch
    from accelerate import Accelerator

    from backend.schema.settings import from_flags
    from backend.schema.training.config import TrainingConfig
    from backend.training.checkpoint.reporter import Reporter
    from backend.training.setup import set_up

    torch.set_num_threads(1)
    os.environ["LOFT_DATA"] = str(folder)
    config = from_flags(TrainingConfig, ["--dataset_base_path", str(SET), "--lora_rank", "16", *flags])
    accelerator = Accelerator(cpu=True, mixed_precision=config.training.mixed_precision)
    return set_up(config, folder, folder, accelerator, Reporter(folder, silent=True), index=folder / "index.json")


def step() -> None:
    """A default step against the same network, adapter and optimizer in a bare loop, everything encoded before."""
    import torch

    from backend.training import loop

    for size in (1, 8):
        with tempfile.TemporaryDirectory() as folder:
            run = make_run(Path(folder), "--max_pixels", "16384", "--dataset_repeat", "10", "--batch_size", str(size))
            batch = loop._epochs(run)(0)[0]
            material = run.source.load_batch(batch, scale=1 / size).to(run.device)
            optimizer = torch.optim.AdamW(list(run.weights.values()), lr=1e-4)

            def bare(run=run, material=material, optimizer=optimizer) -> None:
                loss, _ = run.model(material, run.config.loss)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(list(run.weights.values()), 1.0)
                optimizer.step()
                optimizer.zero_grad()

            ours, theirs = median_seconds(lambda run=run, batch=batch: loop.train_step(run, [[batch]]), bare, rounds=15)
            say(f"default step / cached bare loop, batch {size}", f"{ours / theirs:.3f} ({ours * 1000:.0f} ms)")


def pause() -> None:
    """How long a save holds the training up, and how much longer the steps beside it take, against a step without; wall
    seconds."""
    for size in (1, 8):
        with tempfile.TemporaryDirectory() as folder:
            run = make_run(Path(folder), "--max_pixels", "16384", "--dataset_repeat", "10", "--batch_size", str(size))
            one, held, beside = (statistics.median(times) for times in zip(*_saves(run, 15), strict=True))
            say(
                f"pause of a save / step, batch {size}",
                f"{held / one:.2f} ({held * 1000:.0f} ms); with what the next five steps "
                f"take longer {(held + beside - 5 * one) / one:.2f}",
            )


def _saves(run, rounds: int) -> list[tuple[float, float, float]]:
    """Seconds of a step, of a save and of the five steps beside its writing, `rounds` times."""
    from backend.training import loop
    from backend.training.run.save import save

    batch = loop._epochs(run)(0)[0]
    for _ in range(2):
        loop.train_step(run, [[batch]])
    found = []
    for turn in range(rounds):
        times = [time.perf_counter()]
        loop.train_step(run, [[batch]])
        times.append(time.perf_counter())
        save(run, f"step-{turn}", step=turn, epoch=0, wait=False)
        times.append(time.perf_counter())
        for _ in range(5):
            loop.train_step(run, [[batch]])
        times.append(time.perf_counter())
        run.writer.finish()
        found.append(tuple(later - earlier for earlier, later in itertools.pairwise(times)))
    return found


def start() -> None:
    """The second run on the same data: from the start of loading to the first step, against loading alone."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--dataset_base_path", str(SET), "--max_pixels", "16384", "--max_steps", "1")
        for turn in ("first", "second"):
            said = train(Path(folder) / turn, *flags, data=Path(folder))
            at = {(event["event"], event.get("name"), event.get("done")): event["time"] for event in said}
            begin, ready = at["phase", "loading", 0], at["phase", "training", 0]
            loading = at["phase", "caching", 0] - begin + ready - at["phase", "loading", 1]
            say(f"{turn} run: ready for step 1 / loading", f"{(ready - begin) / loading:.2f} ({ready - begin:.1f} s)")


def index(count: int = 10_000) -> None:
    """Reading a folder of pictures: sizes, captions, hashes and buckets."""
    from PIL import Image

    from backend.dataset.bucket_sampler import size_of
    from backend.dataset.dataset import read_dataset
    from backend.schema.training.config import DatasetSection

    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) / "set"
        pictures.mkdir()
        for number in range(count):
            Image.new("RGB", (256, 192 + number % 64), (number % 256, 80, 90)).save(pictures / f"{number:05d}.png")
            (pictures / f"{number:05d}.txt").write_text(f"picture {number}")
        section = DatasetSection(dataset_base_path=str(pictures))
        for turn in ("cold", "warm"):
            began, used = time.perf_counter(), time.process_time()
            found = read_dataset(section, index=Path(folder) / "index.json").items
            sizes = {size_of(item, height=None, width=None, max_pixels=2**16, multiple=16, snap=True) for item in found}
            took = f"{time.perf_counter() - began:.2f} s ({time.process_time() - used:.2f} s of the CPU)"
            say(f"{turn}: {len(found)} pictures, {len(sizes)} sizes", took)


def peak() -> None:
    """Peak RSS and CPU seconds of a whole run of 30 steps, and the same by hand; the starter, 128 x 128, rank 16."""
    for size in ("1", "8"):
        with tempfile.TemporaryDirectory() as folder:
            ours = [
                sys.executable,
                "-m",
                "backend.training",
                "--dataset_base_path",
                str(SET),
                "--max_pixels",
                "16384",
                "--max_steps",
                "30",
                "--lora_rank",
                "16",
                "--batch_size",
                size,
                "--dataset_repeat",
                "30",
                "--output_path",
                str(Path(folder) / "run"),
            ]
            hand = [sys.executable, str(Path(__file__).with_name("training_by_hand.py")), str(SET), "30", size]
            figures = {"Loft": [], "by hand": []}
            for _ in range(3):
                for name, argv in (("Loft", ours), ("by hand", hand)):
                    figures[name].append(_whole(argv, Path(folder)))
            for name, found in figures.items():
                rss, seconds = (statistics.median(values) for values in zip(*found, strict=True))
                say(f"{name}, batch {size}", f"peak RSS {rss / MIB:.0f} MiB, {seconds:.1f} CPU s")


# A process of its own in between: what is started takes over its parent's peak, and this one may have grown by other
# measurements.
_WAIT = """
import json, os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
print(json.dumps([status, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime]))
"""


def _whole(argv: list[str], data: Path) -> tuple[int, float]:
    """Peak RSS and CPU seconds of a command."""
    environment = {**ENVIRONMENT, "LOFT_DATA": str(data)}
    said = subprocess.run(
        [sys.executable, "-c", _WAIT, *argv], env=environment, check=True, stdout=subprocess.PIPE
    ).stdout
    status, rss, seconds = json.loads(said)
    assert status == 0, argv
    return rss, seconds


def fp8(steps: int = 80) -> None:
    """The loss curve over a base in FP8 against the one over bf16, same seed, on the starter."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            "--dataset_base_path",
            str(SET),
            "--max_pixels",
            "16384",
            "--max_steps",
            str(steps),
            "--dataset_repeat",
            "100",
            "--batch_size",
            "4",
            "--lora_rank",
            "16",
        )
        curves = []
        for name, more in (("bf16", ()), ("fp8", ("--fp8_models", "dit,text_encoder"))):
            said = train(Path(folder) / name, *flags, *more, data=Path(folder))
            curves.append([event["loss"] for event in said if event["event"] == "step"])
        apart = [abs(one - other) / one for one, other in zip(*curves, strict=True)]
        means = [statistics.mean(curve[-20:]) for curve in curves]
        say(
            "loss over FP8 against bf16, each step",
            f"median {statistics.median(apart):.2%}, largest {max(apart):.2%} of it",
        )
        say("mean of the last 20 steps", f"{means[0]:.4f} in bf16, {means[1]:.4f} over FP8")


if __name__ == "__main__":
    from training_card import tables
    from training_ladder import ladder, optimizers
    from training_peers import peers

    given = sys.argv[1:]
    place = given.index("--peers") if "--peers" in given else len(given)
    installed = given[place + 1] if place < len(given) else None
    known = {
        "step": step,
        "pause": pause,
        "start": start,
        "index": index,
        "peak": peak,
        "fp8": fp8,
        "card": tables,
        "peers": lambda: peers(installed),
        "ladder": ladder,
        "optimizers": optimizers,
    }
    for name in given[:place] or list(known)[:6]:
        known[name]()
