"""Pictures in the outputs folder: order, settings inside, thumbnails, the trash, and the way back to the form."""

from __future__ import annotations

import base64
import json
import os

import pytest
from PIL import Image, PngImagePlugin

from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, LoraUse, request_to_values
from studio.generate import gallery
from studio.generate.restore_settings import content_hash, restore
from studio.state import output_files


def make_png(path, settings=None, *, size=(32, 24)):
    path.parent.mkdir(parents=True, exist_ok=True)
    chunk = PngImagePlugin.PngInfo()
    if settings is not None:
        chunk.add_itxt("loft", settings if isinstance(settings, str) else json.dumps(settings))
    Image.new("RGB", size, "red").save(path, pnginfo=chunk)
    return path


def test_newest_first_and_no_more_than_asked(data):
    for day, number in (("2026-01-01", 1), ("2026-01-02", 2), ("2026-01-02", 3)):
        path = make_png(data.outputs / day / f"{number}.png")
        os.utime(path, (1000 + number, 1000 + number))
    make_png(data.outputs / "2026-01-02" / ".half.png")
    assert [path.stem for path in output_files.newest(data.outputs, most=10)] == ["3", "2", "1"]
    assert [path.stem for path in output_files.newest(data.outputs, most=2)] == ["3", "2"]
    assert output_files.newest(data.root / "nowhere", most=5) == []


def test_a_preview_needs_no_file_once_it_is_shown(tmp_path):
    path = tmp_path / "preview.webp"
    Image.new("RGB", (8, 8), "red").save(path)
    html = gallery.preview_stage(path)
    path.unlink()
    assert base64.b64decode(html.partition("base64,")[2].partition('"')[0])[:4] == b"RIFF" and "file=" not in html
    assert "shimmer" in gallery.preview_stage(path) and "shimmer" in gallery.preview_stage(None)


def test_settings_come_back_with_large_seeds(tmp_path):
    request = request_to_values(GenerationRequest(prompt="ein grüner Apfel 苹果", seed=2**53 - 1))
    path = make_png(tmp_path / "a.png", {"request": request, "seed": str(2**53 - 1), "seconds": 1.5})
    found = output_files.read_settings(path)
    assert found.request["prompt"] == "ein grüner Apfel 苹果" and found.seed == 2**53 - 1 and found.seconds == 1.5


STRANGE = [
    json.dumps({"request": {}, "seconds": "x"}), json.dumps({"request": {}, "notes": 3}), json.dumps({"request": {"edit_images": 5}}),
    json.dumps({"request": {"loras": [1]}}), '{"request": {}, "measured_peak_bytes": Infinity}', json.dumps({"request": {}, "seed": "²", "loras": 1}),
]  # fmt: skip


@pytest.mark.parametrize("settings", [None, "{", "[]", "{}", '{"request": 3}', *STRANGE])
def test_a_picture_without_usable_settings_is_a_sentence(tmp_path, settings):
    with pytest.raises(Trouble, match=r"a\.png"):
        output_files.read_settings(make_png(tmp_path / "a.png", settings))


def test_a_file_that_is_no_picture_is_a_sentence(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"x" * 50)
    with pytest.raises(Trouble, match="not a picture"):
        output_files.read_settings(tmp_path / "a.png")
    assert output_files.thumbnail(tmp_path / "a.png", tmp_path / "cache") is None


def test_a_thumbnail_is_made_once_and_anew_when_the_picture_changes(tmp_path):
    path = make_png(tmp_path / "a.png", size=(900, 300))
    first = output_files.thumbnail(path, tmp_path / "cache")
    with Image.open(first) as small:
        assert small.size == (256, 85)
    made = first.stat().st_mtime_ns
    assert output_files.thumbnail(path, tmp_path / "cache") == first and first.stat().st_mtime_ns == made
    os.utime(path, (5, 5))
    assert output_files.thumbnail(path, tmp_path / "cache") != first


def test_a_thumbnail_is_upright_and_white_where_nothing_is(tmp_path):
    held = Image.Exif()
    held[0x0112] = 6
    Image.new("RGBA", (40, 20), (0, 0, 0, 0)).save(tmp_path / "x.png", exif=held)
    with Image.open(output_files.thumbnail(tmp_path / "x.png", tmp_path / "cache")) as small:
        assert small.size == (20, 40) and small.convert("RGB").getpixel((5, 5)) == (255, 255, 255)


def test_the_trash_keeps_both_of_two_files_with_one_name(data):
    one = make_png(data.outputs / "a" / "x.png")
    two = make_png(data.outputs / "b" / "x.png")
    places = {output_files.to_trash(one, data), output_files.to_trash(two, data)}
    assert {path.name for path in places} == {"x.png", "x-2.png"} and all(path.is_file() for path in places)
    assert not one.exists() and not two.exists()


def test_a_link_out_of_a_folder_is_not_inside_it(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "secret")
    assert not output_files.is_inside(tmp_path / "in" / "link", (tmp_path / "in",))
    assert not output_files.is_inside(tmp_path / "in" / ".." / "secret", (tmp_path / "in",))
    assert output_files.is_inside(tmp_path / "in" / "file", (tmp_path / "in",))


def restored(data, request: dict, *, receipts=(), loras=(), seed=None):
    settings = output_files.Settings(request=request, seed=seed, loras=tuple(receipts))
    return restore(settings, models=["loft/starter"], loras=list(loras), places=data)


def test_the_form_comes_back_with_the_pictures_own_seed(data):
    request = request_to_values(GenerationRequest(prompt="a cat", seed=5, count=4, width=96))
    back = restored(data, request, seed=7)
    assert (back.request.prompt, back.request.seed, back.request.count, back.request.width) == ("a cat", 7, 1, 96)
    assert back.missing == ()


def test_a_lora_that_moved_is_found_by_its_content(data, tmp_path):
    (tmp_path / "other").mkdir()
    moved = tmp_path / "other" / "renamed.safetensors"
    moved.write_bytes(b"the very bytes")
    stranger = tmp_path / "cat.safetensors"
    stranger.write_bytes(b"other bytes under the old name")
    use = {"path": "/gone/cat.safetensors", "strength": 0.7}
    receipt = {"path": "/gone/cat.safetensors", "hash": content_hash(moved, {})}
    back = restored(data, {"loras": [use]}, receipts=[receipt], loras=[stranger, moved])
    assert back.loras == (LoraUse(str(moved), 0.7),) and back.missing == ()


def test_names_that_no_file_can_have_are_missing(data):
    back = restored(data, {"model": "m" * 300, "edit_images": ["x" * 300, "a\0b"], "loras": [{"path": "y" * 300}]})
    assert len(back.missing) == 3 and back.request.edit_images == ()


def test_what_is_missing_is_named(data, tmp_path):
    changed = tmp_path / "cat.safetensors"
    changed.write_bytes(b"new content")
    request = {
        "model": "who/what",
        "input_image": "/gone/start.png",
        "loras": [{"path": str(changed), "strength": 1}, {"path": "/gone/dog.safetensors", "strength": 1}],
    }
    receipts = [{"path": str(changed), "hash": "0" * 64}, {"path": "/gone/dog.safetensors", "hash": "1" * 64}]
    back = restored(data, request, receipts=receipts, loras=[changed])
    words = " ".join(back.missing)
    assert "who/what" in words and "start.png" in words and "dog.safetensors" in words and "changed since" in words
    assert back.loras == () and back.request.input_image is None
