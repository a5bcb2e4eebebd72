"""Forms of a run on a CPU against runs: those that ship against a new trace, and those of any other network against real tensors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.models.identify import identify_model
from backend.engine.tracing import allocation_recorder, cpu_training_fit, cpu_training_step, sample_points
from backend.families import FAMILIES
from backend.families.qwen_image import cpu_attention
from backend.planner.costs import cpu_training
from backend.planner.costs.layout import Layout, Work
from backend.planner.costs.model_sizes import Numbers, PartSizes, published, sizes_of
from backend.planner.costs.training_method import method_of
from backend.schema.paths import ASSETS

pytestmark = pytest.mark.torch
NETWORK = "diffusers:QwenImageTransformer2DModel"
KNOWN = published()["networks"]["QwenImageTransformer2DModel"]
TINY = {
    "num_layers": 5,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "joint_attention_dim": 48,
    "axes_dims_rope": [8, 12, 12],
}
BF16 = torch.bfloat16


def sections(one: allocation_recorder.Tape) -> dict[str, int]:
    alive, marks = list(allocation_recorder.live(one)), one.marks | {"": 0}
    return {name: max(alive[marks[start] : marks[end]]) for name, (start, end) in cpu_training_fit.SECTIONS.items()}


def point(**changes) -> dict:
    found = {"h": 16, "w": 24, "n": 96, "t": 21, "b": 1, "r": 32, **changes}
    return found | {"s": found["n"] + found["t"]}


def test_the_trainer_s_attention_is_the_estimate_s():
    assert KNOWN["plain_tokens"] == cpu_attention.MAX_TOKENS


@pytest.mark.parametrize(
    ("kernel", "targets", "checkpointed", "batch"), [("plain", "usual", False, 4), ("fused", "full", True, 1)]
)
def test_shipped_forms_agree_with_a_new_trace(kernel, targets, checkpointed, batch):
    part = sizes_of(identify_model(ASSETS / "starter", FAMILIES)).parts["dit"]
    config = json.loads((ASSETS / "starter" / "transformer" / "config.json").read_text(encoding="utf-8"))
    config = sample_points.config_of({key: value for key, value in config.items() if key[0] != "_"}, KNOWN, (3,))
    at = point(b=batch, **({"h": 48, "w": 48, "n": 576} if kernel == "fused" else {}))
    lora = KNOWN["lora"].get(targets, [])
    traced = sections(
        cpu_training_fit.step_tape(NETWORK, config, KNOWN, BF16, lora, at, kernel, checkpointed=checkpointed)
    )
    found = cpu_training.step(
        replace(part, depths={"transformer_blocks": 3}),
        at,
        Work(targets=targets, batch=batch),
        Layout(checkpointed=checkpointed),
    )
    assert found == {name: pytest.approx(value, rel=0.01) for name, value in traced.items()}


def test_a_network_without_a_table_is_foretold_at_its_own_depth():
    lora, at = KNOWN["lora"]["attention"], point(r=8, b=8)
    form = cpu_training_fit.step_form(NETWORK, TINY, KNOWN, torch.float32, "plain", lora, many=True, checkpointed=False)
    table = {"cpu": {"plain_tokens": 512, "plain/attention/kept/float32": {"bn": form}}}
    found = cpu_training.step(
        PartSizes("dit", "", table, (), Numbers(), {"transformer_blocks": 5}),
        at,
        Work(targets="attention", batch=8, computing="float32"),
        Layout(),
    )
    module = cpu_training_step.network(
        NETWORK, TINY, torch.float32, targets=lora, rank=8, checkpointed=False, kernel="plain"
    )
    real = sections(cpu_training_step.step_tape(module, list(module.transformer_blocks), at, torch.float32, lean=True))
    assert found == {name: pytest.approx(value, rel=0.02) for name, value in real.items()}


@pytest.mark.slow  # a minute of processor time
@pytest.mark.parametrize("word", ["loha", "lora-dropout+2"])
def test_other_methods_take_what_is_foreseen(word: str):
    """Adapters with copies of their own, and a student that draws in two steps, on real tensors; of a network as small as
    this the allocator's blocks of 512 bytes, which small weights do not fill, are some 2 %."""
    method, at, lora = method_of(word), point(r=8), KNOWN["lora"]["attention"]
    key = f"plain/attention@{word}/kept/bfloat16"
    table = {"cpu": {"plain_tokens": 512, key: cpu_training_fit.form_of(NETWORK, TINY, KNOWN, key)}}
    part = PartSizes("dit", "", table, (), Numbers(), {"transformer_blocks": 5})
    found = cpu_training.step(part, at, Work(targets="attention", method=word, rank=8), Layout())
    module = cpu_training_step.network(
        NETWORK, TINY, BF16, targets=lora, rank=8, checkpointed=False, kernel="plain", method=method
    )
    step = cpu_training_step.step_tape(
        module, list(module.transformer_blocks), at, BF16, lean=method.lean, drawing=method.drawing
    )
    assert found == {name: pytest.approx(value, rel=0.03) for name, value in sections(step).items()}
