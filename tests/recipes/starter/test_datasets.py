"""The shipped picture sets are what their script draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

from backend.schema.paths import ASSETS
from recipes.starter import datasets, drawing


@pytest.mark.parametrize("kind", ["character", "style"])
def test_the_shipped_sets_are_what_the_script_draws(kind: str):
    folder = ASSETS / "datasets" / kind
    pictures = sorted(folder.glob("*.png"))
    assert 12 <= len(pictures) <= 20
    captions = [path.with_suffix(".txt").read_text(encoding="utf-8").strip() for path in pictures]
    assert len(set(captions)) == len(captions) and all(captions)
    draw = getattr(datasets, kind)
    for number in (0, len(pictures) - 1):
        picture, caption = draw(number)
        assert caption == captions[number]
        with Image.open(pictures[number]) as shipped:
            assert shipped.size == picture.size == (drawing.SIDE, drawing.SIDE)
            assert max(ImageStat.Stat(ImageChops.difference(shipped.convert("RGB"), picture)).mean) < 0.5
    trigger = json.loads((folder / "loft.json").read_text())["trigger_word"]
    assert all(trigger in caption for caption in captions)


def test_the_script_writes_pictures_captions_and_hints(tmp_path: Path):
    datasets.write(tmp_path / "style", [datasets.style(3)])
    assert sorted(path.name for path in (tmp_path / "style").iterdir()) == ["01.png", "01.txt", "loft.json"]
    assert (tmp_path / "style" / "01.txt").read_text() == "a heart, neon style\n"
