"""Takes the README's pictures: `python -m tests.browser.pictures [--data FOLDER]`. Needs a Chromium; trains nothing.

On the data folder it generates a few pictures with the starter and shows whatever runs and LoRAs lie there.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image

from backend.schema.paths import PROJECT
from tests.browser.conftest import Site, tab, wait_ready
from tests.conftest import chromium_path

PROMPTS = ("a red apple on a blue background", "a cat, 3d style", "a flat icon of a house")
TARGET = PROJECT / "docs" / "pictures"
SECONDS = 180


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="/tmp/loft-pictures", help="data folder to show")
    parser.add_argument("--out", default=str(TARGET))
    said = parser.parse_args()
    out = Path(said.out)
    out.mkdir(parents=True, exist_ok=True)
    site = Site(Path(said.data).resolve())
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
            take(browser, site, out)
            take_locked(browser, site, out)
            browser.close()
    finally:
        site.stop()


def opened(browser, site: Site, *, width: int = 1360, height: int = 940):
    context = browser.new_context(viewport={"width": width, "height": height})
    context.set_default_timeout(SECONDS * 1000)
    page = context.new_page()
    page.goto(site.address)
    wait_ready(page)
    return page


def take_locked(browser, site: Site, out: Path) -> None:
    """What somebody without the token sees, on a wide and on a narrow window, beside each other."""
    shots = []
    for width, scheme in ((900, "light"), (400, "light"), (400, "dark")):
        page = browser.new_page(viewport={"width": width, "height": 600}, color_scheme=scheme)
        page.goto(site.base)
        shots.append(Image.open(io.BytesIO(page.screenshot())))
        page.close()
    whole = Image.new("RGB", (sum(shot.width + 12 for shot in shots) - 12, 600), "#8a8a94")
    at = 0
    for shot in shots:
        whole.paste(shot, (at, 0))
        at += shot.width + 12
    whole.quantize(48).save(out / "token.png", optimize=True)


def take(browser, site: Site, out: Path) -> None:
    page = opened(browser, site)
    for prompt in PROMPTS:
        page.fill("#set-prompt textarea", prompt)
        page.click("#generate")
        page.wait_for_selector(f"#stage img[alt='{prompt}']")
    page.mouse.move(0, 0)
    page.wait_for_timeout(1500)
    page.screenshot(path=out / "generate.png")
    tab(page, "Train")
    page.wait_for_selector("#run-head :is(.run-head, .stage)")
    page.wait_for_timeout(2500)
    page.screenshot(path=out / "train.png")
    tab(page, "LoRAs and models")
    page.wait_for_selector("#lora-cards :is(.card, .stage)")
    if page.locator("#lora-cards button.card").count():
        page.locator("#lora-cards button.card").first.click()
        page.wait_for_selector("#lora-details h2")
    page.wait_for_timeout(1500)
    page.screenshot(path=out / "models.png")
    tab(page, "Preferences")
    page.wait_for_timeout(1500)
    page.screenshot(path=out / "preferences.png")


if __name__ == "__main__":
    main()
