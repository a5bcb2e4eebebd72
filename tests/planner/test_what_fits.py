"""What is answered besides a plan is true: the largest fits and the next does not, the smallest machine is the smallest. No torch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from backend.commands.plan import main
from backend.planner import suggestions, what_fits
from backend.planner.costs.device_speed import what_if
from backend.planner.costs.model_sizes import known_models, sizes_of
from backend.planner.plan import answers_here, fixed_of, plan, surely_fits
from backend.schema.memory_plan import GIB, Remedy
from backend.schema.paths import ASSETS
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig


def asked(state: suggestions.State, sizes, **more) -> dict[str, what_fits.Answer]:
    found = plan(sizes, state.card, state.job, state.preferences)
    fixed = fixed_of(state.card)
    told = what_fits.answers(
        sizes,
        state,
        found,
        lambda state: surely_fits(sizes, state, fixed=fixed),
        plan_of=lambda state: plan(sizes, state.card, state.job, state.preferences),
        **more,
    )
    return {one.about: one for one in told}


def states(count: int):
    numbers = random.Random(4)
    for _ in range(count):
        card = what_if(f"{numbers.choice((6, 8, 12, 24, 48))}GiB", ram_gib=numbers.choice((16, 32, 64)))[0]
        if numbers.random() < 0.2:
            card = what_if("cpu", ram_gib=32)[0]
        if numbers.random() < 0.4:
            job = GenerationRequest(width=numbers.choice((512, 1024)), height=1024, guidance=numbers.choice((1.0, 4.0)))
        else:
            values = {"lora_rank": numbers.choice((8, 64)), "max_pixels": numbers.choice((512, 1024)) ** 2}
            job = from_values(TrainingConfig, values)
        yield sizes_of(numbers.choice(known_models())), suggestions.State(job, Preferences(), card)


def test_the_largest_fits_and_the_next_does_not():
    def verdict(sizes, state, settings) -> str:
        after = suggestions.applied(state, Remedy((), settings))
        return plan(sizes, after.card, after.job, after.preferences).verdict

    seen = set()
    for sizes, state in states(25):
        told = asked(state, sizes)
        for about, knob, most in (("batch", "batch_size", what_fits.MOST_BATCH), ("rank", "lora_rank", 4096)):
            if about not in told or not told[about].settings:
                continue
            best = told[about].settings[knob]
            seen.add(about)
            assert verdict(sizes, state, {knob: best}) == "green"
            assert best == most or verdict(sizes, state, {knob: best + 1}) != "green"
        if told["picture"].settings:
            assert verdict(sizes, state, told["picture"].settings) == "green"
            wider = {name: value * 1.1 for name, value in told["picture"].settings.items() if name != "max_pixels"}
            wider = {name: int(value) // 16 * 16 + 16 for name, value in wider.items()}
            if wider and max(wider.values()) < what_fits.LARGEST_SIDE:
                seen.add("picture")
                assert verdict(sizes, state, wider) != "green"
        gib = told["machine"].settings["gib"]
        ladder = suggestions.RAM_GIB if state.card.device == "cpu" else suggestions.CARDS_GIB
        smaller = max((one for one in ladder if gib and one < gib), default=None)
        if gib:
            card = suggestions.of_size(state.card, gib)
            assert plan(sizes, card, state.job).verdict == "green"
        if smaller:
            seen.add("machine")
            assert plan(sizes, suggestions.of_size(state.card, smaller), state.job).verdict != "green"
    assert seen == {"picture", "batch", "rank", "machine"}


def test_more_free_memory_is_planned_for_whoever_held_it():
    sizes, card = sizes_of("FLUX.1-dev"), what_if("24GiB")[0]
    card = replace(card, used_by_others_bytes=22 * GIB, free_bytes=2 * GIB)
    state = suggestions.State(GenerationRequest(width=2048, height=2048, guidance=1.0), Preferences(), card)
    assert plan(sizes, card, state.job).verdict == "red"
    assert "does not fit" in asked(state, sizes, more_gib=0.1)["more"].words
    assert (
        "With 10 GiB more free it fits (without them it does not fit)" in asked(state, sizes, more_gib=10)["more"].words
    )
    all_of_it = what_fits.with_more(card, 30)
    assert all_of_it.total_bytes == 32 * GIB and all_of_it.used_by_others_bytes == 0


def test_disk_that_is_needed_is_held_against_what_is_free():
    sizes = sizes_of("Qwen-Image")
    state = suggestions.State(from_values(TrainingConfig, {"lora_rank": 16}), Preferences(), what_if("48GiB")[0])
    told = asked(state, sizes, disk_free=(10 * GIB, "here"))["disk"]
    assert (
        told.settings["bytes"] > sizes.file_bytes
        and "are missing" in told.words
        and "10.0 GiB are free in here" in told.words
    )
    assert "missing" not in asked(state, sizes, disk_free=(10**13, "here"))["disk"].words


def test_without_a_card_nothing_speaks_of_one(tmp_path):
    job, card = GenerationRequest(width=512, height=512), what_if("cpu", ram_gib=16)[0]
    told = answers_here("Qwen-Image", card, job, None, user=tmp_path, more_gib=2.0)
    words = " ".join(one.words for one in told)
    assert "card" not in words and "Least RAM" in words and "GiB of RAM more free" in words


@pytest.mark.parametrize("wrong", ["-1", "0", "much", "nan"])
def test_an_amount_that_cannot_be_is_one_sentence(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["FLUX.1-dev", f"--free={wrong}"])
    assert ended.value.code == 2 and f"--free is {wrong!r}" in capsys.readouterr().err


def test_seconds_are_those_of_the_epochs_on_this_dataset(capsys):
    flags = ["Qwen-Image", "--card", "24GiB", "--train", "--lora_rank", "16"]
    data = ["--dataset_base_path", str(ASSETS / "datasets" / "style")]
    for more, words in (
        ([*data, "--num_epochs", "2"], "The whole run of 2 epochs, "),
        ([*data, "--max_steps", "32"], "The whole run, 32 steps, takes"),
        ([], "A thousand steps take"),
    ):
        main([*flags, *more])
        assert words in capsys.readouterr().out
    main([*flags, "--dataset_base_path", "nowhere/at/all"])
    assert "The dataset is left out" in capsys.readouterr().err


def test_the_command_answers(capsys):
    main(["Wan2.1-T2V-1.3B", "--card", "rtx3060", "--free", "1.2"])
    said = capsys.readouterr().out
    for words in (
        "Largest picture",
        "Smallest card on which this runs",
        "With 1.2 GiB more free",
        "are free in",
        "25.5 TFLOP/s of the RTX 3060",
    ):
        assert words in said


def test_flags_of_a_trainer_for_a_model_that_it_does_not_train_are_not_left_alone(capsys):
    with pytest.raises(SystemExit):
        main(["Wan2.1-T2V-1.3B", "--card", "24GiB", "--train", "--lora_rank", "16"])
    assert "Wan2.1-T2V-1.3B cannot be trained here" in capsys.readouterr().err
    main(["Qwen-Image", "--card", "24GiB", "--train", "--lora_rank", "16"])
    assert not capsys.readouterr().err
