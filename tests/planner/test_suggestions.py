"""What is advised for a job that does not fit makes it fit, says so in the words of its machine, and is the least that does. No torch."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from backend.planner import suggestions
from backend.planner.costs.device_speed import what_if
from backend.planner.costs.model_sizes import known_models, sizes_of
from backend.planner.plan import plan
from backend.planner.workload import work_of_defaults
from backend.schema.memory_plan import GIB, Card
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig

OF_A_CARD = re.compile(r"\b(card|VRAM|GPU|video memory)\b", re.IGNORECASE)


def machine(numbers: random.Random) -> Card:
    """A card, free or in use, or a machine without one."""
    ram = numbers.choice((8, 16, 32, 64, 128))
    card = what_if(f"{numbers.choice((2, 3, 4, 6, 8, 10, 12, 16, 24, 48))}GiB", ram_gib=ram)[0]
    if numbers.random() < 0.3:
        others = int(numbers.random() * 0.5 * card.total_bytes)
        card = replace(card, used_by_others_bytes=others, free_bytes=card.total_bytes - others)
    if numbers.random() < 0.15:
        total, free = card.ram_total_bytes, card.ram_free_bytes
        card = replace(card, device="cpu", name="a processor", total_bytes=total, free_bytes=free)
        card = replace(card, used_by_others_bytes=0)
    return card


def job_of(numbers: random.Random, sizes):
    choose = numbers.choice
    if numbers.random() < 0.25:
        frames = {"frames": choose((17, 81, 121))} if sizes.geometry.get("video") else {}
        return work_of_defaults(sizes, width=choose((512, 1024, 2048, 3072)), height=choose((512, 1024)), **frames)
    if numbers.random() < 0.33:
        return GenerationRequest(
            prompt="an apple " * choose((1, 400)),
            width=choose((512, 1024, 2048, 4096)),
            height=choose((512, 1024, 2048)),
            guidance=choose((1.0, 4.0)),
            step_cache=choose((0.0, 0.1)),
        )
    values = {
        "lora_rank": choose((4, 16, 32, 64, 256, 512)),
        "lora_alpha": choose((None, 32.0)),
        "batch_size": choose((1, 2, 3, 4, 8)),
        "max_pixels": choose((512, 1024, 1328, 1536)) ** 2,
        "lora_target_modules": choose(("", "attention", "all-linear")),
        "sample_prompts": choose(("", "an apple")),
        "customized_optimizer": choose(("adamw", "prodigy", "lion")),
        "ema_decay": choose((0.0, 0.99)),
    }
    if numbers.random() < 0.25:
        values["trainable_models"] = "dit"
    elif numbers.random() < 0.2:
        values["quant_options"] = "Qwen/X:transformer/a*.safetensors:bitsandbytes_nf4"
    return from_values(TrainingConfig, values)


def red_plans(count: int, seed: int):
    numbers = random.Random(seed)
    while count:
        sizes, card = sizes_of(numbers.choice(known_models())), machine(numbers)
        allowed = {name: numbers.random() < 0.7 for name in suggestions.PREFERENCES}
        state = suggestions.State(job_of(numbers, sizes), Preferences(**allowed), card)
        found = plan(sizes, card, state.job, state.preferences)
        if found.verdict != "green":
            count -= 1
            yield sizes, state, found


def test_what_is_advised_for_300_plans_that_do_not_fit_makes_each_fit():
    kinds = set()
    for sizes, state, found in red_plans(300, seed=20):
        helps = found.remedy
        assert "are missing in the phase" in found.advice
        if helps is None:
            assert "would be" in found.advice
            larger = suggestions.of_size(state.card, 1024.0 if state.card.device == "cpu" else 288.0)
            assert plan(sizes, larger, state.job, state.preferences).verdict != "green", found.advice
            continue
        assert all(word in found.advice for word in helps.words)
        after = suggestions.applied(state, helps)
        again = plan(sizes, after.card, after.job, after.preferences)
        assert again.verdict == "green" and not again.advice and again.remedy is None, (found.advice, again.advice)
        if state.card.device == "cpu":
            assert not OF_A_CARD.search(found.advice), found.advice
        kinds |= {*helps.settings, *helps.preferences, *(["card"] if helps.card_gib else [])}
    assert kinds >= {"lora_rank", "batch_size", "max_pixels", "width", "trainable_models", "allow_tiles", "card"}


def advised(model: str, gib: float, ram: float = 64.0, preferences: Preferences | None = None, card=None, **values):
    card = card or what_if(f"{gib}GiB", ram_gib=ram)[0]
    return plan(model, card, from_values(TrainingConfig, values), preferences).remedy


def test_the_least_loss_is_named_first():
    attention = {"lora_target_modules": "attention", "max_pixels": 1328**2}
    assert 4 <= advised("Qwen-Image", 6, lora_rank=256, **attention).settings["lora_rank"] < 256
    assert advised("Qwen-Image", 24, trainable_models="dit", max_pixels=1328**2).settings["trainable_models"] == ""
    batch = advised("Qwen-Image", 12, lora_rank=16, batch_size=8, **attention)
    assert batch.settings["batch_size"] * batch.settings["gradient_accumulation_steps"] == 8
    half = what_if("8GiB")[0]
    half = replace(half, used_by_others_bytes=5 * GIB, free_bytes=3 * GIB)
    assert 0 < advised("Qwen-Image", 8, card=half, lora_rank=16, **attention).freed_bytes <= 5 * GIB
    exact = Preferences(allow_tiles=False)
    tiles = plan("Wan2.2-TI2V-5B", what_if("12GiB")[0], work_of_defaults(sizes_of("Wan2.2-TI2V-5B")), exact)
    assert tiles.remedy.preferences == {"allow_tiles": True}


def test_one_step_less_would_not_do():
    found = advised("Qwen-Image", 6, lora_rank=256, lora_target_modules="attention", max_pixels=1024**2)
    rank = found.settings["lora_rank"]
    card = what_if("6GiB")[0]
    more = {"lora_rank": 2 * rank, "lora_target_modules": "attention", "max_pixels": 1024**2}
    assert plan("Qwen-Image", card, from_values(TrainingConfig, more)).verdict != "green"
    wide = GenerationRequest(width=8192, height=4096, guidance=1.0)
    size = plan("FLUX.1-dev", what_if("8GiB")[0], wide, Preferences(allow_tiles=False)).remedy
    if not size.settings:
        pytest.skip("tiles would do")
    assert size.settings["width"] / size.settings["height"] == pytest.approx(2, rel=0.05)


def test_the_smallest_machine_is_the_first_that_fits():
    config = from_values(TrainingConfig, {"lora_rank": 256, "batch_size": 4})
    state = suggestions.State(config, Preferences(), what_if("80GiB")[0])
    sizes = sizes_of("Qwen-Image")

    def fits(state: suggestions.State) -> bool:
        return plan(sizes, state.card, state.job, state.preferences).verdict == "green"

    gib = suggestions.smallest(state, fits)
    smaller = max(one for one in suggestions.CARDS_GIB if one < gib)
    assert fits(replace(state, card=suggestions.of_size(state.card, gib)))
    assert not fits(replace(state, card=suggestions.of_size(state.card, smaller)))
