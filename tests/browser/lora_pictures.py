"""Fills a folder with LoRA files of mixed kinds and photographs the tab: `python -m tests.browser.lora_pictures --data FOLDER [--dark]`.

The files are made up, header and weights; nothing is trained. Needs a Chromium.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import struct
import time
from pathlib import Path

import numpy
from PIL import Image, ImageDraw

from backend.schema.paths import PROJECT, Places

NAMES = (
    "ink-wash", "paper-cut", "night-market", "soft-clay", "botanical", "blueprint", "low-sun", "woodblock", "felt-toys", "rain-city",
    "porcelain", "pixel-garden", "charcoal", "sea-glass", "tin-robots", "old-maps", "neon-signs", "folk-tiles", "cut-fruit", "snow-field",
)  # fmt: skip
QWEN = {f"transformer_blocks.{n}.attn.{kind}": (3072, 3072) for n in range(0, 60, 2) for kind in ("to_q", "to_out.0")}
FLUX = {f"double_blocks.{n}.img_attn.qkv": (9216, 3072) for n in range(19)} | {
    f"single_blocks.{n}.linear2": (3072, 15360) for n in range(0, 38, 2)
}
KLEIN = {f"double_blocks.{n}.img_attn.qkv": (12288, 4096) for n in range(8)} | {
    f"single_blocks.{n}.linear2": (4096, 16384) for n in range(0, 24, 2)
}
Z_IMAGE = {f"layers.{n}.attention.qkv": (11520, 3840) for n in range(30)}
WAN = {f"blocks.{n}.self_attn.q": (5120, 5120) for n in range(0, 40, 2)}
SDXL = {
    f"{block}.transformer_blocks.{n}.attn2.to_k": (1280, 2048)
    for block in ("input_blocks.7.1", "input_blocks.8.1", "middle_block.1", "output_blocks.0.1", "output_blocks.1.1")
    for n in range(10)
}
SD15 = {
    f"down_blocks.{level}.attentions.{n}.transformer_blocks.0.attn2.to_k": (320 * 2**level, 768)
    for level in range(3)
    for n in range(2)
} | {
    f"up_blocks.{level}.attentions.{n}.transformer_blocks.0.attn2.to_k": (320 * 2 ** (3 - level), 768)
    for level in (1, 2, 3)
    for n in range(3)
}
SD3 = {f"joint_blocks.{n}.x_block.attn.qkv": (4608, 1536) for n in range(24)}
SHARED = {f"transformer_blocks.{n}.attn.to_q": (3072, 3072) for n in range(18)}

LOFT = {"software": "Loft 0.9.0", "family": "qwen_image", "base": "Qwen-Image", "rank": "8", "alpha": "8.0"}
KINDS = (  # title, modules, prefix, flat, suffixes, metadata
    ("qwen", QWEN, "", False, "peft", LOFT | {"config": json.dumps({"learning_rate": 0.0001, "num_epochs": 12, "lora_rank": 8})}),
    ("flux", FLUX, "lora_unet_", True, "kohya", {"ss_network_module": "networks.lora_flux", "ss_network_alpha": "8.0", "ss_sd_model_name": "flux1-dev.safetensors", "ss_learning_rate": "0.0004"}),
    ("sdxl", SDXL, "lora_unet_", True, "kohya", {"ss_network_module": "networks.lora", "ss_base_model_version": "sdxl_base_v1-0", "ss_sd_model_name": "sd_xl_base_1.0.safetensors"}),
    ("wan", WAN, "diffusion_model.", False, "peft", {"software": json.dumps({"name": "ai-toolkit"}), "ss_base_model_version": "wan2.1"}),
    ("z-image", Z_IMAGE, "diffusion_model.", False, "peft", {"modelspec.architecture": "Z-Image/lora"}),
    ("klein", KLEIN, "diffusion_model.", False, "lokr", {"software": json.dumps({"name": "ai-toolkit"}), "ss_base_model_version": "flux2_klein"}),
    ("sd15", SD15, "lora_unet_", True, "loha", {"ss_network_module": "lycoris.kohya", "ss_sd_model_name": "v1-5-pruned.safetensors"}),
    ("sd3", SD3, "lora_unet_", True, "kohya", {"ss_network_module": "networks.lora_sd3", "modelspec.architecture": "stable-diffusion-3-medium/lora"}),
    ("qwen-dora", QWEN, "transformer.", False, "dora", {"lora_adapter_metadata": json.dumps({"transformer.r": 8, "transformer.lora_alpha": 16})}),
    ("qwen-onetrainer", QWEN, "transformer.", False, "kohya", {"ot_branch": "master", "ot_config": json.dumps({"epochs": 30, "lora_rank": 8})}),
    ("shared", SHARED, "transformer.", False, "peft", {}),
)  # fmt: skip


def make_library(folder: Path, count: int) -> None:
    """`count` files of mixed kinds, with and without pictures, the last few damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(7)
    for number in range(count - 3):
        kind, modules, prefix, flat, suffixes, metadata = KINDS[number % len(KINDS)]
        name = NAMES[(number * 7) % len(NAMES)]
        said = dict(metadata)
        if number % 3 != 2:
            said["modelspec.thumbnail" if number % 2 else "thumbnail"] = _picture(random, number)
        if number % 4 != 3:
            word = name.replace("-", "")[:5] + "x"
            said |= (
                {"trigger": word} if "software" in said else {"ss_tag_frequency": json.dumps({f"1_{word}": {word: 12}})}
            )
        path = folder / kind / f"{name}-{kind}-{number:03d}.safetensors"
        _write(path, _tensors(random, modules, prefix, flat, suffixes, rank=2 + 2 * (number % 3)), said)
        age = number * 26_000
        os.utime(path, (time.time() - age, time.time() - age))
    (folder / "cut-off.safetensors").write_bytes(struct.pack("<Q", 10**6) + b"{}")
    (folder / "a-model.safetensors").write_bytes(b"")
    _write(folder / "a-model.safetensors", {"img_in.weight": ("F32", numpy.zeros((4, 4), "<f4"))}, {})
    (folder / "notes.safetensors").write_text("not a file of weights at all, only words\n" * 3)


def _picture(random, number: int) -> str:
    tone = [int(value) for value in random.integers(40, 230, 6)]
    picture = Image.linear_gradient("L").resize((192, 192)).rotate(90 * (number % 4))
    picture = Image.composite(
        Image.new("RGB", (192, 192), tuple(tone[:3])), Image.new("RGB", (192, 192), tuple(tone[3:])), picture
    )
    pen = ImageDraw.Draw(picture)
    for _ in range(4):
        x, y, r = (int(value) for value in random.integers(10, 150, 3))
        fill = tuple(int(value) for value in random.integers(60, 255, 3))
        (pen.ellipse if number % 2 else pen.rounded_rectangle)((x, y, x + r // 2 + 20, y + r // 2 + 20), fill=fill)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _tensors(random, modules: dict, prefix: str, flat: bool, suffixes: str, *, rank: int) -> dict:
    found = {}

    def some(*shape: int, size: float = 0.02):
        values = (random.standard_normal(shape) * size).astype("<f4")
        return "BF16", (values.view("<u4") >> 16).astype("<u2")

    for place, (name, (rows, columns)) in enumerate(modules.items()):
        stem = prefix + (name.replace(".", "_") if flat else name)
        size = 0.01 * (1.2 + numpy.sin(place / 4))
        if suffixes == "lokr":
            left, right = some(64, 64, size=size), some(rows // 64, columns // 64)
            found |= {
                f"{stem}.lokr_w1": left,
                f"{stem}.lokr_w2": right,
                f"{stem}.alpha": ("F32", numpy.array(1.0, "<f4")),
            }
            continue
        if suffixes == "loha":
            for half in ("w1", "w2"):
                found |= {
                    f"{stem}.hada_{half}_a": some(rows, rank, size=10 * size),
                    f"{stem}.hada_{half}_b": some(rank, columns),
                }
            continue
        down, up = ("lora_down", "lora_up") if suffixes == "kohya" else ("lora_A", "lora_B")
        found |= {f"{stem}.{down}.weight": some(rank, columns), f"{stem}.{up}.weight": some(rows, rank, size=size)}
        if suffixes == "kohya":
            found[f"{stem}.alpha"] = ("F32", numpy.array(float(rank), "<f4"))
        if suffixes == "dora":
            found[f"{stem}.lora_magnitude_vector"] = ("F32", numpy.ones(rows, "<f4"))
    return found


def _write(path: Path, tensors: dict, metadata: dict) -> None:
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for name, (dtype, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(values.tobytes())


def photograph(root: Path, target: Path, *, dark: bool = False) -> None:
    """Pictures of the tab: nothing chosen, a file chosen, one that does not fit, filtered, and every tool's form."""
    from playwright.sync_api import sync_playwright

    from studio.models.lora_tools import TOOLS
    from tests.browser.conftest import Site, tab, wait_ready
    from tests.conftest import chromium_path

    target.mkdir(parents=True, exist_ok=True)
    site = Site(root, "--fake")
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 940}, color_scheme="dark" if dark else "light")
            page.goto(site.address)
            wait_ready(page)
            tab(page, "LoRAs and models")
            page.wait_for_selector("#lora-cards .card")
            shoot(page, target / "empty.png")
            page.locator("#lora-cards .card[data-what*='-qwen-0']").first.click()
            page.wait_for_selector("#lora-details .bars")
            shoot(page, target / "chosen.png")
            page.locator("#lora-cards .card[data-what*='-klein-']").first.click()
            page.wait_for_selector("#lora-details .notice.warn")
            shoot(page, target / "other.png")
            page.locator("#lora-details details summary").click()
            page.locator("#lora-search textarea, #lora-search input").first.fill("tin")
            shoot(page, target / "searched.png")
            page.locator("#lora-search textarea, #lora-search input").first.fill("shared")
            page.locator("#lora-cards .card[data-what*='-shared-']").first.click()
            shoot(page, target / "open.png")
            choose(page, "#lora-family", "FLUX.1")
            shoot(page, target / "corrected.png")
            page.locator("#lora-discard").click()
            page.wait_for_selector("#lora-said .notice")
            shoot(page, target / "discarded.png")
            page.locator("#lora-search textarea, #lora-search input").first.fill("")
            choose(page, "#lora-only", "Only what fits the chosen model")
            shoot(page, target / "fitting.png")
            page.locator("#tools-fold > button").click()
            for number, title in enumerate(TOOLS):
                choose(page, "#tool-which", title)
                page.locator("#tools-fold").scroll_into_view_if_needed()
                page.wait_for_timeout(700)
                page.locator("#tools-fold").screenshot(path=str(target / f"tool-{number}.png"))
            browser.close()
    finally:
        site.stop()


def choose(page, field: str, what: str) -> None:
    page.locator(f"{field} input").click()
    page.get_by_role("option", name=what, exact=True).click()


def shoot(page, path: Path) -> None:
    page.wait_for_timeout(1200)
    page.screenshot(path=str(path), full_page=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--target", type=Path, default=PROJECT / "docs" / "pictures" / "loras")
    arguments = parser.parse_args()
    folder = Places(arguments.data).loras
    if not folder.exists() or not any(folder.rglob("*.safetensors")):
        make_library(folder, arguments.count)
    photograph(arguments.data, arguments.target, dark=arguments.dark)


if __name__ == "__main__":
    main()
