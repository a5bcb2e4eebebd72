"""A run on the device that is meant: which one, with how many of its kind, and what differs between kinds."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from accelerate.optimizer import patch_optimizer_step

from backend.catalog.models.identify import identify_model
from backend.engine.devices import benchmark
from backend.families import FAMILIES
from backend.host.runs import runs
from backend.schema.preferences import Preferences
from backend.schema.settings import to_file_text
from backend.schema.training.config import TrainingConfig
from backend.training import loop
from backend.training.checkpoint import state as checkpoint
from backend.training.model import activation_checkpointing, base_model

pytestmark = pytest.mark.torch


def test_a_run_of_the_page_sees_the_preferred_device_first(data, monkeypatch):
    data.user.mkdir(parents=True, exist_ok=True)
    (data.user / "preferences.json").write_text(to_file_text(Preferences(device="cuda:1")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    given = {}
    monkeypatch.setattr(runs.processes, "start", lambda argv, **options: given.update(options) or _nobody(argv))
    runs.start(runs.create(TrainingConfig(), data), places=data)
    assert given["env"]["CUDA_VISIBLE_DEVICES"] == "6,4,7"
    assert given["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # the order that the page shows them in


def _nobody(argv):
    return runs.processes.Process(pid=2**22 + 1, created=1.0, argv=tuple(argv))


class OneCard:
    """Stands for `torch.cuda` on a machine with one card: as there, a state for a second one is an IndexError."""

    def __init__(self):
        self.states = [torch.tensor([7], dtype=torch.uint8)]

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def get_rng_state(self, device=0):
        return self.states[0]

    def set_rng_state(self, state, device=0):
        self.states[0] = state


def test_a_state_of_more_cards_comes_back_on_fewer(monkeypatch):
    card = OneCard()
    for name in ("is_available", "current_device", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    state = checkpoint.random_state()
    assert len(state["cuda"]) == 1
    older = {**state, "cuda": [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]}
    checkpoint.set_random_state(older)
    assert int(card.states[0]) == 1


def test_parts_that_will_be_spread_never_lie_whole_on_one_device(tiny_qwen, monkeypatch):
    spec, asked, load_part = identify_model(tiny_qwen, FAMILIES), [], base_model.load_part
    monkeypatch.setattr(
        base_model,
        "load_part",
        lambda part, *, dtype, device, **options: (
            asked.append(str(device)) or load_part(part, dtype=dtype, device="cpu", **options)
        ),
    )
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: asked.append(str(device)) or module)
    card = torch.device("cuda:1")
    found = types.SimpleNamespace(spec=spec, family=types.SimpleNamespace(prepare=lambda name, module: None))
    base_model.load_parts(found, ["dit"], trained=(), dtype=torch.bfloat16, device=card)
    assert asked == ["cuda:1", "cuda:1"]
    asked.clear()
    base_model.load_parts(found, ["dit"], trained=(), dtype=torch.bfloat16, device=card, stay_in_ram=True)
    assert asked == ["cpu"]


def take_scaler(run, scaler) -> None:
    """What accelerate does where a run computes in fp16, which a CPU does not."""
    run.accelerator.scaler = scaler
    for optimizer in run.optimizers:
        if optimizer.scaler is None:
            optimizer.scaler, optimizer._accelerate_step_called = scaler, False
            optimizer._optimizer_original_step_method = optimizer.optimizer.step
            optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, optimizer.optimizer.step)


def test_the_scaler_of_fp16_finds_its_scale_without_ending_the_run(run_training, events, tmp_path: Path, monkeypatch):
    """Real gradients that overflow seven times in a row, and torch's own scaler, which skips those steps and halves its scale."""
    scaler, calls, train_step = torch.amp.GradScaler("cpu", init_scale=2.0**16), [], loop.train_step

    def scaled(run, groups):
        accelerator = run.accelerator
        take_scaler(run, scaler)
        calls.append(scaler.get_scale())
        infinite = float("inf") if len(calls) <= 7 else 1.0
        monkeypatch.setattr(accelerator, "backward", lambda loss: scaler.scale(loss * infinite).backward())
        return train_step(run, groups)

    monkeypatch.setattr(loop, "train_step", scaled)
    assert (
        run_training(tmp_path, "--max_steps", 9, "--save_steps", 100, "--no-preflight", "--height", 32, "--width", 32)
        == 0
    )
    assert calls[7:] == [2.0**9] * 2
    said = [event["message"] for event in events(tmp_path) if event["event"] == "note"]
    assert sum("loss scale" in message for message in said) == 7


def test_a_loss_that_stays_infinite_ends_a_run_with_a_scaler_too(run_training, events, tmp_path: Path, monkeypatch):
    scaler, train_step = torch.amp.GradScaler("cpu", init_scale=8.0), loop.train_step

    def scaled(run, groups):
        take_scaler(run, scaler)
        monkeypatch.setattr(run.accelerator, "backward", lambda loss: scaler.scale(loss * float("inf")).backward())
        return train_step(run, groups)

    monkeypatch.setattr(loop, "train_step", scaled)
    assert (
        run_training(tmp_path, "--max_steps", 30, "--save_steps", 100, "--no-preflight", "--height", 32, "--width", 32)
        != 0
    )
    assert any(event.get("kind") == "not_finite" for event in events(tmp_path))


def test_the_measured_device_is_waited_for_and_checkpoints_use_the_tensors_own(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    benchmark._synchronize(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: made.append(device) or object())
    monkeypatch.setattr(activation_checkpointing, "Kept", lambda tensor, stream: (tensor, stream))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:1"):
        tensor = torch.empty(4)
    activation_checkpointing.OffloadedCheckpoints().keep([torch.ones(1), tensor])
    assert made == [torch.device("cuda", 1)]


def test_deterministic_algorithms_are_taken_where_asked_for_and_no_longer_afterwards(run_training, tmp_path: Path):
    flags = ("--max_steps", 1, "--height", 32, "--width", 32)
    assert run_training(tmp_path / "exact", *flags, "--deterministic") == 0
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
    assert run_training(tmp_path / "plain", *flags) == 0
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
