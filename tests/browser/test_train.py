"""The Train tab in a browser, with the starter model, the real trainer and the real worker."""

from __future__ import annotations

import json
import time

import pytest
from PIL import Image

from backend.host import runs
from tests.browser.conftest import Site, tab, wait_ready, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.torch, pytest.mark.slow]
STATUS = "#run-head .pill"
SLOW_SECONDS = 240


@pytest.fixture(scope="module")
def site(chromium, tmp_path_factory):
    made = Site(tmp_path_factory.mktemp("train"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def tiny_set(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures") / "tiny"
    folder.mkdir()
    for name, colour in (("one", "red"), ("two", "blue")):
        Image.new("RGB", (64, 64), colour).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"zork, a {colour} square")
    return folder


ANSWER_MS = 2000  # the set's choice is kept before the page has drawn its captions


def put(page, name: str, value: object) -> None:
    field = page.locator(f"#set-{name} input, #set-{name} textarea").first
    field.fill(str(value))
    field.press("Tab")


def open_train(site: Site, open_page, folder=None):
    """The Train tab; on `folder` with settings that take the least time, and the rest left to the form."""
    if folder is not None:
        site.places.user.mkdir(exist_ok=True)
        (site.places.user / "training.json").write_text(json.dumps({"max_pixels": 4096, "mixed_precision": "no"}))
    page = open_page(site)
    tab(page, "Train")
    page.wait_for_selector("#run-head :is(.run-head, .stage)")
    if folder is not None:
        field = page.locator("#set-dataset_base_path input")
        field.fill(str(folder))
        field.press("Enter")
        wait_until(lambda: kept(site).get("dataset_base_path") == str(folder), what="the form to be kept")
        page.wait_for_timeout(ANSWER_MS)
    return page


def kept(site: Site) -> dict:
    """The training form as it would come back."""
    return json.loads((site.places.user / "training.json").read_text())


def small_run(site: Site, page, *, name: str, steps: int) -> None:
    """The least that the trainer can be asked for, filled into the form."""
    wanted = {"name": name, "lora_rank": 2, "learning_rate": 0.001, "max_steps": steps}

    def is_kept() -> bool:
        return {setting: kept(site).get(setting) for setting in wanted} == wanted

    for _ in range(5):  # the answer to the set's choice may still be on its way, and fills the form once more
        for setting, value in wanted.items():
            put(page, setting, value)
        page.fill("#set-sample_prompts textarea", "")
        end = time.monotonic() + 6
        while not is_kept() and time.monotonic() < end:
            page.wait_for_timeout(100)
        if is_kept():
            return
    raise AssertionError(f"the form keeps {kept(site)}, not {wanted}")


def only_run(site: Site, name: str) -> runs.Run | None:
    return next((run for run in runs.list_runs(site.places) if run.name.endswith(name)), None)


def beyond(site: Site, name: str, step: int) -> None:
    """Waits until the run called `name` is past `step`."""

    def is_beyond() -> bool:
        run = only_run(site, name)
        return run is not None and run.step > step

    wait_until(is_beyond, SLOW_SECONDS, f"a step after {step}")


def reaches(page, status: str) -> None:
    page.wait_for_selector(f"{STATUS} >> text={status}", timeout=SLOW_SECONDS * 1000)


def test_what_cannot_be_trained_is_told_in_a_sentence(site, open_page, tiny_set, tmp_path):
    page = open_train(site, open_page, tmp_path)
    page.click("#train-start")
    page.wait_for_selector("#train-said .notice.bad >> text=There are no pictures in")
    put(page, "lora_rank", 0)
    page.click("#train-start")
    page.wait_for_selector("#train-said .notice.bad >> text=Rank")
    assert "the least is 1" in page.inner_text("#train-said")
    assert not list(site.places.runs.glob("*"))


def test_a_lora_is_trained_through_the_form_and_used(site, open_page, tiny_set):
    page = open_train(site, open_page, tiny_set)
    small_run(site, page, name="probe", steps=4)
    page.click("#train-start")
    page.wait_for_selector("#run-head >> text=probe")
    page.reload()
    wait_ready(page)
    page.wait_for_selector("#run-head h2 >> text=probe")
    second = open_train(site, open_page)
    second.wait_for_selector("#run-head h2 >> text=probe")
    reaches(page, "complete")
    reaches(second, "complete")
    assert "4 of 4" in page.inner_text("#run-head")
    page.wait_for_selector("#run-curve svg")
    page.click("#run-use")
    page.wait_for_selector("#lora-file-0 input >> visible=true")
    assert "probe" in page.input_value("#lora-file-0 input")
    page.fill("#set-prompt textarea", "zork")
    put(page, "num_inference_steps", 2)
    page.click("#generate")
    page.wait_for_selector("#receipt .use", timeout=SLOW_SECONDS * 1000)
    said = page.inner_text("#receipt .use")
    assert "strength 1" in said and " of " in said and " 0 of" not in said
    assert only_run(site, "probe").saved


def test_a_run_outlives_the_studio_and_can_be_stopped_resumed_and_ended(site, open_page, tiny_set):
    page = open_train(site, open_page, tiny_set)
    small_run(site, page, name="long", steps=100000)
    page.click("#train-start")
    beyond(site, "long", 0)
    site.kill()
    before = only_run(site, "long")
    assert before.live
    site.start()
    page = open_train(site, open_page)
    page.wait_for_selector("#run-head h2 >> text=long")
    beyond(site, "long", before.step)
    page.click("#run-stop")
    reaches(page, "stopped")
    stopped = only_run(site, "long").step
    page.click("#run-resume")
    beyond(site, "long", stopped)
    page.click("#run-kill")
    reaches(page, "stopped")
    assert not only_run(site, "long").live


def test_captions_of_a_shipped_set_are_edited_in_a_copy(site, open_page):
    page = open_train(site, open_page)
    page.click("#set-dataset_base_path input")
    page.click("#set-dataset_base_path ul li >> text=character (comes with Loft)")
    wait_until(lambda: "character" in kept(site).get("dataset_base_path", ""), what="the form to be kept")
    page.wait_for_timeout(ANSWER_MS)
    page.click("#captions-fold button >> nth=0")
    field = page.locator("#editor textarea").first
    original = field.input_value()
    field.fill("my own words")
    page.click("#editor >> text=Save captions")
    page.wait_for_selector("#dataset-said >> text=1 caption saved")
    copies = list(site.places.datasets.glob("*"))
    assert len(copies) == 1 and "my own words" in " ".join(path.read_text() for path in copies[0].glob("*.txt"))
    assert kept(site)["dataset_base_path"] == str(copies[0])
    assert original in " ".join(path.read_text() for path in (copies[0] / "captions-before").rglob("*.txt"))


def test_a_broken_lora_file_is_shown_with_its_reason(site, open_page):
    site.places.loras.mkdir(exist_ok=True)
    (site.places.loras / "broken.safetensors").write_bytes(b"\xff" * 64)
    page = open_page(site)
    tab(page, "LoRAs and models")
    page.wait_for_selector("#lora-cards .card.broken >> text=broken.safetensors")
    assert len(page.inner_text("#lora-cards .card.broken span.card-text span")) > 20
