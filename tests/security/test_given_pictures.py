"""Pictures that somebody gives the page, with what strangers have written into them, against a real studio."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time

import pytest
from PIL import Image, PngImagePlugin

from backend.images.png_metadata import save_png
from tests.security.page_by_hand import PageCalls
from tests.security.requests_by_hand import ask, form_of
from tests.security.test_files import HTML, picture, read

FILE = {"meta": {"_type": "gradio.FileData"}}


def sent(page: PageCalls, name: str, data: bytes) -> str:
    """Where the studio keeps what a browser sends under that name."""
    body, kind = form_of((name, data))
    reply = ask(page.site.port, "/gradio_api/upload", method="POST", body=body, Content_Type=kind, **page.headers)
    return json.loads(reply.body)[0]


def phone_picture() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")])
    return out.getvalue()


def test_a_picture_is_kept_under_its_hash_and_what_it_is(locked):
    page = PageCalls(locked)
    page.open()
    act = page.function("set-edit_images", "act")
    before = set((locked.places.user / "inputs").glob("*"))
    for name, data, ending in (
        ("poly.html", picture("PNG"), ".png"),
        ("a.svg", picture("WEBP"), ".webp"),
        ("b.png", picture("JPEG"), ".jpg"),
        ("c.png.exe", picture("GIF"), ".gif"),
        ("d.txt", picture("BMP"), ".bmp"),
        ("e", picture("AVIF"), ".avif"),
        ("phone.png", phone_picture(), ".jpg"),
        ("page.png", HTML.encode(), None),
    ):
        event = {"do": "add", "what": json.dumps([sent(page, name, data)])}
        reply = page.post(act, page.sent(act), event=event)
        assert reply.status == 200
        made = set((locked.places.user / "inputs").glob("*")) - before
        before |= made
        names = [path.stem for path in made]
        assert len(names) <= 1 and all(
            hashlib.sha256(data).hexdigest().startswith(one) and len(one) >= 32 for one in names
        )
        assert names or not ending, (name, reply.body[-700:])
        for path in made:
            assert path.suffix == ending and path.read_bytes() == data
            assert read(locked, path).headers["content-type"].startswith("image/")


@pytest.mark.skipif(os.name == "nt", reason="POSIX")
def test_a_picture_whose_settings_name_devices_and_pipes_holds_nothing_up(locked, tmp_path):
    """More pipes than there are threads that answer: one that was opened would hold its thread for ever."""
    page = PageCalls(locked)
    page.open()
    dropped = page.function("drop-png", "upload")
    pipe, absent = locked.places.loras / "pipe.safetensors", tmp_path / "pipe.safetensors"
    locked.places.loras.mkdir(exist_ok=True)
    for path in (pipe, absent):
        os.mkfifo(path)
    began = time.monotonic()
    try:
        for number in range(45):
            path = ("/dev/zero", str(pipe), str(absent), "//server/share/a.safetensors", "/proc/self/fd/0")[number % 5]
            told = {"path": path, "name": path, "hash": f"{number:064x}", "strength": 1.0}
            settings = {
                "request": {
                    "prompt": f"cat {number}",
                    "model": path,
                    "input_image": path,
                    "loras": [told],
                    "edit_images": [path],
                },
                "loras": [told],
            }
            made = save_png(Image.new("RGB", (8, 8)), tmp_path / f"{number}.png", settings)
            data = (made or tmp_path / f"{number}.png").read_bytes()
            values = page.sent(dropped, drop_png={"path": sent(page, "a.png", data), **FILE})
            assert page.post(dropped, values).status == 200
        page.open()
        assert time.monotonic() - began < 100
    finally:
        pipe.unlink()


def test_settings_of_any_length_and_none_are_told(locked):
    page = PageCalls(locked)
    page.open()
    dropped = page.function("drop-png", "upload")
    for text in ("", "[" * 200_000, "{}", "x" * 5_000_000, '{"request": 5}'):
        out, info = io.BytesIO(), PngImagePlugin.PngInfo()
        info.add_text("loft", text, zip=True)
        Image.new("RGB", (8, 8)).save(out, "PNG", pnginfo=info)
        reply = page.post(dropped, page.sent(dropped, drop_png={"path": sent(page, "b.png", out.getvalue()), **FILE}))
        assert reply.status == 200 and b"notice" in reply.body, (text[:20], reply.body[:200])
