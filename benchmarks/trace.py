"""Memory over time: load, three pictures of 512 x 512 in two steps each, unload; through the Python API, with the
medium transformer.

The text encoder is a small one of the transformer's width with random weights, the autoencoder the starter's, so the
curves are the transformer's. "streamed" has a model of about the same size in 12 blocks of half the width: of three
blocks two would be staging, and then none could stay.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from pathlib import Path

from medium import MIB, files_of, make_model, part_of, private_rss, row, rss
from peers import DISK, FP8

STARTER = Path(__file__).resolve().parents[1] / "assets" / "starter"
DISK_TO_FP8 = {"offload_device": "disk", "onload_device": "disk", "preparing_dtype": "float8_e4m3fn"}
CONFIGS = {
    "resident": {},
    "FP8": FP8,
    "streamed": {"offload_device": "disk", "onload_device": "disk"},  # as many blocks stay as the limit allows
    "disk": DISK,
    "disk to FP8": DISK_TO_FP8,
}
LIMITS_GIB = {"streamed": 1.25}
NARROW_LAYERS = 12
EVERY_SECONDS = 0.02
KEY = (
    ("RSS, the file's mapped pages included", "#888888"),
    ("private memory", "#1f5fbf"),
    ("size of the transformer's file", "#cc3333"),
)


def _text_encoder(folder: Path) -> Path:
    """One layer of the width that the transformer takes, saved once."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    place = folder / "text_encoder"
    if not place.exists():
        config = json.loads((STARTER / "text_encoder" / "config.json").read_text(encoding="utf-8"))
        text = {
            "hidden_size": 3584,
            "intermediate_size": 512,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_hidden_layers": 1,
        }
        text |= {
            "layer_types": ["full_attention"],
            "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1e6, "rope_type": "default"},
        }
        config["text_config"] |= text
        config["vision_config"]["out_hidden_size"] = 3584
        torch.manual_seed(0)
        Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config)).to(torch.bfloat16).save_pretrained(place)
    return place


def _model(folder: Path, quick: bool, who: str):
    """The transformer that `who` is measured with."""
    if who != "streamed":
        return part_of(folder, quick)
    narrow = folder / "narrow"
    if not files_of(narrow):
        narrow.mkdir()
        make_model(narrow, True, NARROW_LAYERS)
    return part_of(narrow, True, NARROW_LAYERS)


def draw_three(folder: Path, quick: bool, who: str) -> None:
    """One configuration: what the process holds, sampled all the while, goes to `trace.json` in `folder`."""
    import torch

    from backend.engine.devices import device_memory
    from backend.engine.loading import load
    from backend.families import qwen_image
    from backend.pipelines import ModelConfig, QwenImagePipeline

    torch.set_num_threads(1)
    encoder, transformer = _text_encoder(folder), _model(folder, quick, who)
    for part in qwen_image.PARTS.values():  # imports count before, not as the model's
        load.find_class(part.network)
    device_memory.empty_cache("cpu")
    began, samples, marks, over = time.perf_counter(), [], [], threading.Event()

    def look() -> tuple[int, int]:
        samples.append((time.perf_counter() - began, rss(), private_rss()))
        return samples[-1][1:]

    def watch() -> None:
        while not over.wait(EVERY_SECONDS):
            look()

    def mark(name: str) -> tuple[int, int]:
        marks.append((time.perf_counter() - began, name))
        return look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    before = mark("load")
    configs = [ModelConfig(path=transformer.files, **CONFIGS[who])]
    configs.append(ModelConfig(path=sorted(encoder.glob("model*.safetensors"))))
    configs.append(ModelConfig(path=STARTER / "vae" / "diffusion_pytorch_model.safetensors"))
    tokenizer = ModelConfig(path=STARTER / "tokenizer")
    pipe = QwenImagePipeline.from_pretrained(
        torch.bfloat16, "cpu", configs, tokenizer_config=tokenizer, vram_limit=LIMITS_GIB.get(who)
    )
    loaded = look()
    for number in range(3):
        mark(f"picture {number + 1}")
        pipe("a red apple", height=512, width=512, num_inference_steps=2, cfg_scale=1.0, seed=number)
    drawn = mark("unload")
    del pipe
    gc.collect()
    device_memory.empty_cache("cpu")
    after = look()
    time.sleep(0.3)
    over.set()
    watcher.join()
    highest = tuple(max(sample[index] for sample in samples) for index in (1, 2))
    _keep(folder / "trace.json", who, {"samples": samples, "marks": marks, "file_bytes": transformer.nbytes})
    for index, what in enumerate(("RSS", "private")):
        named = {"before": before, "loaded": loaded, "after 3 pictures": drawn, "highest": highest, "unloaded": after}
        row(f"{what} in MiB, {who}", "-", **{name: values[index] / MIB for name, values in named.items()})


def _keep(path: Path, name: str, found: dict) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, name: found}))


def draw_curves(path: Path, picture: Path) -> None:
    """A panel for each configuration: RSS (grey, with the file's mapped pages) and private memory (blue), the size of
    the file as a dotted line."""
    from PIL import Image, ImageDraw

    traces = json.loads(path.read_text())
    width, height, left, top = 420, 210, 62, 26
    top_bytes = max(sample[1] for one in traces.values() for sample in one["samples"]) * 1.05
    canvas = Image.new("RGB", (2 * width, (len(traces) + 1) // 2 * height), "white")
    pen = ImageDraw.Draw(canvas)
    for number, (name, one) in enumerate(traces.items()):
        x0, y0 = number % 2 * width + left, number // 2 * height + top
        wide, high = width - left - 14, height - top - 34
        seconds = one["samples"][-1][0]

        def at(when: float, nbytes: float, x0=x0, y0=y0, wide=wide, high=high, seconds=seconds) -> tuple[float, float]:
            return x0 + when / seconds * wide, y0 + high - nbytes / top_bytes * high

        for gib in range(int(top_bytes / 2**30) + 1):
            pen.line([at(0, gib * 2**30), at(seconds, gib * 2**30)], fill="#e4e4e4")
            pen.text((x0 - 34, at(0, gib * 2**30)[1] - 6), f"{gib} GiB", fill="#555555")
        for when, what in one["marks"]:
            x = at(when, 0)[0]
            pen.line([at(when, 0), at(when, top_bytes)], fill="#f0c8a0")
            if what != "load":
                side = (
                    {"xy": (x - 3, y0 + high + 4), "anchor": "ra"}
                    if what == "unload"
                    else {"xy": (x + 2, y0 + high + 4)}
                )
                pen.text(text=what if what.endswith(("1", "d")) else what[-1], fill="#b06010", **side)
        for dash in range(0, wide, 6):
            y = at(0, one["file_bytes"])[1]
            pen.line([x0 + dash, y, x0 + dash + 2, y], fill="#cc3333")
        for index, colour in ((1, "#888888"), (2, "#1f5fbf")):
            pen.line([at(sample[0], sample[index]) for sample in one["samples"]], fill=colour, width=2)
        pen.text((x0, y0 - 18), f"{name}  ({seconds:.0f} s)", fill="black")
    x0, y0 = len(traces) % 2 * width + left, len(traces) // 2 * height + top
    for line, (text, colour) in enumerate(KEY if len(traces) % 2 else ()):
        pen.text((x0, y0 + 20 * line), text, fill=colour)
    canvas.save(picture, optimize=True)
