"""Fetch the picture sets and turn them into sprites: 128x128 RGBA, one row per emoji, one column per look."""

import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from backend.schema.messages import Trouble

PACKAGES = {
    "3d": "@lobehub/fluent-emoji-3d@1.1.0",
    "flat": "@iconify-json/fluent-emoji-flat@1.2.6",
    "names": "unicode-emoji-json@0.9.0",
}
LOOKS = ("3d", "flat")
SIDE = 128


def fetch(folder: Path) -> dict[str, Path]:
    """The unpacked npm packages under ``folder``, downloaded where they are missing; ``{key: package folder}``."""
    npm = shutil.which("npm")
    found = {}
    for key, package in PACKAGES.items():
        place = folder / key
        if not (place / "package" / "package.json").is_file():
            if npm is None:
                raise Trouble("missing", "npm is not on the PATH; it is needed once, to fetch the picture sets.")
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run([npm, "pack", package], cwd=place, check=True, timeout=300, stdout=subprocess.DEVNULL)
            with tarfile.open(next(place.glob("*.tgz"))) as archive:
                archive.extractall(place, filter="data")
        found[key] = place / "package"
    return found


def code_points(emoji: str, *, selector: bool = True) -> str:
    """The emoji as hyphenated hexadecimal code points, with or without the variation selector."""
    return "-".join(f"{ord(c):x}" for c in emoji if selector or ord(c) != 0xFE0F)


# Microsoft's README says that its paperclip, flags, technologists and video games are not open: they stay out.
LEFT_OUT = ("\U0001f4ce", "\U0001f587\ufe0f", "\U0001f3ae", "\U0001f579\ufe0f", "\U0001f47e")
KEPT = ("\U0001f9d1\u200d\U0001f680", "\U0001f9d1\u200d\U0001f373")  # astronaut and cook


def wanted(names: dict) -> list[str]:
    """All emoji worth a sprite: no flags, none of those left out, no gendered or composed people but two."""
    plain = []
    for emoji, facts in names.items():
        joined = "\u200d" in emoji and facts["group"] == "People & Body" and emoji not in KEPT
        if facts["group"] != "Flags" and not joined and emoji not in LEFT_OUT:
            plain.append(emoji)
    return plain


def fit(picture: Image.Image) -> np.ndarray:
    """``[128, 128, 4]`` uint8, resized with premultiplied alpha so that edges get no dark rim."""
    rgba = np.asarray(picture.convert("RGBA"), np.float32) / 255
    rgba[..., :3] *= rgba[..., 3:]
    planes = [
        Image.fromarray(rgba[..., i]).resize(
            (SIDE, SIDE), Image.Resampling.BOX if picture.width % SIDE == 0 else Image.Resampling.LANCZOS
        )
        for i in range(4)
    ]
    out = np.clip(np.stack([np.asarray(p) for p in planes], -1), 0, 1)
    out[..., :3] /= np.maximum(out[..., 3:], 1e-4)
    return (np.clip(out, 0, 1) * 255 + 0.5).astype(np.uint8)


def read_3d(package: Path, emoji: str) -> np.ndarray | None:
    for selector in (True, False):
        path = package / "assets" / f"{code_points(emoji, selector=selector)}.webp"
        if path.is_file():
            return fit(Image.open(path))
    return None


def flat_reader(package: Path):
    """A function emoji -> pixels that renders from the icon set's SVG bodies."""
    import resvg_py

    icons = json.loads((package / "icons.json").read_text("utf-8"))
    names = json.loads((package / "chars.json").read_text("utf-8"))
    width, height = icons.get("width", 32), icons.get("height", 32)

    def read(emoji: str) -> np.ndarray | None:
        name = names.get(code_points(emoji)) or names.get(code_points(emoji, selector=False))
        icon = icons["icons"].get(name)
        if icon is None:
            return None
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {icon.get("width", width)} {icon.get("height", height)}">{icon["body"]}</svg>'
        )
        png = resvg_py.svg_to_bytes(svg_string=svg, width=2 * SIDE, height=2 * SIDE)
        return fit(Image.open(io.BytesIO(bytes(png))))

    return read


def render(work: Path) -> Path:
    """Write ``sprites.npy`` ``[emoji, look, 128, 128, 4]`` uint8 and ``sprites.json`` (the emoji, in order)."""
    target = work / "sprites.npy"
    if target.is_file():
        return target
    packages = fetch(work / "packages")
    names = json.loads((packages["names"] / "data-by-emoji.json").read_text("utf-8"))
    flat = flat_reader(packages["flat"])
    rows, emoji = [], []
    for one in wanted(names):
        pair = (read_3d(packages["3d"], one), flat(one))
        if all(look is not None for look in pair):
            rows.append(np.stack(pair))
            emoji.append(one)
    (work / "sprites.json").write_text(json.dumps(emoji), "utf-8")
    part = work / "sprites.part.npy"
    np.save(part, np.stack(rows))
    part.replace(target)
    return target
