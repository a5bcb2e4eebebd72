"""The two picture sets that ship for a first training: `python -m recipes.starter.datasets`.

`assets/datasets/character`: Zubi, a small creature that no model knows. `assets/datasets/style`: things as neon tubes
at night. Everything is drawn here, four times too large, and made smaller: no pictures of others, no licence to keep.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from backend.schema.paths import ASSETS
from recipes.starter.character_dataset import CHARACTER, character
from recipes.starter.style_dataset import STYLE, style

HINTS = {
    "character": {"name": "zubi", "trigger_word": "zubi", "sample_prompts": ("zubi on a red background\nzubi, " "waving\na red apple")},
    "style": {"name": "neon", "trigger_word": "neon style", "sample_prompts": ("a cat, neon style\na guitar, neon " "style\na red apple")},
}  # fmt: skip


def write(folder: Path, pictures: Iterable[tuple[Image.Image, str]]) -> None:
    """Pictures `01.png` … with their captions `01.txt` …, and what the training form begins with in `loft.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (picture, caption) in enumerate(pictures, start=1):
        picture.save(folder / f"{number:02d}.png", optimize=True)
        (folder / f"{number:02d}.txt").write_text(caption + "\n", encoding="utf-8")
    (folder / "loft.json").write_text(json.dumps(HINTS[folder.name], indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ASSETS / "datasets", help="where the two sets go")
    folder = parser.parse_args().folder
    write(folder / "character", map(character, range(len(CHARACTER))))
    write(folder / "style", map(style, range(len(STYLE))))


if __name__ == "__main__":
    main()
