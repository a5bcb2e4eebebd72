"""The picture in a result's header: small, the newest one in time, and never a broken one."""

from __future__ import annotations

import base64
import io
import random

from PIL import Image

from backend.training.checkpoint.thumbnail import MOST_BYTES, thumbnail_of


def picture(url: str) -> Image.Image:
    kind, _, data = url.partition(";base64,")
    assert kind == "data:image/jpeg" and len(url) <= 30 * 1024
    return Image.open(io.BytesIO(base64.b64decode(data)))


def draw(folder, step: int, colour, name: str = "0.png") -> None:
    path = folder / "samples" / f"step-{step:06d}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (512, 384), colour).save(path)


def test_the_newest_sample_in_time(tmp_path):
    assert thumbnail_of(tmp_path, 5) == ""
    draw(tmp_path, 0, "black")
    assert thumbnail_of(tmp_path, 5) == ""  # of the untouched model
    draw(tmp_path, 4, (200, 0, 0))
    draw(tmp_path, 8, (0, 0, 200))
    small = picture(thumbnail_of(tmp_path, 5))
    assert small.size == (256, 192) and small.getpixel((9, 9))[0] > 190
    assert picture(thumbnail_of(tmp_path, 8)).getpixel((9, 9))[2] > 190
    (tmp_path / "samples" / "step-000008" / "0.png").write_bytes(b"cut off")
    assert picture(thumbnail_of(tmp_path, 8)).getpixel((9, 9))[0] > 190


def test_of_several_strengths_the_plain_one(tmp_path):
    draw(tmp_path, 3, (0, 200, 0), "0-strength-0.5.png")
    draw(tmp_path, 3, (200, 0, 0), "0-strength-1.png")
    assert picture(thumbnail_of(tmp_path, 3)).getpixel((9, 9))[0] > 190


def test_the_busiest_picture_is_small_enough(tmp_path):
    path = tmp_path / "samples" / "step-000001" / "0.png"
    path.parent.mkdir(parents=True)
    Image.frombytes("RGB", (400, 400), random.Random(0).randbytes(480_000)).save(path)
    url = thumbnail_of(tmp_path, 1)
    assert picture(url).size[0] > 32 and len(base64.b64decode(url.partition(",")[2])) <= MOST_BYTES
