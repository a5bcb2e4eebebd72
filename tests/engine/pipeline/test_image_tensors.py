"""Pictures in and out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from backend.dataset.dataset import measure
from backend.engine.pipeline import image_tensors
from backend.families.qwen_image.reference_geometry import edited_size
from backend.images import png_metadata
from backend.images.picture_sizes import sizes_of_files
from backend.schema.messages import Trouble

pytestmark = pytest.mark.torch


def test_there_and_back_is_the_same_picture():
    picture = Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=numpy.uint8))
    pixels = image_tensors.to_pixels(picture, 32, 48)
    assert pixels.shape == (1, 3, 48, 32) and pixels.min() >= -1 and pixels.max() <= 1
    assert image_tensors.to_picture(pixels[0]).tobytes() == picture.tobytes()


def test_other_proportions_are_cut_in_the_middle():
    picture = Image.new("RGB", (300, 100), "red")
    picture.paste("blue", (100, 0, 200, 100))
    pixels = image_tensors.to_pixels(picture, 64, 64)
    assert torch.allclose(pixels[0, :, 32, 32], torch.tensor([-1.0, -1.0, 1.0]), atol=0.02)
    assert pixels[0, 2].mean() > 0.9


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "CMYK", "1", "I;16"])
def test_every_kind_of_picture_opens(tmp_path, mode):
    path = tmp_path / ("x.tif" if mode in ("CMYK", "I;16") else "x.png")
    Image.new(mode, (20, 10)).save(path)
    assert image_tensors.open_picture(path).mode == "RGB"


def test_what_is_see_through_shows_white(tmp_path):
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "x.png")
    assert image_tensors.open_picture(tmp_path / "x.png").getpixel((3, 3)) == (255, 255, 255)


def test_a_photograph_is_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "x.jpg", exif=exif)
    assert image_tensors.open_picture(tmp_path / "x.jpg").size == (20, 40)


def test_sixteen_bits_of_grey_keep_their_shades(tmp_path):
    shades = numpy.linspace(0, 65535, 256).reshape(16, 16).round()
    for name, kind in (("x.png", numpy.uint16), ("x.tif", numpy.uint16), ("y.tif", numpy.int32)):
        Image.fromarray(shades.astype(kind)).save(tmp_path / name)
        found = numpy.asarray(image_tensors.open_picture(tmp_path / name))
        assert (found == numpy.arange(256).reshape(16, 16, 1)).all()
    Image.fromarray(shades.astype(numpy.float32)).save(tmp_path / "z.tif")
    with pytest.raises(Trouble, match=r"z\.tif is not .* floating-point numbers"):
        image_tensors.open_picture(tmp_path / "z.tif")


def test_broken_exif_leaves_a_picture_as_it_lies_and_every_reader_agrees(tmp_path):
    upside = Image.Exif()
    upside[0x0112] = 99
    for name, exif in (("x.png", b"Exif\0\0garbage"), ("x.jpg", b"Exif\0\0II*\0\xff\xff\xff\x7f"), ("y.jpg", upside)):
        Image.new("RGB", (40, 20)).save(tmp_path / name, exif=exif)
        assert (
            image_tensors.open_picture(tmp_path / name).size == (40, 20) == sizes_of_files((str(tmp_path / name),))[0]
        )
        assert (measure([tmp_path / name])[0].width, measure([tmp_path / name])[0].height) == (40, 20)


def test_no_side_of_a_slender_picture_is_lost():
    assert edited_size([(100, 1)], "edit", 64 * 64) == (640, 32) and edited_size([(1, 100)], "edit", 64 * 64) == (
        32,
        640,
    )


def test_half_a_character_does_not_lose_a_picture(tmp_path):
    png_metadata.save_png(Image.new("RGB", (2, 2)), tmp_path / "x.png", {"prompt": "\ud83d图"})
    with Image.open(tmp_path / "x.png") as stored:
        assert json.loads(stored.info[png_metadata.CHUNK])["prompt"] == "\ud83d图"


@pytest.mark.parametrize("data", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n" + b"\x00" * 50, None])
def test_what_is_no_picture_is_said(tmp_path, data):
    path = tmp_path / "x.png"
    if data is None:
        Image.new("RGB", (400, 400), "red").save(path)
        data = path.read_bytes()[:300]  # cut off
    path.write_bytes(data)
    with pytest.raises(Trouble, match=r"x\.png"):
        image_tensors.open_picture(path)


def test_pictures_too_large_are_refused_unread(tmp_path):
    import struct
    import zlib

    head = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk)
    with pytest.raises(Trouble, match=r"bomb\.png"):
        image_tensors.open_picture(tmp_path / "bomb.png")


def test_settings_lie_in_the_file_and_seeds_are_text(tmp_path):
    path = tmp_path / "day" / "x.png"
    settings = {
        "request": {"seed": 2**53 - 1, "prompt": "ein Äpfel\u2028🍎"},
        "seed": 7,
        "seeds": [1, 2],
        "seconds": 1.5,
    }
    png_metadata.save_png(Image.new("RGB", (8, 8)), path, settings)
    with Image.open(path) as picture:
        read = json.loads(picture.info["loft"])
    assert read["request"] == {"seed": str(2**53 - 1), "prompt": "ein Äpfel\u2028🍎"}
    assert read["seed"] == "7" and read["seeds"] == ["1", "2"] and read["seconds"] == 1.5
    assert [entry.name for entry in path.parent.iterdir()] == ["x.png"]


def test_a_disk_that_takes_nothing_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Trouble, match="No space left"):
        png_metadata.save_png(Image.new("RGB", (8, 8)), tmp_path / "x.png", {})
    assert not list(tmp_path.iterdir())


def test_names_are_free_and_previews_few(tmp_path):
    first = png_metadata.free_path(tmp_path, 5)
    first.touch()
    assert png_metadata.free_path(tmp_path, 5) != first
    previews = png_metadata.Previews(tmp_path / "previews", "../../id")
    paths = []
    for _ in range(4):
        import time

        time.sleep(0.002)
        paths.append(previews.write(Image.new("RGB", (8, 8))))
    assert len(set(paths)) == 4 and sorted(Path(tmp_path / "previews").iterdir()) == sorted(paths[-2:])
    assert png_metadata.Previews(tmp_path / "previews" / paths[-1].name, "x").write(Image.new("RGB", (8, 8))) is None
