"""Blocks of a fetched transformer that stay on the device: as many as the plan says, with the same results, for the memory that was predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from PIL import Image
from safetensors.torch import load_file

from backend.catalog.models.identify import identify_model
from backend.engine.devices import device_memory
from backend.engine.offload import placement
from backend.engine.tracing import live_tensors
from backend.families import FAMILIES
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.plan import plan
from backend.schema.paths import ASSETS
from backend.schema.settings import from_values, to_values
from backend.schema.training.config import TrainingConfig
from backend.training.model.frozen_weights import staying
from tests.tiny_models import make_qwen_image

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
SIDE = 384  # more tokens than the plain attention of small pictures takes


def test_blocks_that_stay_change_nothing(run_training, events, tmp_path: Path):
    model = make_qwen_image(tmp_path / "model", num_layers=5)
    flags = (
        "--max_steps",
        3,
        "--save_dtype",
        "float32",
        "--height",
        32,
        "--width",
        32,
        "--no-data_cache",
        "--use_gradient_checkpointing",
    )
    away = ("--enable_model_cpu_offload", "--resident_blocks", 2)
    found = []
    for name, more in (("plain", ()), ("away", away), ("pieces", (*away, "--cpu_offload_split_threshold", 0))):
        assert run_training(tmp_path / name, *flags, *more, model=model) == 0
        losses = [event["loss"] for event in events(tmp_path / name) if event["event"] == "step"]
        found.append((losses, load_file(tmp_path / name / "step-3.safetensors")))
    for losses, weights in found[1:]:
        assert losses == found[0][0] and len(losses) == 3
        assert all(torch.equal(weights[name], value) for name, value in found[0][1].items())


@pytest.fixture
def started(loaded, data, tmp_path: Path):
    """`started(config)`: a run of that config, set up in this process, with one picture whose caption is as long as plans assume."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from backend.training.checkpoint.reporter import Reporter
    from backend.training.setup import set_up

    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.effect_noise((SIDE, SIDE), 80).convert("RGB").save(pictures / "0.png")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def start(config: TrainingConfig):
        AcceleratorState._reset_state(reset_partial_state=True)
        (pictures / "0.txt").write_text("red " * 115, encoding="utf-8")
        said = {"dataset_base_path": str(pictures), "model": str(ASSETS / "starter"), "data_cache": False}
        config = from_values(TrainingConfig, said, base=config)
        out = tmp_path / "run"
        out.mkdir()
        return set_up(
            config,
            out,
            out,
            Accelerator(cpu=True, mixed_precision="bf16"),
            Reporter(out, silent=True),
            index=tmp_path / "index.json",
        )

    yield start
    torch.set_num_threads(threads)


def test_a_run_keeps_the_plan_s_blocks_and_takes_what_was_predicted(started):
    from backend.dataset.bucket_sampler import Batch
    from backend.training.loop import train_step
    from backend.training.model import activation_checkpointing

    sizes = sizes_of(identify_model(ASSETS / "starter", FAMILIES))
    config = from_values(TrainingConfig, {"max_pixels": SIDE**2, "lora_rank": 4})
    card = replace(
        device_memory.probe(CPU),
        dtypes=("bfloat16", "float32"),
        total_bytes=2**40,
        free_bytes=2**40,
        used_by_others_bytes=0,
        reserve_bytes=0,
    )
    three = from_values(TrainingConfig, {"offload_models": "dit", "resident_blocks": 3}, base=config)
    room = plan(sizes, card, three).peak_high_bytes
    found = plan(sizes, replace(card, total_bytes=room, free_bytes=room), config)
    assert found.verdict == "green" and len(found.resident_blocks["dit"]) == 3
    assert (found.settings["offload_models"], found.settings["resident_blocks"]) == ("dit", 3)
    run = started(from_values(TrainingConfig, found.settings, base=config))
    dit = run.learner.parts["dit"]
    placed, trained = placement.of(dit), sum(weight.nbytes for weight in run.weights.values())

    def measured() -> int:
        measure = live_tensors.Measure({"dit": dit}, CPU)
        measure.phase("step")
        train_step(run, [[Batch(items=(0,), places=(0,))]])
        measure.end()
        return measure.by_phase["step"] + trained

    states = 2 * trained  # were there already, and nobody counts them but who made them
    measured()
    before = placed.moved_bytes
    assert measured() + states == pytest.approx(step_of(found).live_bytes, rel=0.02)
    assert placed.resident_blocks() == found.resident_blocks["dit"]
    fetched = [placed.blocks[index] for index in found.streamed_blocks["dit"]]
    assert placed.moved_bytes - before == 2 * (len(fetched) - 2) * fetched[0].raw.nbytes
    activation_checkpointing.enable_activation_checkpointing(dit, offload=False)
    less = plan(sizes, card, from_values(TrainingConfig, {"use_gradient_checkpointing": True}, base=three))
    assert measured() + states == pytest.approx(step_of(less).live_bytes, rel=0.03)


def step_of(found):
    return next(phase for phase in found.phases if phase.name == "step")


def test_pieces_of_a_block_stay_together():
    class Named:
        def __init__(self, name: str):
            self.name = name

    units = [Named(name) for name in ("a.0.x", "a.0.y", "a.1", "a.2.x", "a.2.y", "a.3")]
    assert staying(units, 2) == (2, 5) and staying(units, 0) == () and staying(units, 9) == tuple(range(6))


def test_what_stays_needs_something_that_is_fetched(run_training, tmp_path: Path, capsys):
    assert run_training(tmp_path / "run", "--max_steps", 1, "--resident_blocks", 2) == 2
    assert "--resident_blocks says how many" in capsys.readouterr().err
    assert to_values(TrainingConfig())["resident_blocks"] is None
