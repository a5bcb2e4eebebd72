"""The Generate tab in a browser, with the worker that paints gradients."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse

import pytest
from PIL import Image, PngImagePlugin

from studio.state import saved_forms
from tests.browser.conftest import Held, Site, drop, end_process, tab, text_below, wait_ready, wait_until

pytestmark = pytest.mark.browser


@pytest.fixture
def site(painted):
    """The studio with an untouched form."""
    (painted.places.user / "request.json").unlink(missing_ok=True)
    return painted


@pytest.fixture
def page(site, kept_page):
    """A page whose form holds whatever the tests before have left."""
    opened = kept_page(site)
    tab(opened, "Generate")
    yield opened
    kept_page.check()


def open_settings(page) -> None:
    """Opens the fold that takes a picture's settings, and clears what it took before."""
    if not page.locator("#settings-from button.label-wrap.open").count():
        page.click("#settings-from button.label-wrap")
    taken = page.locator("#drop-png button[aria-label='Clear']")
    if taken.count():
        taken.click()
    page.wait_for_selector("#drop-png input[type=file]", state="attached")


def pictures(site: Site) -> list:
    return sorted(site.places.outputs.rglob("*.png"))


def ask(page, prompt: str, *, steps: int = 4, count: int = 1) -> None:
    page.fill("#set-prompt textarea", prompt)
    page.fill("#set-count input", str(count))
    page.fill("#set-num_inference_steps input[type=number]", str(steps))
    page.press("#set-num_inference_steps input[type=number]", "Enter")
    page.click("#generate")


def test_a_picture_is_made_shown_and_explained(site, page):
    before = len(pictures(site))
    ask(page, "a red apple")
    wait_until(lambda: len(pictures(site)) == before + 1)
    page.wait_for_selector("#stage img[alt='a red apple']")
    receipt = page.inner_text("#receipt")
    assert "a red apple" in receipt and "128 × 128" in receipt
    newest = max(pictures(site), key=lambda path: path.stat().st_mtime)
    kept = json.loads(Image.open(newest).info["loft"])
    assert kept["request"]["prompt"] == "a red apple" and str(kept["seed"]) in receipt


def test_the_gallery_and_the_form_survive_a_reload(site, page):
    for prompt in ("a green leaf", "a blue sky"):
        before = len(pictures(site))
        ask(page, prompt)
        wait_until(lambda n=before: len(pictures(site)) == n + 1)
    page.wait_for_selector("#stage img[alt='a blue sky']")
    page.click("#thumbs .thumb >> nth=1")
    page.wait_for_selector("#stage img[alt='a green leaf']")
    page.click("#settings-from button.label-wrap")
    wait_until(lambda: "Settings from a picture" in (page.evaluate("localStorage.getItem('loft-folds')") or ""))
    page.reload()
    wait_ready(page)
    page.wait_for_selector("#stage img[alt='a green leaf']")
    page.wait_for_selector("#settings-from button.label-wrap.open")
    assert page.locator("#thumbs .thumb").count() == len(pictures(site))
    assert page.input_value("#set-prompt textarea") == "a blue sky"


def test_cancel_ends_the_picture_and_a_reload_in_between_changes_nothing(site, page, open_page):
    before = len(pictures(site))
    ask(page, "a long wait", steps=200, count=64)
    page.wait_for_selector("#progress .work >> text=Generating")
    page.reload()
    wait_ready(page)
    page.wait_for_selector("#progress .work >> text=Generating")
    assert page.input_value("#set-prompt textarea") == "a long wait"
    other = open_page(site)
    other.wait_for_selector("#progress .work >> text=Generating")
    page.click("#cancel")
    page.wait_for_selector("#progress .work", state="detached")
    other.wait_for_selector("#progress .work", state="detached")
    assert len(pictures(site)) < before + 64


def test_a_killed_worker_is_told_in_a_sentence_and_the_next_picture_is_made(site, page):
    ask(page, "a short life", steps=200)
    page.wait_for_selector("#progress .work >> text=Generating")
    end_process(site.worker_pid())
    page.wait_for_selector("#progress .notice.bad")
    assert "engine" in page.inner_text("#progress .notice.bad").lower()
    before = len(pictures(site))
    ask(page, "a second life")
    wait_until(lambda: len(pictures(site)) == before + 1)
    page.wait_for_selector("#stage img[alt='a second life']")
    assert "a short life" in page.inner_text("#progress .failed .notice.bad"), "a later success does not take it away"
    page.click("#progress .failed >> text=Dismiss")
    page.wait_for_selector("#progress .notice.bad", state="detached")


def test_a_dropped_picture_fills_the_form_and_names_what_is_missing(site, page, tmp_path):
    request = {
        "model": "nobody/nothing",
        "prompt": "a dropped picture",
        "negative_prompt": "",
        "width": 160,
        "height": 96,
        "num_inference_steps": 7,
        "guidance": 2.0,
        "seed": "99",
        "count": 4,
        "input_image": None,
        "denoising_strength": 0.5,
        "loras": [{"path": "/gone/cat.safetensors", "strength": 0.4}],
    }
    chunk = PngImagePlugin.PngInfo()
    receipt = [{"name": "cat", "path": "/gone/cat.safetensors", "hash": "ab" * 32}]
    chunk.add_itxt("loft", json.dumps({"request": request, "seed": "101", "loras": receipt}))
    Image.new("RGB", (160, 96)).save(tmp_path / "dropped.png", pnginfo=chunk)
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    open_settings(page)
    drop(page, "#drop-png button", tmp_path / "plain.png")
    page.wait_for_selector("#said .notice.bad >> text=holds no settings")
    page.click("#drop-png button[aria-label='Clear']")
    page.set_input_files("#drop-png input[type=file]", tmp_path / "dropped.png")
    page.wait_for_selector("#said .notice.warn")
    said = page.inner_text("#said")
    assert "nobody/nothing is not here" in said and "cat.safetensors" in said
    assert page.input_value("#set-prompt textarea") == "a dropped picture"
    assert page.input_value("#set-width input") == "160" and page.input_value("#set-seed input") == "101"
    assert not page.is_checked("#fresh-seed input")
    page.fill("#set-model input", "loft/starter")
    page.press("#set-model input", "Enter")
    wait_until(lambda: kept(site).get("model") == "loft/starter")


def test_the_trash_takes_a_picture_and_says_where_it_is(site, page):
    before = len(pictures(site))
    ask(page, "a thing to throw away")
    wait_until(lambda: len(pictures(site)) == before + 1)
    page.wait_for_selector("#stage img[alt='a thing to throw away']")
    page.click("text=Move to trash >> visible=true")
    page.wait_for_selector("#said >> text=Moved to")
    assert str(site.places.trash) in page.inner_text("#said")
    assert len(pictures(site)) == before and list(site.places.trash.glob("*.png"))


def test_only_configured_folders_are_served(site):
    secret = site.places.user / "preferences.json"
    secret.write_text("{}")
    for path in (secret, site.places.root / "studio.log", "/etc/hostname"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            site.get(f"gradio_api/file={urllib.parse.quote(str(path))}")
        assert refused.value.code == 403


def test_a_picture_made_here_brings_its_settings_back_when_it_is_dropped(site, page):
    page.fill("#set-negative_prompt textarea", "fog and rain")
    page.fill("#set-guidance input[type=number]", "2.5")
    before = set(pictures(site))
    ask(page, "a lighthouse", steps=5)
    (made,) = wait_until(lambda: set(pictures(site)) - before)
    page.wait_for_selector("#stage img[alt='a lighthouse']")
    seed = int(json.loads(Image.open(made).info["loft"])["seed"])
    for field, other in (
        ("prompt textarea", "else"),
        ("negative_prompt textarea", ""),
        ("guidance input[type=number]", "4"),
        ("seed input", "7"),
    ):
        page.fill(f"#set-{field}", other)
    open_settings(page)
    drop(page, "#drop-png button", made)
    page.wait_for_selector(f"#said .notice.good >> text={made.name}")
    page.wait_for_function("document.querySelector('#set-prompt textarea').value === 'a lighthouse'")
    shown = [
        page.input_value(f"#set-{name}")
        for name in ("negative_prompt textarea", "guidance input[type=number]", "seed input")
    ]
    assert shown == ["fog and rain", "2.5", str(seed)]
    assert page.input_value("#set-num_inference_steps input[type=number]") == "5"
    wait_until(lambda: kept(site).get("negative_prompt") == "fog and rain" and kept(site).get("seed") == seed)


def kept(site: Site) -> dict:
    """The form as it would come back."""
    return saved_forms.read_values(saved_forms.request_file(site.places))


def test_what_is_typed_while_an_answer_is_on_its_way_stays(site, page, tmp_path):
    chunk = PngImagePlugin.PngInfo()
    chunk.add_itxt(
        "loft", json.dumps({"request": {"model": "loft/starter", "prompt": "late", "width": 192}, "seed": "5"})
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "late.png", pnginfo=chunk)
    page.fill("#set-width input", "128")
    held = Held(page, "late.png")
    open_settings(page)
    page.set_input_files("#drop-png input[type=file]", tmp_path / "late.png")
    held.wait()
    page.fill("#set-prompt textarea", "typed meanwhile")
    held.let_go()
    page.wait_for_function("document.querySelector('#set-width input').value === '192'")
    assert page.input_value("#set-prompt textarea") == "typed meanwhile"
    wait_until(lambda: (kept(site).get("prompt"), kept(site).get("width")) == ("typed meanwhile", 192))


def test_what_is_typed_before_the_form_is_filled_stays(site, page):
    page.fill("#set-prompt textarea", "kept before")
    page.fill("#set-width input", "144")
    wait_until(lambda: (kept(site).get("prompt"), kept(site).get("width")) == ("kept before", 144))
    held = Held(page, '"trigger_id":0')
    page.reload()
    page.wait_for_selector("#set-prompt textarea")
    held.wait()
    page.click("#set-prompt textarea")
    page.keyboard.press("Control+A")
    page.keyboard.type("typed early")
    held.let_go()
    wait_ready(page)
    page.wait_for_function("document.querySelector('#set-width input').value === '144'")
    assert page.input_value("#set-prompt textarea") == "typed early"
    wait_until(lambda: (kept(site).get("prompt"), kept(site).get("width")) == ("typed early", 144))


def test_what_cannot_be_is_said_at_its_field_or_brought_into_range(site, page):
    steps = "#set-num_inference_steps input[type=number]"
    for typed, brought in (("0", "1"), ("999", "200"), ("", "1")):
        page.fill(steps, typed)
        page.press(steps, "Tab")
        page.wait_for_function(f"document.querySelector('{steps}').value === '{brought}'")
        wait_until(lambda n=brought: kept(site).get("num_inference_steps") == int(n))
    page.fill("#set-width input", "3")
    wait_until(lambda: page.wait_for_timeout(50) or text_below(page, "#set-width"))
    assert text_below(page, "#set-width") == "Width is 3; the least is 16."
    page.click("#generate")
    page.wait_for_selector("#said .notice.bad >> text=Width")
    page.fill("#set-width input", "128")
    wait_until(lambda: page.wait_for_timeout(50) or not text_below(page, "#set-width"))
    ask(page, "")
    page.wait_for_selector("#said .notice.bad >> text=The prompt is empty")
    page.fill("#set-prompt textarea", "not empty")
    page.wait_for_selector("#said .notice.bad", state="detached")


def test_the_theme_changes_at_once_and_stays(site, page):
    tab(page, "Preferences")
    for wish, dark in (("Dark", True), ("Light", False), ("Dark", True)):
        page.click(f"#preference-theme label >> text={wish}")
        page.wait_for_function(f"document.body.classList.contains('dark') === {str(dark).lower()}")
    page.wait_for_selector("#preferences-said .notice.good")
    wait_until(lambda: preferences(site) == {"theme": "dark"})
    page.reload()
    page.wait_for_function("document.body.classList.contains('dark')")
    wait_ready(page)
    assert page.is_checked("#preference-theme input[value=dark]")


def preferences(site: Site) -> dict:
    return saved_forms.read_values(saved_forms.preferences_file(site.places))


def test_a_device_that_is_not_here_is_refused(site, page):
    tab(page, "Preferences")
    field = page.locator("#preference-device input")
    field.fill("cuda:77")
    field.press("Enter")
    wait_until(lambda: page.wait_for_timeout(50) or "There is no device" in text_below(page, "#preference-device"))
    assert preferences(site).get("device", "auto") == "auto"
    field.fill("cpu")
    field.press("Enter")
    wait_until(lambda: preferences(site).get("device") == "cpu")
    assert page.inner_text("#preference-download_source").count("Hugging Face") == 1


def test_a_narrow_window_needs_no_sideways_scrolling(site, page):
    usual = page.viewport_size
    for width in (768, 390):
        page.set_viewport_size({"width": width, "height": 900})
        for name in ("Generate", "LoRAs and models", "Train", "Preferences"):
            tab(page, name)
            page.wait_for_selector("[role=tab][aria-selected=true] >> text=" + name)
            page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, width)
    page.set_viewport_size(usual)


def test_a_studio_that_was_started_again_is_found_by_the_page(site, open_page):
    page = open_page(site)
    page.fill("#set-prompt textarea", "before the end")
    wait_until(lambda: kept(site).get("prompt") == "before the end")
    page.wait_for_function("window.loftStudio")  # the page has asked the studio who it is
    page.evaluate("window.same = true")
    site.kill()
    page.wait_for_selector("#away")
    assert "does not answer" in page.inner_text("#away")
    site.start()
    page.wait_for_function("window.same === undefined && document.querySelector('#strip .now')")
    page.wait_for_selector("#away", state="detached")
    page.wait_for_function("document.querySelector('#set-prompt textarea').value === 'before the end'")
