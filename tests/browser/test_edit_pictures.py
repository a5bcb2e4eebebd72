"""The row of pictures to edit, as people use it: send, drop, put in order, take away."""

from __future__ import annotations

import pytest
from PIL import Image

from studio.state import saved_forms
from tests.browser.conftest import drop, text_below, wait_until

pytestmark = pytest.mark.browser
ROW = "#set-edit_images"


def choose(page, model: str) -> None:
    page.fill("#set-model input", model)
    page.press("#set-model input", "Enter")


def test_pictures_are_sent_put_in_order_and_taken_away(painted, open_page, tmp_path):
    def kept() -> list[str]:
        return saved_forms.read_values(saved_forms.request_file(painted.places)).get("edit_images") or []

    files = [tmp_path / f"{colour}.png" for colour in ("red", "blue", "green")]
    for file in files:
        Image.new("RGB", (64, 48), file.stem).save(file)
    page = open_page(painted)
    choose(page, "Qwen/Qwen-Image-Edit-2509")
    page.wait_for_selector(f"{ROW} .edit-add")
    page.set_input_files(f"{ROW} input[type=file]", files[:2])
    first, second = wait_until(lambda: len(kept()) == 2 and kept())
    page.click(f"{ROW} [aria-label='Picture 2: one to the left']")
    wait_until(lambda: kept() == [second, first])
    drop(page, f"{ROW} .edit-add", files[2])
    wait_until(lambda: kept()[:2] == [second, first] and len(kept()) == 3)
    page.click(f"{ROW} [aria-label='Remove Picture 1']")
    wait_until(lambda: kept()[0] == first and len(kept()) == 2)
    page.wait_for_function(f"document.querySelectorAll('{ROW} .edit-tile').length === 2")
    (tmp_path / "text.png").write_text("no picture")
    page.set_input_files(f"{ROW} input[type=file]", tmp_path / "text.png")
    wait_until(lambda: page.wait_for_timeout(50) or "text.png is not a picture" in text_below(page, ROW))
    page.reload()
    page.wait_for_function(f"document.querySelectorAll('{ROW} .edit-tile').length === 2")
    choose(page, "loft/starter")
    page.wait_for_selector(f"{ROW} .edit-row", state="detached")
    assert len(kept()) == 2, "they are there again when an editing model is chosen"
