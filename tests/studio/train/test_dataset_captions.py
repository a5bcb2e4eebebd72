"""Datasets on the page: what is found, what a caption says, and that nothing is overwritten silently."""

from __future__ import annotations

import pytest
from PIL import Image

from backend.schema.messages import Trouble
from studio.train import caption_editor, dataset_captions


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "set"
    made.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (20, 20)).save(made / f"{name}.png")
    (made / "a.txt").write_text("a red ball", encoding="utf-8")
    return made


def test_pictures_are_found_as_the_trainer_finds_them(folder):
    (folder / "a.mask.png").write_bytes((folder / "a.png").read_bytes())
    (folder / ".hidden.png").write_bytes((folder / "a.png").read_bytes())
    assert [path.name for path in dataset_captions.pictures_in(folder)] == ["a.png", "b.png"]


def test_no_folder_and_no_pictures_are_sentences(tmp_path):
    with pytest.raises(Trouble, match="does not exist"):
        dataset_captions.pictures_in(tmp_path / "nowhere")
    with pytest.raises(Trouble, match="no pictures"):
        dataset_captions.pictures_in(tmp_path)


def test_an_edited_caption_is_saved_and_the_old_text_kept(folder, data):
    edits = {"a.png": "a blue ball", "b.png": "a box", "../c.png": "no"}
    target, words = dataset_captions.save(folder, edits, data)
    assert target == folder and "2 captions" in words
    assert (
        dataset_captions.read_caption(folder / "a.txt") == "a blue ball"
        and dataset_captions.read_caption(folder / "b.txt") == "a box"
    )
    (earlier,) = (folder / dataset_captions.EARLIER).rglob("a.txt")
    assert earlier.read_text() == "a red ball" and str(earlier.parent) in words


def test_saves_are_taken_back_one_by_one_and_what_they_said_is_kept(folder, data):
    (folder / "a.txt").write_bytes("grüner Ball".encode("utf-16"))
    as_it_was = (folder / "a.txt").read_bytes()
    dataset_captions.save(folder, {"a.png": "a blue ball", "b.png": "a box"}, data)
    dataset_captions.save(folder, {"a.png": "a black ball"}, data)
    assert dataset_captions.undo(folder) == (["a.png"], "1 caption as before the last save.")
    assert (
        dataset_captions.read_caption(folder / "a.txt") == "a blue ball"
        and dataset_captions.read_caption(folder / "b.txt") == "a box"
    )
    names, words = dataset_captions.undo(folder)
    assert names == ["a.png", "b.png"] and "2 captions" in words
    assert (folder / "a.txt").read_bytes() == as_it_was and dataset_captions.read_caption(folder / "b.txt") == ""
    assert {path.read_text().strip() for path in (folder / dataset_captions.EARLIER).rglob("a.txt")} == {
        "a blue ball",
        "a black ball",
    }
    assert dataset_captions.undo(folder)[0] == [] and "no save" in dataset_captions.undo(folder)[1]
    assert not list(folder.rglob(".*"))


def test_an_unchanged_caption_writes_nothing(folder, data):
    target, words = dataset_captions.save(folder, {"a.png": "a red ball "}, data)
    assert target == folder and words == "No caption was changed." and not (folder / dataset_captions.EARLIER).exists()


def test_a_set_that_comes_with_loft_is_copied_first(folder, data, monkeypatch):
    monkeypatch.setattr(dataset_captions, "ASSETS", folder.parent)
    target, words = dataset_captions.save(folder, {"a.png": "changed"}, data)
    assert target == data.datasets / "set" and str(target) in words
    assert (folder / "a.txt").read_text() == "a red ball" and dataset_captions.read_caption(
        target / "a.txt"
    ) == "changed"


def test_a_caption_in_another_encoding_is_readable(folder):
    (folder / "a.txt").write_bytes("grüner Apfel".encode("cp1252"))
    assert dataset_captions.read_caption(folder / "a.txt") == "grüner Apfel"
    (folder / "a.txt").write_bytes("红苹果".encode("utf-16"))
    assert dataset_captions.read_caption(folder / "a.txt") == "红苹果"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metadata.csv", "image,prompt\na.png,from the table\n"),
        ("metadata.json", '[{"image": "a.png", "prompt": "from the table"}]'),
        ("metadata.jsonl", '{"image": "a.png", "prompt": "from the table"}\nnot json\n'),
    ],
)
def test_a_metadata_file_is_shown_and_not_edited(folder, name, text):
    (folder / name).write_text(text)
    shown = caption_editor.editor(folder, page=0)
    assert "from the table" in shown and name in shown and "Save captions" not in shown


def test_captions_are_shown_as_text_not_as_markup(folder):
    (folder / "a.txt").write_text("</textarea><img src=x onerror=alert(1)>")
    assert "<img src=x" not in caption_editor.editor(folder, page=0)


def test_an_upload_becomes_a_set_of_its_own(data, folder):
    files = [str(path) for path in sorted(folder.iterdir())]
    one, words = dataset_captions.take_upload(files, "my ../cat", data)
    two, _ = dataset_captions.take_upload(files, "my ../cat", data)
    assert one.parent == two.parent == data.datasets and one != two
    assert "2 pictures, 1 with a caption" in words and (one / "a.txt").is_file()
    with pytest.raises(Trouble, match="no picture"):
        dataset_captions.take_upload([str(folder / "a.txt")], "x", data)


def test_many_pictures_come_in_pages(tmp_path):
    for i in range(caption_editor.PAGE + 1):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{i:03d}.png")
    assert caption_editor.editor(tmp_path, page=0).count("<textarea") == caption_editor.PAGE
    assert caption_editor.editor(tmp_path, page=9).count("<textarea") == 1


def test_a_set_to_edit_shows_what_each_picture_was_made_from(folder):
    table = '[{"image": "b.png", "prompt": "make it blue", "edit_image": "a.png"}, {"image": "a.png", "prompt": ["x", "y"], "edit_image": ["b.png", "a.png"]}]'
    (folder / "metadata.json").write_text(table)
    first, second = dataset_captions.samples_in(folder)
    assert (first.picture.name, first.caption, [path.name for path in first.edited_from]) == (
        "b.png",
        "make it blue",
        ["a.png"],
    )
    assert (second.caption, [path.name for path in second.edited_from]) == ("x | y", ["b.png", "a.png"])
    html = caption_editor.editor(folder, page=0)
    assert html.count("captioned edited") == 2 and html.count("<img") == 5 and html.count("→") == 2
    assert "2 pictures, captions from metadata.json, each with what it was edited from" in html
    (folder / "metadata.json").write_text('[{"prompt": "no picture"}]')
    assert "names no pictures" in caption_editor.editor(folder, page=0)
