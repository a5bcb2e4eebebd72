"""The LoRA tab as people use it: look, use, train again, correct, convert, throw away."""

from __future__ import annotations

import json

import pytest

from studio.state import saved_forms
from studio.train import dataset_captions
from tests.browser.conftest import Held, tab, wait_until
from tests.browser.lora_pictures import choose
from tests.studio.models.test_cards import MADE_HERE, lora_tensors, write_safetensors

pytestmark = pytest.mark.browser


def test_a_lora_from_its_card_to_the_trash(painted, open_page):
    folder = painted.places.loras
    said = MADE_HERE | {"trigger": "zorkish", "config": json.dumps({"learning_rate": 0.00075, "lora_rank": 2})}
    tensors = lora_tensors() | {name.replace("to_q", "add_q_proj"): value for name, value in lora_tensors().items()}
    source = write_safetensors(folder / "walnut.safetensors", tensors, said)
    page = open_page(painted)
    tab(page, "LoRAs and models")
    page.locator("#lora-search textarea, #lora-search input").first.fill("walnut")
    card = page.locator("#lora-cards button.card", has_text="walnut")
    card.click()
    page.wait_for_selector("#lora-details .bars")
    details = page.inner_text("#lora-details")
    assert "zorkish" in details and "0.00075" in details and "Qwen-Image" in details

    choose(page, "#lora-family", "FLUX.1")
    page.wait_for_selector("#lora-details .notice.warn >> text=FLUX.1")
    choose(page, "#lora-family", "As recognised")
    page.wait_for_selector("#lora-details .notice.good")

    page.locator("#tools-fold > button").click()
    choose(page, "#tool-file", "walnut")
    page.locator("#tool-layout label", has_text="kohya").click()
    page.locator("#tool-out textarea, #tool-out input").first.fill("walnut-kohya")
    page.locator("#tool-run").click()
    wait_until(
        lambda: page.wait_for_timeout(200) or (folder / "walnut-kohya.safetensors").exists(), what="the converted file"
    )
    page.wait_for_selector("#tool-state .notice.good >> text=modules written and read back")
    page.wait_for_selector("#lora-cards button.card >> text=walnut-kohya")  # the list is read again by itself

    page.locator("#lora-use").click()
    page.wait_for_selector("#lora-file-0 input >> visible=true")
    assert "walnut" in page.input_value("#lora-file-0 input")
    wait_until(
        lambda: page.wait_for_timeout(100) or "zorkish" in page.input_value("#set-prompt textarea"),
        what="the trigger word",
    )

    tab(page, "LoRAs and models")
    held = Held(page, str(dataset_captions.shipped()[0]))
    page.locator("#lora-again").click()
    held.wait()
    tab(page, "Train")
    page.fill("#set-name :is(input, textarea)", "typed meanwhile")
    held.let_go()
    page.wait_for_selector("#train-said >> text=walnut", state="attached")
    page.wait_for_function("document.querySelector('#set-learning_rate input').value === '0.00075'")
    assert page.input_value("#set-name :is(input, textarea)") == "typed meanwhile"
    kept = saved_forms.training_file(painted.places)
    wait_until(
        lambda: (
            saved_forms.read_values(kept)
            == saved_forms.read_values(kept) | {"name": "typed meanwhile", "learning_rate": 0.00075, "lora_rank": 2}
        )
    )
    tab(page, "LoRAs and models")
    page.locator("#lora-discard").click()
    page.wait_for_selector("#lora-said .notice >> text=trash")
    assert not source.exists() and (painted.places.trash / "walnut.safetensors").is_file()
