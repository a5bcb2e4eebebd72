"""Names in no encoding, pipes in the place of pictures, and tables that were not written as they should be: a sentence each, and the rest stays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from backend.catalog.lora.metadata import table, trigger_words
from backend.dataset.dataset import read_dataset
from backend.families import FAMILIES
from backend.schema.messages import Trouble
from backend.schema.training.config import TrainingConfig
from backend.schema.untrusted import left_out_words, unnamed
from studio.generate import gallery
from studio.state.context import Studio
from studio.train import caption_editor, dataset_captions

DEEP = "[" * 200_000
posix = pytest.mark.skipif(os.name == "nt", reason="names and files that Windows does not have")


@pytest.fixture
def studio(data):
    return Studio(data, None, FAMILIES)


def foreign(folder: Path, name: bytes) -> Path:
    """A path in `folder` whose name is not in UTF-8."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(os.fsdecode(os.fsencode(folder) + b"/" + name))


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (32, 32), "red").save(path, "PNG")
    return path


def section(folder: Path, **more):
    from dataclasses import replace

    return replace(TrainingConfig().dataset, dataset_base_path=str(folder), **more)


def test_the_sentence_names_one_and_counts_the_rest():
    assert left_out_words([]) == ""
    assert unnamed(["a", "b\udcff", "\ud800"]) == ["b\ufffd", "\ufffd"]
    assert left_out_words(["b\ufffd.png"]) == "b\ufffd.png is left out: its name is not in UTF-8. Rename it."
    assert "2 entries in set (a\ufffd is one) are left out" in left_out_words(["b\ufffd", "a\ufffd"], Path("/x/set"))


@posix
def test_pictures_with_such_names_are_told_beside_the_others(studio, data):
    folder = data.outputs / "2026-01-01"
    for name in ("a.png", "b.png"):
        picture(folder / name)
    picture(foreign(folder, b"\xff.png"))
    foreign(data.outputs, b"\xfe").mkdir()
    drawn = gallery.thumbs(studio, shown=None, most=48)
    assert "2 entries in outputs" in drawn and "not in UTF-8" in drawn and drawn.count("<img") == 2
    drawn.encode()


def test_a_torn_picture_is_a_sentence_and_no_image(studio, data):
    folder = data.outputs / "2026-01-01"
    picture(folder / "whole.png")
    (folder / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 9)
    (folder / "cut.png").write_bytes((folder / "whole.png").read_bytes()[:60])
    drawn = gallery.thumbs(studio, shown=None, most=48)
    assert drawn.count("<img") == 1 and "torn.png cannot be read" in drawn and "cut.png cannot be read" in drawn
    assert "cannot be read as a picture" in gallery.stage(studio, folder / "torn.png")
    assert "<img" in gallery.stage(studio, folder / "whole.png")


@posix
def test_sets_and_pictures_of_sets_with_such_names_are_entries_with_a_sentence(data):
    mine = data.datasets / "mine"
    picture(mine / "a.png")
    picture(foreign(mine, b"\xff.png"))
    foreign(mine, b"\xfd").mkdir()
    foreign(data.datasets, b"\xfe").mkdir()
    labels = dict(dataset_captions.choices(data))
    assert "mine" in labels and any("its name is not in UTF-8" in label for label in labels)
    json.dumps(dataset_captions.choices(data)).encode()
    drawn = caption_editor.editor(mine, page=0)
    assert "2 entries in mine" in drawn and "a.png" in drawn
    drawn.encode()


@posix
def test_the_trainer_leaves_them_out_with_a_note(data, tmp_path):
    picture(tmp_path / "set" / "a.png")
    picture(foreign(tmp_path / "set", b"\xff.png"))
    picture(foreign(tmp_path / "set", b"\xfe") / "b.png")
    found = read_dataset(section(tmp_path / "set"), index=tmp_path / "index.json")
    assert [item.path.name for item in found.items] == ["a.png"]
    assert any("2 entries in set" in note and "not in UTF-8" in note for note in found.notes)
    json.dumps(found.notes).encode()


@posix
@pytest.mark.parametrize("name", ["pipe.png", "a.txt"])
def test_a_pipe_in_a_dataset_is_told_and_not_waited_for(tmp_path, name):
    picture(tmp_path / "a.png")
    os.mkfifo(tmp_path / name)
    with pytest.raises(Trouble, match=f"{name} .*(is no file|cannot be read)"):
        read_dataset(section(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", DEEP.encode(), b'{"x": 5}', b'{"%s": [1, 2, "x", null, 5]}', b"\xff", b'{"%s": 5}']
)
def test_what_is_remembered_of_pictures_may_be_anything(tmp_path, content):
    path = picture(tmp_path / "set" / "a.png")
    index = tmp_path / "index.json"
    index.write_bytes(content.replace(b"%s", str(path).encode()))
    assert read_dataset(section(tmp_path / "set"), index=index).items[0].width == 32


ROWS = {
    "deep": DEEP,
    "deep inside": '[{"image": "a.png", "prompt": ' + "[" * 90 + "]" * 90 + "}]",
    "no list": '{"image": "a.png"}',
    "an endless seed": '[{"image": "a.png", "prompt": "x", "seed": Infinity}]',
    "a NUL": '[{"image": "a\\u0000.png", "prompt": "x"}]',
    "a long name": '[{"image": "' + "y" * 5000 + '.png", "prompt": "x"}]',
}


@pytest.mark.parametrize("what", ROWS)
def test_a_table_that_is_not_as_it_should_be_is_a_sentence(tmp_path, what):
    picture(tmp_path / "a.png")
    (tmp_path / "m.json").write_text(ROWS[what])
    with pytest.raises(Trouble) as told:
        read_dataset(section(tmp_path, dataset_metadata_path=str(tmp_path / "m.json")))
    str(told.value).encode()


@pytest.mark.parametrize("line", [DEEP, '{"a": ' * 90 + "1" + "}" * 90, "NaN", '{"image": "a.png", "image": "b.png"}'])
def test_a_line_of_a_table_that_cannot_be_read_is_named(tmp_path, line):
    (tmp_path / "m.jsonl").write_text('{"image": "a.png", "prompt": "x"}\n' + line)
    with pytest.raises(Trouble, match=r"Line 2 of m\.jsonl"):
        read_dataset(section(tmp_path, dataset_metadata_path=str(tmp_path / "m.jsonl")))


def test_half_a_character_in_a_table_is_replaced(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "m.json").write_text('[{"image": "a.png", "prompt": "a \\ud83d cat"}]')
    found = read_dataset(section(tmp_path, dataset_metadata_path=str(tmp_path / "m.json")))
    assert found.items[0].captions == ("a \ufffd cat",)


@pytest.mark.parametrize(
    "text", [DEEP, "{" * 5, '{"a": ' * 100 + "1" + "}" * 100, '["\\ud800"]', '{"a": 1' + "0" * 5000 + "}"]
)
def test_metadata_of_a_lora_may_hold_any_json(tmp_path, text):
    assert isinstance(table({"x": text}, "x"), dict)
    (tmp_path / "l.json").write_text(text)
    for key in ("ss_tag_frequency", "trigger_words", "modelspec.trigger_phrase"):
        found = trigger_words({key: text}, tmp_path / "l.safetensors")
        json.dumps(found).encode()
        "".join(found).encode()


GOOD = {
    "format": 1, "family": "qwen_image", "variant": "", "texts": {"a cat": "ab12"},
    "items": [{"latents": {"False": "ab12"}, "captions": ["a cat"], "size": [64, 32], "digest": "d", "weight": 1.0, "prior": False, "seed": None}],
}  # fmt: skip


def encodings(**changes) -> bytes:
    return json.dumps({**GOOD, "items": [{**GOOD["items"][0], **changes}]}).encode()


TABLES = {
    "empty": b"", "deep": DEEP.encode(), "a list": b"[]", "no items": b'{"family": "x"}', "items of another type": b'{"items": 5}',
    "a key that is a path": encodings(latents={"False": "../../../etc/x"}),
    "a key that is an absolute path": encodings(latents={"False": "/dev/zero"}),
    "a size of text": encodings(size=["a", 5]), "an endless size": encodings(size=[float("inf"), 5]), "no size": encodings(size=[]),
    "an endless weight": encodings(weight=float("nan")), "captions of numbers": encodings(captions=[5]),
    "texts with a path": json.dumps({**GOOD, "texts": {"a": "../../x"}}).encode(),
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("what", TABLES)
def test_encodings_that_others_wrote_are_damaged_or_read(tmp_path, what):
    from backend.training.encoding import encoded_dataset

    (tmp_path / encoded_dataset.TABLE).write_bytes(TABLES[what])
    with pytest.raises(Trouble) as told:
        encoded_dataset.read(tmp_path, SimpleNamespace(spec=SimpleNamespace(family="qwen_image")), None)
    assert told.value.kind == "damaged"


@pytest.mark.torch
def test_encodings_as_they_are_written_are_read():
    from backend.training.encoding import encoded_dataset

    items, sizes, latents, _, _ = encoded_dataset._contents(Path("/x"), json.loads(json.dumps(GOOD)))
    assert sizes == [(64, 32)] and items[0].width == 32 and list(latents.values()) == ["ab12"]


@pytest.mark.torch
@pytest.mark.parametrize(
    "content",
    [
        b"",
        DEEP.encode(),
        b"[]",
        b'{"step": "x", "facts": {}}',
        b'{"step": 1, "facts": 5}',
        b'{"step": Infinity, "facts": {}}',
    ],
)
def test_a_saved_state_that_cannot_be_read_is_damaged(tmp_path, content):
    from backend.training.checkpoint import state as checkpoint

    state = tmp_path / "checkpoints" / "step-000001"
    state.mkdir(parents=True)
    (state / "state.json").write_bytes(content)
    with pytest.raises(Trouble, match=r"is damaged: its state\.json cannot be read"):
        checkpoint.load_state(state)
