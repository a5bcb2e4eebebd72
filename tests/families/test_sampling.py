"""Sampling and training by the contract: kinds of prediction, branches of guidance, several latent streams, networks by noise level."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.family import Branch, DrawSettings, Family, Guidance, Part, Prediction, complete, each_stream
from backend.engine.acceleration.first_block_cache import StepCache
from backend.engine.pipeline.guidance import guided
from backend.engine.pipeline.sampler import sample
from backend.families import sd15
from backend.schema.settings import from_values
from backend.schema.training.config import LossSection
from backend.training.model.flow_matching_loss import NoiseLevels, draw, level_weight

pytestmark = pytest.mark.torch
AT = DrawSettings(16, 16, guidance=3.0)
KINDS = (
    Prediction("velocity"),
    Prediction("x0"),
    Prediction("x0", "exploding"),
    Prediction("epsilon", "exploding"),
    Prediction("v", "exploding"),
)


def family_of(**members) -> Family:
    """A family without files, with these members."""
    parts = {"dit": Part("package:Class", folder="transformer", phase="denoise")}
    usual = {
        "__name__": "backend.families.toy", "NAME": "toy", "TITLE": "Toy", "PARTS": parts, "SIGNATURES": (), "LORA": sd15.LORA,
        "DEFAULTS": sd15.DEFAULTS, "SIZES": sd15.SIZES, "collate": lambda encodings, settings, **_: list(encodings),
    }  # fmt: skip
    return complete(SimpleNamespace(**usual | members))


def sigmas_of(said: Prediction) -> torch.Tensor:
    return torch.linspace(1, 0, 6) if said.noising == "flow" else torch.tensor([14.6, 6.0, 2.0, 0.5, 0.03, 0.0])


@pytest.mark.parametrize("said", KINDS, ids=lambda said: f"{said.kind}, {said.noising}")
def test_a_network_that_is_right_is_sampled_to_the_picture_from_any_level(said: Prediction):
    """`target` is what `predict` would give if it knew the picture; every step then goes straight to it."""
    x0, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    family, sigmas = family_of(PREDICTION=said), sigmas_of(said)

    def predict(parts, x, sigma, cond, **_):
        level = sigma.view(-1, 1, 1, 1)
        seen = (x - (1 - level) * x0) / level if said.noising == "flow" else (x - x0) / level  # the noise that is in x
        return family.target(x0, seen, sigma, AT)

    family.predict = predict
    prompts = {"positive": [{}, {}]}
    denoise = guided(family, {}, prompts, DrawSettings(16, 16), num_steps=5, device="cpu", together=True)
    estimates = []
    for start in (0, 2):
        x = family.noised(x0, noise, sigmas[start], AT)
        torch.testing.assert_close(
            x,
            (1 - sigmas[start]) * x0 + sigmas[start] * noise if said.noising == "flow" else x0 + sigmas[start] * noise,
        )
        found = sample(denoise, x, sigmas[start:], on_step=lambda _, estimate: estimates.append(estimate()))
        torch.testing.assert_close(found, x0, rtol=1e-4, atol=1e-4)
    for estimate in estimates:
        torch.testing.assert_close(estimate, x0, rtol=1e-3, atol=1e-3)


def test_v_is_that_of_the_variance_preserving_network():
    sigma, x0, noise = torch.tensor([3.0]), torch.randn(1, 2, 2, 2), torch.randn(1, 2, 2, 2)
    alpha, scale = 1 / math.sqrt(10), 3 / math.sqrt(10)
    family = family_of(PREDICTION=Prediction("v", "exploding"))
    torch.testing.assert_close(family.target(x0, noise, sigma, AT), alpha * noise - scale * x0)
    whole = family.initial(noise, torch.tensor([14.0, 0.0]), AT)
    assert torch.equal(whole, noise * 14) and torch.equal(family_of().initial(noise, torch.ones(2), AT), noise)


@pytest.mark.parametrize("said", KINDS, ids=lambda said: f"{said.kind}, {said.noising}")
def test_min_snr_weights_the_error_of_the_picture(said: Prediction):
    """min(snr, gamma) times the squared error of x0 is the weight times the squared error of what is predicted."""
    family, sigma = family_of(PREDICTION=said), torch.tensor([0.2, 0.5, 0.9])
    x0, noise = torch.randn(3, 1, 2, 2, dtype=torch.float64), torch.randn(3, 1, 2, 2, dtype=torch.float64)
    x = family.noised(x0, noise, sigma, AT)
    wanted = family.target(x0, noise, sigma, AT)
    wrong = wanted + 0.1
    level = sigma.view(-1, 1, 1, 1)
    off = [(x - level * family.derivative(one, x, sigma, AT) - x0) for one in (wanted, wrong)]
    assert off[0].abs().max() < 1e-6
    snr = ((1 - sigma if said.noising == "flow" else torch.ones(3)) / sigma) ** 2
    section = from_values(LossSection, {"loss_weighting": "min_snr", "min_snr_gamma": 5.0})
    weight = level_weight(sigma, section, family.TRAINING_SCHEDULE, said)
    errors = snr.clamp_max(5.0) * (off[1] ** 2).flatten(1).mean(1)
    torch.testing.assert_close((weight * 0.01).double(), errors, rtol=1e-4, atol=1e-9)


def test_levels_of_a_table_of_timesteps_are_practised_from_the_table():
    table = torch.linspace(14.6, 0.03, 1000)
    family = family_of(
        PREDICTION=Prediction("epsilon", "exploding"), training_levels=lambda settings, count: table[:count]
    )
    levels = NoiseLevels(family, SimpleNamespace(variant="base", scheduler={}))
    assert torch.equal(levels.practised((16, 16)), table) and torch.equal(levels.table((16, 16)), table)
    for how in ("uniform", "logit_normal", "scheduler"):
        section = from_values(LossSection, {"timestep_sampling": how})
        drawn = draw((1, 1, 1), range(200), section, seed=0, schedule=table, table=levels.table((16, 16)))
        assert set(drawn.sigma.tolist()) <= set(table.tolist()) and drawn.sigma.max() > 8 and drawn.sigma.min() < 5
    half = draw((1, 1, 1), range(50), section, seed=0, schedule=torch.linspace(1, 0.1, 9), within=(0.875, 1.0))
    assert half.sigma.min() >= 0.875  # of an expert for the high levels


def calls(family: Family, together: bool, settings=AT, steps: int = 2, prompts=("positive", "negative")):
    """The network's calls while a picture is drawn: (part, conditioning, pictures)."""
    seen = []

    def predict(parts, x, sigma, cond, *, part="dit", sigma_next=None):
        one = next(iter(x.values())) if isinstance(x, dict) else x
        seen.append((part, tuple(cond), len(one)))
        return each_stream(lambda tensor: torch.ones_like(tensor) * (2.0 if "positive" in cond else 1.0), x)

    family.predict = predict
    using = []
    denoise = guided(
        family, {}, {name: [name] for name in prompts}, settings, num_steps=steps, device="cpu", together=together,
        using=lambda part: using.append(part) or contextlib.nullcontext(),
    )  # fmt: skip
    found = sample(denoise, torch.zeros(1, 1, 2, 2), torch.linspace(1, 0, steps + 1))
    return seen, using, found


def test_branches_go_together_or_one_after_the_other_and_come_to_the_same():
    together, _, first = calls(family_of(), True)
    apart, _, second = calls(family_of(), False)
    assert together == [("dit", ("positive", "negative"), 2)] * 2
    assert apart == [("dit", (name,), 1) for _ in range(2) for name in ("positive", "negative")]
    assert len(calls(family_of(GUIDANCE=Guidance("embedded")), True)[0][0][1]) == 1  # one pass
    assert calls(family_of(), True, prompts=("positive",))[0] == [("dit", ("positive",), 1)] * 2
    assert first.shape == second.shape


def test_guidance_by_a_schedule_by_another_network_and_by_more_than_two_predictions():
    truncated = family_of(guidance_at=lambda settings, step, num_steps: settings.guidance if step == 0 else 1.0)
    assert [count for _, _, count in calls(truncated, True)[0]] == [2, 1]
    other = Branch("negative", prompt="negative", part="dit_uncond")
    seen, using, found = calls(family_of(branches=lambda settings: (Branch("positive"), other)), True)
    assert [part for part, *_ in seen] == using == ["dit", "dit_uncond"] * 2
    assert found.unique().tolist() == [-4.0]  # 1 + 3 (2 - 1), from 1 to 0
    three = (Branch("positive"), Branch("negative", prompt="negative"), Branch("perturbed", alone=True))
    told = []

    def guide(predictions, scale, *, x, sigma):
        told.append((tuple(predictions), scale, tuple(sigma.shape)))
        return predictions["positive"]

    seen, *_ = calls(family_of(branches=lambda settings: three, guide=guide), True, steps=1)
    assert seen == [("dit", ("positive", "negative"), 2), ("dit", ("positive",), 1)]
    assert told == [(("positive", "negative", "perturbed"), 3.0, (1,))]


def test_networks_change_with_the_noise_level():
    experts = family_of(expert=lambda settings, sigma: "dit" if sigma >= 0.5 else "dit2", GUIDANCE=Guidance("none"))
    assert [part for part, *_ in calls(experts, True, steps=4)[0]] == ["dit", "dit", "dit", "dit2"]


def test_two_streams_have_schedules_of_their_own():
    """A right network for video and sound, each with its own noise levels, under guidance in one batch."""
    clean = {"video": torch.randn(1, 2, 3, 4, 4), "audio": torch.randn(1, 5, 7)}
    noise = each_stream(torch.randn_like, clean)
    levels = {"video": torch.tensor([1.0, 0.8, 0.3, 0.0]), "audio": torch.tensor([1.0, 0.5, 0.1, 0.0])}
    seen = []

    def predict(parts, x, sigma, cond, **_):
        seen.append({name: tuple(level.tolist()) for name, level in sigma.items()})
        return each_stream(lambda one, level, x0: (one - x0) / level.view(-1, *[1] * (one.ndim - 1)), x, sigma, clean)

    family = family_of(predict=predict, latent_shape=lambda settings: each_stream(lambda one: one.shape[1:], clean))
    denoise = guided(family, {}, {"positive": ["p"], "negative": ["n"]}, AT, num_steps=3, device="cpu", together=True)
    found = sample(denoise, family.initial(noise, levels, AT), levels)
    for name, wanted in clean.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-5)
    assert seen[1] == {"video": pytest.approx((0.8, 0.8)), "audio": pytest.approx((0.5, 0.5))}
    assert family.preview_latents(found).shape == (1, 2, 4, 4)


class TwoLists(torch.nn.Module):
    """A network of double and single blocks, as FLUX.1 has them; singles take their streams by place."""

    class Block(torch.nn.Module):
        def __init__(self, number: int):
            super().__init__()
            self.number, self.calls = number, 0

        def forward(self, hidden_states, encoder_hidden_states):
            self.calls += 1
            return encoder_hidden_states + self.number, hidden_states * (1 + self.number / 100)

    def __init__(self):
        super().__init__()
        self.pairs = torch.nn.ModuleList(self.Block(number) for number in (1, 2))
        self.singles = torch.nn.ModuleList(self.Block(number) for number in (3, 4, 5))

    def forward(self, x):
        text = torch.zeros(1, 2, 3)
        for block in self.pairs:
            text, x = block(hidden_states=x, encoder_hidden_states=text)
        for block in self.singles:
            text, x = block(x, text)
        return text, x


def test_a_step_cache_skips_all_lists_but_the_first_block():
    from backend.catalog.family import CachedBlocks

    streams = ("encoder_hidden_states", "hidden_states")
    family = family_of(CACHED_BLOCKS=(CachedBlocks("pairs", streams), CachedBlocks("singles", streams)))
    network = TwoLists()
    cache, x = StepCache(family, network, 0.1), torch.ones(1, 4, 3)
    with cache.step():
        first = network(x)
    with cache.step():
        again = network(x)
    with cache.step("negative"):
        other = network(x)
    for one, same in zip(first, again, strict=True):
        torch.testing.assert_close(one, same)
    assert [block.calls for block in (*network.pairs, *network.singles)] == [3, 2, 2, 2, 2]
    assert (cache.num_calls, cache.num_skipped) == (3, 1) and torch.equal(first[1], other[1])
    with cache.step():
        network(x * 9)  # far from it: computed whole
    assert network.singles[2].calls == 3
