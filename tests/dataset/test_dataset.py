"""Datasets as people have them: folders and tables, odd encodings, broken pictures, nothing at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from backend.dataset.captions import drawn, lines_of, with_trigger
from backend.dataset.crops import cut, num_cuts
from backend.dataset.dataset import Item, read_dataset
from backend.schema.messages import Trouble
from backend.schema.training.config import DatasetSection


def picture(path: Path, size: tuple[int, int] = (32, 24), colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def read(folder: Path, **settings):
    index = settings.pop("index", None)
    return read_dataset(replace(DatasetSection(), dataset_base_path=str(folder), **settings), index=index)


def test_a_folder_of_pictures_with_captions(tmp_path: Path):
    picture(tmp_path / "b.png").with_suffix(".txt").write_text("a red square\n", encoding="utf-8")
    picture(tmp_path / "inner" / "a.jpg", (40, 20))
    picture(tmp_path / ".hidden" / "c.png")
    data = read(tmp_path)
    assert [(item.path.name, item.captions, item.width, item.height) for item in data.items] == [
        ("b.png", ("a red square",), 32, 24),
        ("a.jpg", ("",), 40, 20),
    ]
    assert data.notes == (f"1 of 2 pictures in {tmp_path.name} have no caption.",)


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8", "ein grüner Würfel"),
        ("utf-8-sig", "ein grüner Würfel"),
        ("utf-16", "ein grüner Würfel"),
        ("cp1252", "ein grüner Würfel"),
        ("gb18030", "一只红色的猫坐在桌子上"),
        ("utf-16-le", "ein grüner Würfel"),
    ],
)
def test_captions_in_other_encodings_are_read_and_the_encoding_said(tmp_path: Path, encoding: str, text: str):
    picture(tmp_path / "a.png").with_suffix(".txt").write_bytes(text.encode(encoding))
    data = read(tmp_path)
    assert data.items[0].captions == (text,)
    said = [note for note in data.notes if "a.txt" in note]
    assert said == ([] if encoding.startswith("utf-8") else [f"a.txt was read as {encoding}."])


def test_csv_json_and_jsonl_say_the_same(tmp_path: Path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    rows = [{"image": "a.png", "prompt": 'one, "two"'}, {"image": "b.png", "prompt": "drei\nvier"}]
    (tmp_path / "m.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "m.csv").write_text('image,prompt\na.png,"one, ""two"""\nb.png,"drei\nvier"\n', encoding="utf-16")
    read_as = {
        kind: [item.captions for item in read(tmp_path, dataset_metadata_path=str(tmp_path / f"m.{kind}")).items]
        for kind in ("csv", "json", "jsonl")
    }
    assert read_as["csv"] == read_as["json"] == read_as["jsonl"] == [('one, "two"',), ("drei\nvier",)]


def test_a_prompt_may_be_a_list_of_which_one_is_drawn(tmp_path: Path):
    picture(tmp_path / "a.png")
    (tmp_path / "m.json").write_text(json.dumps([{"image": "a.png", "prompt": ["one", "two"]}]))
    item = read(tmp_path, dataset_metadata_path=str(tmp_path / "m.json")).items[0]
    seen = {drawn(item.captions, Random(number), dropout=0.0, shuffle=False) for number in range(20)}
    assert seen == {"one", "two"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "holds no rows"),
        ("{", "cannot be read"),
        ('[{"file": "a.png", "prompt": "x"}]', "its columns are file, prompt"),
        ('[{"image": "a.png"}]', "no column `prompt`"),
        ('[{"image": "gone.png", "prompt": "x"}]', "gone.png does not exist"),
        ('[{"image": "a.png", "prompt": 3}]', "neither text nor a list"),
        (
            '[{"image": "a.png", "prompt": "x"}, {"image": " ", "prompt": "x"}]',
            "Row 2 of m.json names no picture: its image is empty",
        ),
        ('[{"image": ["a.png"], "prompt": "x"}]', "['a.png'] under image, which is no file's name"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path: Path, content: str, words: str):
    picture(tmp_path / "a.png")
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(Trouble) as caught:
        read(tmp_path, dataset_metadata_path=str(tmp_path / "m.json"))
    assert words in str(caught.value)


def test_an_empty_and_a_missing_folder_are_said_apart(tmp_path: Path):
    (tmp_path / "a.txt").write_text("only words")
    with pytest.raises(Trouble) as empty:
        read(tmp_path)
    with pytest.raises(Trouble) as missing:
        read(tmp_path / "nowhere")
    assert (empty.value.kind, missing.value.kind) == ("empty_dataset", "missing_file")
    assert str(tmp_path) in empty.value.message


def test_a_broken_picture_is_named_and_left_out_only_when_asked(tmp_path: Path):
    picture(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"not a picture")
    with pytest.raises(Trouble) as caught:
        read(tmp_path)
    assert caught.value.kind == "broken_picture" and "b.png" in caught.value.message
    assert "object at" not in caught.value.message
    data = read(tmp_path, skip_broken_pictures=True)
    assert [item.path.name for item in data.items] == ["a.png"]
    assert any("b.png" in note for note in data.notes)


def test_several_folders_have_weights(tmp_path: Path):
    picture(tmp_path / "one" / "a.png")
    picture(tmp_path / "two" / "b.png")
    both = f"{tmp_path / 'one'},{tmp_path / 'two'}"
    data = read_dataset(replace(DatasetSection(), dataset_base_path=both, dataset_weights="1,2.5"))
    assert [item.weight for item in data.items] == [1.0, 2.5]
    with pytest.raises(Trouble):
        read_dataset(replace(DatasetSection(), dataset_base_path=both, dataset_weights="1"))


def test_sizes_are_remembered_until_a_file_changes(tmp_path: Path):
    index = tmp_path / "cache" / "index.json"
    path = picture(tmp_path / "set" / "a.png")
    first = read(tmp_path / "set", index=index)
    stored = json.loads(index.read_text())
    entry = stored[str(path)]
    entry[2] = 999  # what an index remembers is used as it is ...
    index.write_text(json.dumps(stored))
    assert read(tmp_path / "set", index=index).items[0].width == 999
    picture(path, (50, 24), "blue")  # ... until the file is another
    again = read(tmp_path / "set", index=index).items[0]
    assert (again.width, first.items[0].width) == (50, 32)
    assert again.digest != first.items[0].digest


def test_masks_beside_pictures_are_no_pictures(tmp_path: Path):
    picture(tmp_path / "a.png")
    mask = picture(tmp_path / "a.mask.png")
    picture(tmp_path / "b.png")
    items = read(tmp_path, masked_loss="file").items
    assert [item.mask for item in items] == [mask, None]


def test_a_broken_mask_is_named_before_training_and_leaves_its_picture_out_only_when_asked(tmp_path: Path):
    mask = picture(tmp_path / "a.png").with_name("a.mask.png")
    picture(tmp_path / "b.png")
    Image.effect_noise((64, 64), 50).save(mask)
    mask.write_bytes(mask.read_bytes()[:2000])  # whole in its header
    with pytest.raises(Trouble, match=r"a\.mask\.png cannot be read"):
        read(tmp_path, masked_loss="file")
    found = read(tmp_path, masked_loss="file", skip_broken_pictures=True)
    assert [item.path.name for item in found.items] == ["b.png"]


def test_cuts_lie_inside_have_the_proportions_and_are_never_enlarged():
    wide = Item(path=Path("a"), captions=("",), width=400, height=100, digest="x")
    assert cut(wide, (64, 64), 0, zoom=4.0) is None
    boxes = [cut(wide, (64, 64), number, zoom=4.0) for number in range(1, 40)]
    assert len(set(boxes)) == 39 and boxes[0] == cut(wide, (64, 64), 1, zoom=4.0)
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= 400 and 0 <= top < bottom <= 100
        assert right - left == pytest.approx(bottom - top, abs=0.01) and bottom - top >= 63.9
    assert max(box[0] for box in boxes) > 200 and min(box[0] for box in boxes) < 100


def test_only_pictures_with_room_have_several_cuts():
    square, small = (Item(path=Path("a"), captions=("",), width=side, height=side) for side in (200, 64))
    assert num_cuts(square, (64, 64), crops=4, zoom=1.0) == 1 and num_cuts(square, (64, 64), crops=4, zoom=2.0) == 4
    assert num_cuts(small, (64, 64), crops=4, zoom=2.0) == 1 and num_cuts(square, (32, 64), crops=4, zoom=1.0) == 4
    assert num_cuts(replace(square, prior=True), (32, 64), crops=4, zoom=2.0) == 1


def test_trigger_words_dropout_and_shuffle(tmp_path: Path):
    assert with_trigger("on a table", "zubi") == "zubi, on a table"
    assert with_trigger("a small Zubi", "zubi") == "a small Zubi"
    assert with_trigger("", "zubi") == "zubi"
    random = Random(0)
    some = [drawn(("a, b, c, d",), random, dropout=0.5, shuffle=True) for _ in range(400)]
    empty = sum(not caption.strip() for caption in some)
    assert 150 < empty < 250 and {caption for caption in some if not caption.strip()} == {"", " "}
    full = {caption for caption in some if caption.strip()}
    assert len(full) == 6 and all(caption.startswith("a,") for caption in full)


def test_prompts_are_lines_or_a_file_of_lines(tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n two \n", encoding="utf-16")
    assert lines_of(str(file)) == lines_of("one\ntwo") == ["one", "two"]
    assert lines_of("a picture of readme.txt") == ["a picture of readme.txt"]


def table(folder: Path, *rows: dict) -> str:
    (folder / "m.json").write_text(json.dumps(rows))
    return str(folder / "m.json")


def test_pictures_that_samples_are_edited_from(tmp_path: Path):
    for name, size in (("a.png", (32, 24)), ("b.png", (48, 16)), ("c/d.png", (20, 20))):
        picture(tmp_path / name, size)
    one, several = (
        {"image": "a.png", "prompt": "x", "edit_image": "b.png"},
        {"image": "b.png", "prompt": "y", "edit_image": ["a.png", "c/d.png"]},
    )
    named = {"dataset_metadata_path": table(tmp_path, one, several), "data_file_keys": ("image", "edit_image")}
    section = replace(DatasetSection(), dataset_base_path=str(tmp_path), **named)
    first, second = read_dataset(section, edits=True).items
    assert [(one.path.name, one.width, one.height) for one in second.edits] == [("a.png", 32, 24), ("d.png", 20, 20)]
    assert first.edits[0].digest == second.digest and second.edits[0].digest == first.digest
    assert all(item.edits == () for item in read_dataset(section).items)
    (tmp_path / "m.csv").write_text("image,prompt,edit_image\na.png,x,b.png\nb.png,y,a.png\n")
    items = read_dataset(replace(section, dataset_metadata_path=str(tmp_path / "m.csv")), edits=True).items
    assert [one.path.name for item in items for one in item.edits] == ["b.png", "a.png"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "Row 1 of m.json does not say which picture it is edited from"),
        ({"edit_image": ""}, "it has no edit_image"),
        ({"edit_image": []}, "it has no edit_image"),
        ({"edit_image": ["a.png", 3]}, "neither a file's name nor a list of them"),
        ({"edit_image": "gone.png"}, "gone.png does not exist"),
        ({"edit_image": "x" * 300}, "xxx does not exist"),
        ({"edit_image": "a\0.png"}, "does not exist"),
        ({"edit_image": ["a.png", "b.png"]}, "b.png cannot be read (it is empty or no picture)"),
    ],
)
def test_what_is_wrong_with_a_picture_to_edit_is_said(tmp_path: Path, more: dict, words: str):
    picture(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no picture")
    section = replace(DatasetSection(), dataset_base_path=str(tmp_path))
    section = replace(section, dataset_metadata_path=table(tmp_path, {"image": "a.png", "prompt": "x", **more}))
    with pytest.raises(Trouble) as caught:
        read_dataset(section, edits=True)
    assert words in str(caught.value)
    assert len(read_dataset(section).items) == 1  # a model that edits nothing does not look at the column


def test_a_sample_whose_picture_to_edit_is_broken_is_left_out_when_asked(tmp_path: Path):
    picture(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no picture")
    rows = [{"image": "a.png", "prompt": "x", "edit_image": name} for name in ("b.png", "a.png")]
    section = replace(DatasetSection(), dataset_base_path=str(tmp_path), dataset_metadata_path=table(tmp_path, *rows))
    data = read_dataset(replace(section, skip_broken_pictures=True), edits=True)
    assert len(data.items) == 1 and data.broken[0][0].name == "b.png" and "b.png" in data.notes[0]


def test_a_plain_folder_cannot_say_what_its_pictures_are_edited_from(tmp_path: Path):
    picture(tmp_path / "a.png")
    (tmp_path / "pairs.jsonl").write_text("")
    with pytest.raises(
        Trouble, match=r"columns image, prompt and edit_image \(--dataset_metadata_path\); there is pairs.jsonl"
    ):
        read_dataset(replace(DatasetSection(), dataset_base_path=str(tmp_path)), edits=True)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100000,
        '[{"image": "a.png", "prompt": "x", "seed": "²"}]',
        '[{"image": "a.png", "prompt": "x", "seed": 9223372036854775808}]',
    ],
)
def test_a_table_that_is_none_is_a_sentence(tmp_path: Path, text: str):
    picture(tmp_path / "a.png")
    (tmp_path / "m.json").write_text(text, encoding="utf-8")
    with pytest.raises(Trouble, match=r"nested too deeply|not a whole number"):
        read_dataset(
            replace(DatasetSection(), dataset_base_path=str(tmp_path), dataset_metadata_path=str(tmp_path / "m.json"))
        )


def test_a_caption_in_jsonl_may_hold_other_ends_of_lines(tmp_path: Path):
    picture(tmp_path / "a.png")
    (tmp_path / "m.jsonl").write_bytes('{"image": "a.png", "prompt": "x\u2028\x85y"}\r\n\r\n'.encode())
    section = replace(
        DatasetSection(), dataset_base_path=str(tmp_path), dataset_metadata_path=str(tmp_path / "m.jsonl")
    )
    assert read_dataset(section).items[0].captions == ("x\u2028\x85y",)


def rows_of(tmp_path: Path, text: str, name: str = "m.csv") -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Captions and notes of a table about a.png and b.png."""
    for picture in ("a.png", "b.png"):
        Image.new("RGB", (16, 16)).save(tmp_path / picture)
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    section = DatasetSection(dataset_base_path=str(tmp_path), dataset_metadata_path=str(tmp_path / name))
    data = read_dataset(section)
    return [item.captions for item in data.items], data.notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("image,prompt\na.png,x\nb.png,a red fox, sitting in snow\n", "Row 2 of m.csv (line 3) has more cells"),
        ("image,prompt,\na.png,a red fox, sitting in snow\n", "'sitting in snow' belongs to none"),
        ("prompt,image\na fox, sitting,a.png\n", "'a.png' belongs to none"),
        ('image,prompt\na.png,"x\ny"\nb.png, "a fox, sitting"\n', "Row 2 of m.csv (line 4)"),
        ("image,prompt\na.png\n", "Row 1 of m.csv (line 2) has 1 of the table's 2 cells"),
        ("image,seed,prompt\na.png,1\n", "has 2 of the table's 3 cells"),
        ("image,prompt,prompt\na.png,x,y\n", "two columns called prompt"),
        ('image,prompt\na.png,"never closed\nb.png,y\n', "cannot be read as a table at its line 2"),
        ('image,prompt\na.png,x\nb.png,"a" fox\n', "cannot be read as a table at its line 3"),
        ("image;prompt\na.png;x\n", "its columns are image;prompt"),
        ("image\tprompt\na.png\tx\n", "names no picture"),
        ("image,prompt\na.png,a\0b\n", "The prompt in row 1 of m.csv holds a NUL character after 'a'"),
        ("image,prompt\na.png,a\0bc\n", "The prompt in row 1 of m.csv holds a NUL character after 'a'"),
    ],
)  # fmt: skip
def test_no_caption_is_cut_and_no_cell_passed_over(tmp_path: Path, text: str, words: str):
    with pytest.raises(Trouble) as refused:
        rows_of(tmp_path, text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"image": "a.png", "prompt": "x"}\n\n{"image": "b.png", "prompt": }\n', "Line 3 of m.jsonl cannot be read"),
        ('{"image": "a.png", "prompt": "x"}\n[1]\n', "Line 2 of m.jsonl is no object"),
        (
            '{"image": "a.png", "prompt": "x", "prompt": "y"}\n',
            "Line 1 of m.jsonl cannot be read: 'prompt' stands twice",
        ),
        ('{"image": "a.png", "prompt": ["x", "a\\u0000b"]}\n', "row 1 of m.jsonl holds a NUL"),
    ],
)
def test_a_line_that_is_wrong_is_told_by_its_number(tmp_path: Path, text: str, words: str):
    with pytest.raises(Trouble) as refused:
        rows_of(tmp_path, text, "m.jsonl")
    assert words in str(refused.value)


def test_tables_as_other_programs_write_them_are_read_whole(tmp_path: Path):
    for text in (
        '\ufeffimage, prompt\r\na.png,"a fox, sitting"\r\nb.png,5" wide\r\n\ufeff',
        ',image,prompt\n0,a.png,"a fox, sitting"\n1,b.png,"5"" wide"\n\n',
        'image,prompt,\na.png,"a fox, sitting",\nb.png,"5"" wide",\n',
    ):
        captions, notes = rows_of(tmp_path, text)
        assert captions == [("a fox, sitting",), ('5" wide',)]
        assert bool(notes) == (text[0] == "," or "prompt,\n" in text)


def test_empty_captions_are_said(tmp_path: Path):
    assert rows_of(tmp_path, "image,prompt\na.png,x\nb.png, \n")[1] == ("Row 2 of m.csv has an empty caption.",)
    both = '[{"image": "a.png", "prompt": ""}, {"image": "b.png", "prompt": ["x", ""]}]'
    assert rows_of(tmp_path, both, "m.json")[1] == (
        "2 of 2 rows (row 1 is the first) of m.json have an empty caption.",
    )


def test_a_nul_in_a_caption_file_is_said(tmp_path: Path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes(b"a red\0 fox in snow")
    with pytest.raises(Trouble, match=r"a\.txt holds a NUL"):
        read_dataset(DatasetSection(dataset_base_path=str(tmp_path)))
