"""What tests of runs share: pictures to train on, and a run in this very process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from backend.schema.paths import Places


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of five captioned pictures: three of one shape, two of another."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(5):
        picture = Image.new("RGB", (64, 64) if number < 3 else (96, 48), (250, 250, 250))
        ImageDraw.Draw(picture).ellipse((8, 8, 40, 40), fill=(50 * number, 90, 200 - 30 * number))
        picture.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a ball, number {number}" + " again" * number, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_edit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen-Image-Edit-2509, which takes several pictures."""
    from tests.tiny_models import make_qwen_edit

    return make_qwen_edit(tmp_path_factory.mktemp("edit") / "tiny", "edit-2509")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three samples in a table: two edited from one picture of their own size, one from two of other proportions."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, size in {
        "a": (64, 64),
        "b": (64, 64),
        "c": (64, 64),
        "wide": (96, 48),
        "old_a": (64, 64),
        "old_b": (64, 64),
    }.items():
        picture = Image.linear_gradient("L").resize(size).convert("RGB")
        ImageDraw.Draw(picture).ellipse((4, 8, 28, 40), fill=(10 * sum(map(ord, name)) % 255, 90, 160))
        picture.save(folder / f"{name}.png")
    rows = [
        {"image": "a.png", "prompt": "make it red", "edit_image": "old_a.png"},
        {"image": "b.png", "prompt": "turn it", "edit_image": ["old_b.png"]},
        {"image": "c.png", "prompt": "both together", "edit_image": ["wide.png", "old_a.png"]},
    ]
    (folder / "m.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="session")
def loaded(tiny_qwen: Path) -> None:
    """The libraries of a run are loaded and no longer looked through whenever a run collects what it has dropped."""
    import gc
    import importlib

    for name in ("backend.training.setup", "backend.training.loop", "peft.tuners.lora", "diffusers.schedulers"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


@pytest.fixture
def run_training(loaded: None, data: Places, tiny_qwen: Path, pictures: Path) -> Callable[..., int]:
    """`run_training(output, "--flag", value, …)`: a run of the tiny model in this process; its exit status. `.as_typed(argv)`: of a
    command line that says everything itself."""
    import signal

    import torch
    from accelerate.state import AcceleratorState

    from backend.training.__main__ import main

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    handlers = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}

    def run(output: Path, *flags: object, model: Path | None = tiny_qwen, dataset: Path | None = pictures) -> int:
        AcceleratorState._reset_state(reset_partial_state=True)
        named = ["--model", str(model)] if model else []
        named += ["--dataset_base_path", str(dataset)] if dataset else []
        sizes = ["--max_pixels", "4096", "--lora_rank", "4", "--learning_rate", "1e-3"]
        return main([*named, *sizes, "--output_path", str(output), *map(str, flags)])

    def as_typed(argv: list[str]) -> int:
        AcceleratorState._reset_state(reset_partial_state=True)
        return main(argv)

    run.as_typed = as_typed
    yield run
    torch.set_num_threads(threads)
    for name, handler in handlers.items():
        signal.signal(name, handler)


@pytest.fixture
def events() -> Callable[[Path], list[dict]]:
    """The events of a run's folder."""
    return lambda folder: [
        json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
