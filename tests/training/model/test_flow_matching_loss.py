"""Noise levels, weights, schedules and the running mean, by their definitions."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy
import pytest

torch = pytest.importorskip("torch")

from backend.catalog.family import DrawSettings
from backend.families import qwen_image
from backend.host.runs.runs import command_of
from backend.schema.messages import Trouble
from backend.schema.settings import from_flags
from backend.schema.training.config import LossSection, TrainingConfig, TrainingSection
from backend.training.model.flow_matching_loss import draw, errors, level_weight, training_levels
from backend.training.optim.optimizers import EMA, Lion, make_optimizers, rate_factor, set_rates
from studio.train.presets import apply, presets

pytestmark = pytest.mark.torch
SCHEDULE = qwen_image.TRAINING_SCHEDULE


def levels(count: int = 4000, **settings) -> torch.Tensor:
    settings = {"timestep_sampling": "uniform", **settings}
    schedule = settings.pop("schedule", None)
    return draw((1, 1, 1), range(count), replace(LossSection(), **settings), seed=3, schedule=schedule).sigma


def test_what_is_drawn_follows_from_seed_and_place():
    section = replace(LossSection(), timestep_sampling="uniform")
    whole = draw((2, 3, 3), range(6), section, seed=1)
    part = draw((2, 3, 3), (4, 2), section, seed=1)
    assert torch.equal(part.noise[0], whole.noise[4]) and torch.equal(part.sigma, whole.sigma[[4, 2]])
    assert not torch.equal(draw((2, 3, 3), (4,), section, seed=2).noise, whole.noise[4:5])


def test_levels_are_distributed_as_named():
    uniform = levels()
    assert abs(float(uniform.mean()) - 0.5) < 0.02 and abs(float((uniform < 0.25).float().mean()) - 0.25) < 0.03
    normal = levels(timestep_sampling="logit_normal", logit_mean=1.0, logit_std=0.5)
    logit = torch.log(normal / (1 - normal))
    assert abs(float(logit.mean()) - 1.0) < 0.05 and abs(float(logit.std()) - 0.5) < 0.05
    mixed = levels(timestep_sampling="logit_normal", logit_mean=-20.0, high_noise_share=0.4, high_noise_from=0.8)
    high = mixed[mixed > 0.5]
    assert (
        abs(len(high) / len(mixed) - 0.4) < 0.03 and float(high.min()) >= 0.8 and abs(float(high.mean()) - 0.9) < 0.01
    )
    mode = levels(timestep_sampling="mode", mode_scale=1.29)
    assert float(((mode > 0.4) & (mode < 0.6)).float().mean()) > 0.25
    schedule = torch.linspace(1, 0, 11)[:10] ** 0.5
    assert set(levels(timestep_sampling="shifted", schedule=schedule).tolist()) <= set(schedule.tolist())


def test_weights_of_levels():
    sigma = torch.linspace(0.001, 0.999, 1001)
    snr = level_weight(sigma, replace(LossSection(), loss_weighting="min_snr", min_snr_gamma=5.0), SCHEDULE)
    ratio = ((1 - sigma) / sigma) ** 2
    torch.testing.assert_close(snr, torch.minimum(ratio, torch.tensor(5.0)) * sigma**2)
    plain = level_weight(sigma, replace(LossSection(), loss_weighting="none"), SCHEDULE)
    assert torch.equal(plain, torch.ones_like(sigma))


def scheduler_of_diffsynth(count: int = 1000) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(levels, weights) of DiffSynth-Studio's `FlowMatchScheduler("Qwen-Image")` after `set_timesteps(count, training=True)`, by its formula."""
    even = numpy.linspace(1.0, 0.0, count + 1)[:-1]
    shifted = math.exp(0.8) / (math.exp(0.8) + (1 / even - 1))
    levels = 1 - (1 - shifted) / ((1 - shifted[-1]) / (1 - 0.02))
    bell = numpy.exp(-2 * ((levels * 1000 - 500) / 1000) ** 2)
    return levels, (bell - bell.min()) * (1000 / (bell - bell.min()).sum())


def test_what_no_flag_says_is_diffsynths_objective():
    """Levels, how often each is drawn, weights, no clipping: what a script means that says nothing of them."""
    says_nothing = from_flags(TrainingConfig, [])
    levels, weights = scheduler_of_diffsynth()
    ours = training_levels(SCHEDULE)
    numpy.testing.assert_allclose(ours, levels, atol=1e-6)
    numpy.testing.assert_allclose(level_weight(ours, says_nothing.loss, SCHEDULE), weights, atol=1e-5)
    drawn = draw((1, 1, 1), range(20_000), says_nothing.loss, seed=3, schedule=ours).sigma
    places = torch.bucketize(-drawn, -ours)  # 20 of each of the 1000 are expected
    assert torch.equal(ours[places], drawn)
    hundredths = torch.bincount(places // 10, minlength=100)
    assert abs(float(((hundredths - 200.0) ** 2 / 200.0).sum()) - 99) < 6 * math.sqrt(2 * 99)  # chi square
    assert abs(float(drawn.mean()) - 0.6376) < 0.01
    assert says_nothing.training.max_grad_norm == 0


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_a_student_draws_in_the_steps_of_the_training_schedule(steps: int):
    levels = training_levels(SCHEDULE, steps)
    if steps == 1:  # nothing can be stretched there
        assert levels.tolist() == [1.0]
    else:
        numpy.testing.assert_allclose(levels, scheduler_of_diffsynth(steps)[0], atol=1e-6)


def test_the_forms_presets_say_their_objective_openly():
    for preset in presets():
        assert {"timestep_sampling", "loss_weighting", "max_grad_norm"} <= preset.values.keys(), preset.name
        command = command_of(apply(preset, TrainingConfig()))
        assert "--timestep_sampling" in command and "--loss_weighting" in command and "--max_grad_norm" in command


def test_noise_is_mixed_in_and_errors_are_means():
    picture, noise = torch.zeros(2, 1, 2, 2), torch.ones(2, 1, 2, 2)
    mixed = qwen_image.noised(picture, noise, torch.tensor([0.25, 1.0]), DrawSettings(16, 16))
    assert mixed.flatten(1).mean(1).tolist() == [0.25, 1.0]
    mask = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]]).expand(2, 1, 2, 2)
    wrong = torch.tensor([[[[2.0, 9.0], [9.0, 9.0]]]]).expand(2, 1, 2, 2)
    assert errors(wrong, picture, mask).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.5, 0]),
        ("linear_from_half", [0.5, 1, 1, 1, 0]),
        ("cosine", [0.5, 1, 1, 0.5, 0]),
        ("cosine_with_restarts", [0.5, 1, 1, 1, 1]),
    ],
)
def test_rates_rise_and_fall(name: str, expected: list[float]):
    section = replace(TrainingSection(), lr_scheduler=name, lr_warmup_steps=2, lr_restarts=2)
    found = [rate_factor(step, 102, section) for step in (0, 1, 2, 52, 102)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_parts_have_schedules_of_their_own():
    weights = {name: torch.nn.Parameter(torch.ones(2)) for name in ("dit.a", "text_encoder.b")}
    section = replace(
        TrainingSection(), learning_rate=1.0, learning_rates="text_encoder=0.5", lr_schedulers="text_encoder=linear"
    )
    (optimizer,) = make_optimizers(weights, section)
    for step, expected in ((0, [1.0, 0.5]), (50, [1.0, 0.25]), (75, [1.0, 0.125])):
        set_rates([optimizer], partial(rate_factor, step, 100, section))
        assert [group["lr"] for group in optimizer.param_groups] == expected
    for wrong in ("vae=linear", "dit=slow", "dit"):
        with pytest.raises(Trouble, match="--lr_schedulers"):
            make_optimizers(weights, replace(section, lr_schedulers=wrong))


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest():
    weights = {
        "dit.blocks.0.q.weight": torch.nn.Parameter(torch.ones(4, 4)),
        "dit.blocks.0.q.bias": torch.nn.Parameter(torch.ones(4)),
        "dit.head.weight": torch.nn.Parameter(torch.ones(4, 4)),
        "text_encoder.layers.1.w": torch.nn.Parameter(torch.ones(4, 4)),
    }
    section = replace(
        TrainingSection(), customized_optimizer="muon", learning_rate=1.0, learning_rates="text_encoder=0.25"
    )
    muon, adamw = make_optimizers(weights, section)
    assert [(group["part"], group["lr"], len(group["params"])) for group in muon.param_groups] == [
        ("dit", 1.0, 1),
        ("text_encoder", 0.25, 1),
    ]
    assert [len(group["params"]) for group in adamw.param_groups] == [2]
    assert type(muon).__name__ == "Muon" and type(adamw).__name__ == "AdamW"


def test_lion_steps_by_the_sign_of_its_momentum():
    weight = torch.nn.Parameter(torch.tensor([1.0, -1.0, 0.5]))
    optimizer = Lion([weight], lr=0.1)
    weight.grad = torch.tensor([3.0, -0.01, 0.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, -0.9, 0.5]))


def test_the_running_mean_follows_and_is_exchanged_for_the_weights():
    weight = torch.nn.Parameter(torch.zeros(2))
    mean = EMA({"a": weight}, decay=0.5)
    with torch.no_grad():
        weight.fill_(1.0)
    mean.update(100)
    assert mean.values["a"].tolist() == [0.5, 0.5]
    mean.swap()
    assert weight.tolist() == [0.5, 0.5] and mean.values["a"].tolist() == [1.0, 1.0]
    mean.swap()
    assert weight.tolist() == [1.0, 1.0]
