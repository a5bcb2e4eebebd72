"""The Train tab in a browser, with the starter model, the real trainer and the real worker."""

from __future__ import annotations

import json

import pytest
from PIL import Image, ImageChops, ImageStat

from backend.host.runs import runs
from backend.schema.paths import ASSETS
from studio.state import saved_forms
from tests.browser.conftest import Held, Site, tab, text_below, wait_ready, wait_until

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
        choose(page, folder)
    return page


@pytest.fixture
def page(site, kept_page):
    """The Train tab of a page whose form holds whatever the tests before have left."""
    opened = kept_page(site)
    tab(opened, "Train")
    opened.wait_for_selector("#run-head :is(.run-head, .stage)")
    yield opened
    kept_page.check()


def unfold(page, fold: str) -> None:
    if not page.locator(f"{fold} button.label-wrap.open").count():
        page.click(f"{fold} button.label-wrap >> nth=0")


def choose(page, folder) -> None:
    """Writes a set's folder, and goes on at once: the answer may come late."""
    field = page.locator("#set-dataset_base_path input")
    field.fill(str(folder))
    field.press("Enter")


def kept(site: Site) -> dict:
    """The training form as it would come back."""
    return saved_forms.read_values(saved_forms.training_file(site.places))


def keeps(site: Site, **wanted) -> None:
    """Waits until the form that would come back has these settings."""
    wait_until(lambda: {name: kept(site).get(name) for name in wanted} == wanted, what=f"{wanted} to be kept")


def small_run(site: Site, page, folder, *, name: str, steps: int) -> None:
    """The least that the trainer can be asked for, typed into the form right after the choice of `folder`."""
    wanted = {"name": name, "lora_rank": 2, "learning_rate": 0.001, "max_steps": steps}
    for setting, value in wanted.items():
        put(page, setting, value)
    page.fill("#set-sample_prompts textarea", "")
    keeps(site, dataset_base_path=str(folder), **wanted)
    assert "sample_prompts" not in kept(site)


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


def test_what_cannot_be_trained_is_told_in_a_sentence(site, page, tmp_path):
    choose(page, tmp_path)
    page.click("#train-start")
    page.wait_for_selector("#train-said .notice.bad >> text=There are no pictures in")
    put(page, "lora_rank", 0)
    wait_until(lambda: page.wait_for_timeout(50) or text_below(page, "#set-lora_rank") == "Rank is 0; the least is 1.")
    page.click("#train-start")
    page.wait_for_selector("#train-said .notice.bad >> text=Rank")
    assert "the least is 1" in page.inner_text("#train-said")
    assert not list(site.places.runs.glob("*"))
    put(page, "lora_rank", 8)
    keeps(site, lora_rank=8)


OPEN_FOLDS = """() => document.querySelectorAll('.left .fold button.label-wrap:not(.open)').forEach(
    (button) => button.offsetParent && button.click())"""


def test_what_the_trainer_would_refuse_is_said_at_its_field_before_the_start(site, page, tiny_set):
    """By the model's headers, for values that are fine as such; gone when the value is."""
    choose(page, tiny_set)
    page.wait_for_selector("#train-plan .plan")
    for setting, value, words in (
        ("lora_target_modules", "to_qq", "No module of dit is called 'to_qq'. There are "),
        ("quant_options", "dit:int3", "There is no quantization method 'int3'"),
        ("customized_optimizer", "adamww", "There is no optimizer called 'adamww'."),
    ):
        field = page.locator(f"#set-{setting} :is(input, textarea)").first
        while not field.is_visible():  # a fold, and the fold inside
            page.evaluate(OPEN_FOLDS)
            page.wait_for_timeout(1000)
        field.fill(value)
        wait_until(lambda: page.wait_for_timeout(50) or text_below(page, f"#set-{setting}").startswith(words))  # noqa: B023
        page.wait_for_selector("#train-plan .pill.bad >> text=Not so")
        page.click("#train-start")
        beginning = words.partition("'")[0].strip()
        page.wait_for_selector(f"#train-said .notice.bad >> text={beginning}")
        field.fill("adamw" if setting == "customized_optimizer" else "")
        wait_until(lambda: page.wait_for_timeout(50) or not text_below(page, f"#set-{setting}"))  # noqa: B023
    assert not list(site.places.runs.glob("*"))


def test_what_is_typed_while_a_set_answers_stays(site, page):
    style = ASSETS / "datasets" / "style"
    put(page, "trigger_word", "old word")
    keeps(site, trigger_word="old word")
    held = Held(page, f'{{"data":["{style}"')
    choose(page, style)
    held.wait()
    put(page, "name", "my own name")
    put(page, "lora_rank", 3)
    held.let_go()
    page.wait_for_function(
        "document.querySelector('#set-trigger_word input, #set-trigger_word textarea').value === 'neon style'"
    )
    keeps(site, dataset_base_path=str(style), name="my own name", lora_rank=3, trigger_word="neon style")
    assert page.input_value("#set-name :is(input, textarea)") == "my own name"


def test_captions_of_a_shipped_set_are_edited_in_a_copy(site, page):
    page.click("#set-dataset_base_path input")
    page.click("#set-dataset_base_path ul li >> text=character (comes with Loft)")
    unfold(page, "#captions-fold")
    page.wait_for_selector(f"#editor [data-set='{ASSETS / 'datasets' / 'character'}']")
    first, second = (page.locator("#editor textarea").nth(i) for i in (0, 1))
    original = first.input_value()
    first.fill("my own words")
    held = Held(page, "my own words")
    page.click("#editor >> text=Save captions")
    held.wait()
    second.fill("typed while it was saved")
    held.let_go()
    page.wait_for_selector("#dataset-said >> text=1 caption saved")
    (copy,) = site.places.datasets.glob("*")
    page.wait_for_selector(f"#editor [data-set='{copy}']")
    assert second.input_value() == "typed while it was saved"
    assert "my own words" in " ".join(path.read_text() for path in copy.glob("*.txt"))
    assert original in " ".join(path.read_text() for path in (copy / "captions-before").rglob("*.txt"))
    keeps(site, dataset_base_path=str(copy))
    page.click("#editor >> text=Save captions")
    wait_until(lambda: "typed while it was saved" in " ".join(path.read_text() for path in copy.glob("*.txt")))
    first.fill("not saved yet")
    page.click("#editor >> text=Undo")
    page.wait_for_selector("#dataset-said >> text=1 caption as before the last save")
    page.wait_for_function("document.querySelectorAll('#editor textarea')[1].value !== 'typed while it was saved'")
    assert first.input_value() == "not saved yet"
    assert "typed while it was saved" not in " ".join(path.read_text() for path in copy.glob("*.txt"))


def test_uploaded_pictures_become_a_set_that_is_chosen(site, page, tiny_set):
    unfold(page, "#upload-fold")
    page.fill("#upload-name :is(input, textarea)", "my squares")
    page.set_input_files("#upload-files input[type=file]", sorted(tiny_set.iterdir()))
    page.wait_for_selector("#dataset-said .notice.good >> text=2 pictures, 2 with a caption")
    made = site.places.datasets / "my squares"
    assert sorted(path.name for path in made.iterdir()) == ["one.png", "one.txt", "two.png", "two.txt"]
    keeps(site, dataset_base_path=str(made))
    unfold(page, "#captions-fold")
    page.wait_for_selector(f"#editor [data-set='{made}']")
    assert page.locator("#editor textarea").first.input_value() == "zork, a red square"


def test_a_broken_lora_file_is_shown_with_its_reason(site, page):
    site.places.loras.mkdir(exist_ok=True)
    (site.places.loras / "broken.safetensors").write_bytes(b"\xff" * 64)
    tab(page, "LoRAs and models")
    page.wait_for_selector("#lora-cards .card.broken >> text=broken.safetensors")
    assert len(page.inner_text("#lora-cards .card.broken span.card-text span")) > 20


def test_a_lora_is_trained_through_the_form_and_used(site, open_page, tiny_set):
    page = open_train(site, open_page, tiny_set)
    small_run(site, page, tiny_set, name="probe", steps=4)
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


def test_a_picture_starts_from_another_and_its_strength_is_heard(site, open_page):
    page = open_page(site)
    made = {}
    for name, strength in (("start", None), ("near", 0.1), ("far", 1.0)):
        before = set(site.places.outputs.rglob("*.png"))
        page.fill("#set-prompt textarea", "a red apple" if name == "start" else "a blue car")
        put(page, "num_inference_steps", 4)
        if strength is not None:
            put(page, "denoising_strength", strength)
        page.click("#generate")
        (made[name],) = wait_until(lambda seen=before: set(site.places.outputs.rglob("*.png")) - seen, SLOW_SECONDS)
        if name == "start":
            page.wait_for_selector("#stage img[alt='a red apple']")
            page.click("text=Start from this picture")
            page.wait_for_selector("#start-picture img")
    page.wait_for_selector("#receipt >> text=strength 1")
    assert json.loads(Image.open(made["near"]).info["loft"])["request"]["denoising_strength"] == 0.1
    near, far = (
        ImageChops.difference(*(Image.open(made[n]).convert("RGB") for n in ("start", name)))
        for name in ("near", "far")
    )
    assert sum(ImageStat.Stat(near).mean) * 2 < sum(ImageStat.Stat(far).mean)


def test_a_run_outlives_the_studio_and_can_be_stopped_resumed_and_ended(site, open_page, tiny_set):
    page = open_train(site, open_page, tiny_set)
    small_run(site, page, tiny_set, name="long", steps=100000)
    page.click("#train-start")
    beyond(site, "long", 0)
    site.kill()
    before = only_run(site, "long")
    assert before.live
    page.evaluate("window.same = true")
    site.start()
    page.wait_for_function(
        "window.same === undefined && document.querySelector('#run-head h2')?.textContent === 'long'"
    )
    beyond(site, "long", before.step)
    page.click("#run-stop")
    reaches(page, "stopped")
    stopped = only_run(site, "long").step
    page.click("#run-resume")
    beyond(site, "long", stopped)
    page.click("#run-kill")
    reaches(page, "stopped")
    assert not only_run(site, "long").live
