"""A monkey at the page: it clicks, types and drops at random, among files that nobody would want, and nothing may go wrong.

    python -m tests.browser.monkey --seconds 600 [--seed N]

0 errors in the browser's console, 0 errors of the page, no refusal and no answer of 500, and no fault in the studio's log; what it did last is told where something was. The tests
let it loose for 30 seconds (`test_monkey`).
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from backend.schema.messages import to_line
from backend.schema.paths import Places

TYPED = ("", "a red cat", "x" * 5000, "<script>window.pwn=1</script>", "a\u0000b", "../../etc/passwd", "/dev/zero", "//server/share", "-1",
         "1e999", "NaN", "--help", "𝔘𝔫𝔦\u202ecode 🐈", "'\"&;", "/" , "y" * 300, "evil.module.X", "%00%2e%2e", "{}", "[" * 2000)  # fmt: skip
KEYS = ("Enter", "Tab", "Escape", "ArrowDown", "ArrowUp", "Backspace", "End")
SPARED = ("Sign out",)  # leaves the page
CLICKED = "button:visible, [data-do]:visible, input[type=checkbox]:visible, input[type=radio]:visible, summary:visible, [role=tab]:visible"
FIELDS = "textarea:visible:not([readonly]), input[type=text]:visible, input[type=number]:visible"


class Monkey:
    """One page and what has gone wrong in it."""

    def __init__(self, page, seed: int):
        self.page, self.random = page, random.Random(seed)
        self.done: deque[str] = deque(maxlen=30)
        self.wrong: list[str] = []
        self.actions = 0
        page.on("pageerror", lambda error: self.wrong.append(f"error of the page: {error}"))
        page.on(
            "console",
            lambda said: (
                self.wrong.append(f"console: {said.text} {said.location.get('url', '')}")
                if said.type == "error"
                else None
            ),
        )
        page.on("response", self._answered)
        page.on("dialog", lambda dialog: dialog.dismiss())

    def _answered(self, response) -> None:
        if response.status >= 400:
            self.wrong.append(f"{response.status} {response.url} {(response.request.post_data or '')[:300]}")

    def run(self, seconds: float, files: list[Path]) -> None:
        """Acts for so long, or until something is wrong."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.wrong:
            act = self.random.choice(
                [self._click] * 6 + [self._type] * 4 + [self._press, self._drop, self._reload, self._scroll]
            )
            try:
                act(files)
                self.actions += 1
            except Exception as error:  # what it meant to touch has gone, or lies under something
                if "Target" in str(error) and "closed" in str(error):
                    raise
            self.page.wait_for_timeout(self.random.choice((10, 30, 200)))
        self.page.wait_for_timeout(1500)

    def _one(self, selector: str):
        found = self.page.locator(selector)
        count = found.count()
        return found.nth(self.random.randrange(count)) if count else None

    def _click(self, _) -> None:
        one = self._one(CLICKED)
        if one is not None and one.inner_text(timeout=300).strip() not in SPARED:
            self.done.append(f"click {(one.get_attribute('id') or one.inner_text(timeout=300))[:60]!r}")
            one.click(timeout=700)

    def _type(self, _) -> None:
        one = self._one(FIELDS)
        if one is not None:
            text = self.random.choice(TYPED)
            self.done.append(
                f"type {text[:40]!r} into {one.get_attribute('aria-label') or one.get_attribute('placeholder')!r}"
            )
            one.fill(text, timeout=700)

    def _press(self, _) -> None:
        key = self.random.choice(KEYS)
        self.done.append(f"press {key}")
        self.page.keyboard.press(key)

    def _drop(self, files: list[Path]) -> None:
        one = self._one("input[type=file]")
        if one is not None:
            file = self.random.choice(files)
            self.done.append(f"give {file.name}")
            one.set_input_files(file, timeout=700)

    def _reload(self, _) -> None:
        if self.random.random() < 0.3:
            self.done.append("reload")
            self.page.reload()
            self.page.wait_for_selector("#strip .now")

    def _scroll(self, _) -> None:
        self.page.mouse.wheel(0, self.random.randrange(-900, 900))


def litter(places: Places) -> list[Path]:
    """Puts odd files into a data folder, and gives those that are to be dropped on the page."""
    from PIL import Image

    from backend.images.png_metadata import save_png

    folder = places.outputs / "2026-01-01"
    odd = [
        {"request": {"input_image": 5}},
        {"request": {}, "loras": [{"strength": "abc"}]},
        {"request": {"model": "/dev/zero"}, "notes": ["<b>"]},
    ]
    odd += [
        {
            "request": {"prompt": "a", "loras": [{"path": "/dev/zero"}]},
            "loras": [{"path": "/dev/zero", "hash": "0" * 64}],
        }
    ]
    for number, settings in enumerate(odd):
        save_png(Image.new("RGB", (16, 16), "red"), folder / f"odd-{number}.png", settings)
    (folder / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 9)
    torn = places.datasets / "torn"
    torn.mkdir(parents=True)
    (torn / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 9)
    save_png(Image.new("RGB", (16, 16), "blue"), torn / "whole.png", {})
    if os.name != "nt":  # names in no encoding
        for where, name in ((folder, b"\xff.png"), (torn, b"\xff.png"), (places.datasets, b"\xfe")):
            path = Path(os.fsdecode(os.fsencode(where) + b"/" + name))
            path.mkdir() if not path.suffix else path.write_bytes(b"x")
    for number, line in enumerate(
        ('{"event": "saved", "path": "' + "y" * 5000 + '"}', "[" * 200_000, to_line("step", step=1, loss=1.0))
    ):
        run = places.runs / f"2026-01-0{number + 1}_00-00-00_odd"
        run.mkdir(parents=True)
        (run / "config.json").write_text("{}" if number else '{"lora_rank": []}')
        (run / "events.jsonl").write_text(line + "\n")
    places.loras.mkdir(parents=True, exist_ok=True)
    (places.loras / "torn.safetensors").write_bytes(b"\xff" * 20)
    if hasattr(os, "mkfifo"):
        os.mkfifo(places.loras / "pipe.safetensors")
    given = places.root / "given"
    given.mkdir()
    (given / "poly.html").write_bytes((folder / "odd-0.png").read_bytes())
    (given / "text.txt").write_text("a caption")
    (given / "evil.py").write_text("raise SystemExit")
    return [*sorted(folder.glob("*.png")), *sorted(given.iterdir())]


def let_loose(browser, site, files: list[Path], *, seconds: float, seed: int) -> Monkey:
    """A monkey that has been at the page of `site`, with what went wrong."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )  # Gradio asks for it
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.goto(site.address)
    page.wait_for_selector("#strip .now")
    monkey = Monkey(page, seed)
    try:
        monkey.run(seconds, files)
        assert page.evaluate("window.pwn") is None, "a script of a stranger's ran"
    finally:
        context.close()
    return monkey


def _browsers() -> Iterator:
    from playwright.sync_api import sync_playwright

    from tests.conftest import chromium_path

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
        yield found
        found.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    said = parser.parse_args()
    from tests.browser.conftest import Site

    with tempfile.TemporaryDirectory(prefix="loft-monkey-") as root:
        files = litter(Places(Path(root)))
        site = Site(Path(root), "--fake")
        try:
            for browser in _browsers():
                monkey = let_loose(browser, site, files, seconds=said.seconds, seed=said.seed)
        finally:
            site.end()
        monkey.wrong += [site.faults()] if site.faults() else []
    print(f"seed {said.seed}: {monkey.actions} actions, {len(monkey.wrong)} wrong")
    for line in (*monkey.wrong, *(["before it:", *monkey.done] if monkey.wrong else [])):
        print(line if len(line) < 8000 else f"{line[:4000]} … {line[-4000:]}")
    return 1 if monkey.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
