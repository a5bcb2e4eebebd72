"""What training costs against the least it could: `python benchmarks/training.py [step] [start] [index] [ladder]`.

Ratios of CPU seconds of one thread where that is meant, medians of interleaved runs. Nothing is downloaded; temporary folders are removed.
"""

from __future__ import annotations

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


def train(folder: Path, *flags: str, data: Path) -> list[dict]:
    """Runs the trainer as a process of its own; its events."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "LOFT_DATA": str(data), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "backend.training", "--output_path", str(folder), *flags]
    subprocess.run(argv, env=environment, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def step() -> None:
    """A default step against the same network, adapter and optimizer in a bare loop; the pause of a save against a step."""
    import torch
    from accelerate import Accelerator

    from backend.schema.knobs import from_values
    from backend.schema.training import TrainingConfig
    from backend.training import loop
    from backend.training.reporter import Reporter
    from backend.training.setup import set_up

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOFT_DATA"] = folder
        values = {
            "dataset_base_path": str(SET),
            "max_pixels": 16384,
            "dataset_repeat": 10,
            "batch_size": 8,
            "lora_rank": 16,
        }
        config = from_values(TrainingConfig, values)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        run = set_up(
            config,
            Path(folder),
            Path(folder),
            accelerator,
            Reporter(Path(folder), silent=True),
            index=Path(folder) / "i",
        )
        batch = loop._epochs(run)(0)[0]
        material = run.source.material(batch, scale=1 / 8).to(run.device)
        optimizer = torch.optim.AdamW(list(run.weights.values()), lr=1e-4)

        def bare() -> None:
            loss, _ = run.model(material, config.loss)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(run.weights.values()), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        ours, theirs = median_seconds(lambda: loop.one_step(run, [[batch]]), bare)
        print(f"default step (encodings from the cache) / bare loop: {ours / theirs:.3f}  ({ours * 1000:.0f} ms)")
        began = time.perf_counter()
        loop._save_here(run, 1, loop.Pace(10, 10), [{}])
        print(f"pause of a save / step: {(time.perf_counter() - began) / ours:.2f}")


def start() -> None:
    """The second run on the same data: from the start of loading to the first step, against loading alone."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--dataset_base_path", str(SET), "--max_pixels", "16384", "--max_steps", "1")
        for turn in ("first", "second"):
            said = train(Path(folder) / turn, *flags, data=Path(folder))
            at = {(event["event"], event.get("name"), event.get("done")): event["time"] for event in said}
            loading = (
                at["phase", "caching", 0]
                - at["phase", "loading", 0]
                + at["phase", "training", 0]
                - at["phase", "loading", 1]
            )
            whole = at["phase", "training", 0] - at["phase", "loading", 0]
            print(f"{turn} run: ready for step 1 / loading: {whole / loading:.2f}  ({whole:.1f} s)")


def index(count: int = 10_000) -> None:
    """Reading a folder of pictures: sizes, captions and hashes."""
    from PIL import Image

    from backend.schema.training import DatasetSection
    from backend.training.dataset import read_dataset

    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) / "set"
        pictures.mkdir()
        for number in range(count):
            Image.new("RGB", (256, 192 + number % 64), (number % 256, 80, 90)).save(pictures / f"{number:05d}.jpg")
            (pictures / f"{number:05d}.txt").write_text(f"picture {number}")
        section = DatasetSection(dataset_base_path=str(pictures))
        for turn in ("cold", "warm"):
            began = time.perf_counter()
            found = read_dataset(section, index=Path(folder) / "index.json")
            print(f"{turn}: {len(found.items)} pictures indexed in {time.perf_counter() - began:.2f} s")


RUNGS = (
    (),
    ("--use_gradient_checkpointing",),
    ("--use_gradient_checkpointing_offload",),
    ("--fp8_models", "dit,text_encoder"),
    ("--fp8_models", "dit,text_encoder", "--use_gradient_checkpointing"),
    ("--enable_model_cpu_offload",),
    ("--enable_model_cpu_offload", "--use_gradient_checkpointing"),
)


def ladder(num_layers: int = 8, width: int = 1024) -> None:
    """Peak of a step and seconds a step for each rung, on a random Qwen-Image of some 300 million parameters."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", num_layers, width)
        flags = ("--model", str(model), "--dataset_base_path", str(SET), "--max_pixels", str(256 * 256), "--max_steps", "3",
                 "--lora_rank", "16", "--preflight")  # fmt: skip
        print("| rung | peak of a step, MiB | s/step |\n|---|---|---|")
        for number, rung in enumerate(RUNGS):
            said = train(Path(folder) / str(number), *flags, *rung, data=Path(folder))
            peak = next(event["step_bytes"] for event in said if event.get("phase") == "preflight")
            seconds = statistics.median(event["seconds"] for event in said if event["event"] == "step")
            print(f"| {' '.join(rung) or 'none'} | {peak / 2**20:.0f} | {seconds:.2f} |", flush=True)


def make_model(folder: Path, num_layers: int, width: int) -> Path:
    """The starter with a larger transformer of random weights."""
    import shutil

    import torch
    from diffusers import QwenImageTransformer2DModel

    shutil.copytree(PROJECT / "assets" / "starter", folder, ignore=shutil.ignore_patterns("transformer"))
    text = json.loads((folder / "text_encoder" / "config.json").read_text())["text_config"]["hidden_size"]
    torch.manual_seed(0)
    module = QwenImageTransformer2DModel(
        num_layers=num_layers, num_attention_heads=width // 128, joint_attention_dim=text
    )
    module.to(torch.bfloat16).save_pretrained(folder / "transformer")
    return folder


if __name__ == "__main__":
    for name in sys.argv[1:] or ["step", "start", "index"]:
        {"step": step, "start": start, "index": index, "ladder": ladder}[name]()
