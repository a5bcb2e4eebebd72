"""Throws mutated files at the header reader and at recognition for a while: `python -m tests.catalog.formats.fuzz_headers --seconds 300`.

Prints how many files, which answers, the slowest, and how much memory grew. Ends with 1 on anything but a header or a Trouble,
on a file that took more than a second of processor time, and on memory that keeps growing.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path

import psutil

from backend.catalog.formats.read import read_header
from backend.catalog.lora.identify import identify_lora
from backend.families import FAMILIES
from backend.schema.messages import Trouble
from tests.catalog.files import header_of
from tests.catalog.formats.test_headers import gguf

SLOWEST_SECONDS = 1.0
MOST_GROWTH = 64 * 2**20  # bytes, after the first tenth of the time
NUMBERS = (
    -1,
    0,
    1,
    2,
    7,
    8,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    2**80,
    1.5,
    True,
    None,
    "8",
    [],
    {},
)
KEYS = (
    "dtype",
    "shape",
    "data_offsets",
    "__metadata__",
    "a.lora_A.weight",
    "a.lora_B.weight",
    "a.alpha",
    "\ud800",
    "x" * 5000,
    "",
)
STEMS = (
    "transformer_blocks.0.attn.to_q",
    "lora_unet_double_blocks_0_img_attn_qkv",
    "unet.input_blocks.4.1.transformer_blocks.0.attn2.to_k",
)
ENDS = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_down.weight",
    "lora_up.weight",
    "alpha",
    "hada_w1_a",
    "lokr_w1",
    "diff",
    "dora_scale",
    "x",
)


def honest(chance: random.Random) -> dict:
    """The header of a small LoRA, as a dictionary."""
    tensors = {}
    for _ in range(chance.randint(0, 12)):
        shape = tuple(chance.choice((1, 2, 4, 8, 3072)) for _ in range(chance.randint(0, 4)))
        tensors[f"{chance.choice(STEMS)}.{chance.choice(ENDS)}"] = (
            chance.choice(("F32", "BF16", "F8_E4M3", "F16")),
            shape,
        )
    words = {
        chance.choice(("ss_tag_frequency", "lora_adapter_metadata", "alpha", "software", "trigger")): nested(chance)
    }
    return header_of(tensors, words if chance.random() < 0.6 else None)


def nested(chance: random.Random) -> str:
    deep = chance.choice((0, 3, 50, 5000))
    return chance.choice(
        (
            '{"a": ' * deep + "1" + "}" * deep,
            "[" * deep,
            "{" + "x" * deep,
            json.dumps({"a": {"b": deep}}),
            "\x00" * deep,
        )
    )


def bent(chance: random.Random, value: object, depth: int = 0) -> object:
    """`value` with something in it replaced."""
    if chance.random() < 0.15 or depth > 5:
        return chance.choice(NUMBERS)
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        changed = dict(value)
        if chance.random() < 0.2:
            changed[chance.choice(KEYS)] = changed.pop(key)
        else:
            changed[key] = bent(chance, value[key], depth + 1)
        return changed
    if isinstance(value, list) and value:
        changed = list(value)
        changed[chance.randrange(len(changed))] = bent(chance, chance.choice(changed), depth + 1)
        return changed
    return chance.choice(NUMBERS)


def safetensors(chance: random.Random) -> bytes:
    header: object = honest(chance)
    for _ in range(chance.choice((0, 0, 1, 1, 2, 5))):
        header = bent(chance, header)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    spans = (
        [entry["data_offsets"][1] for entry in header.values() if _has_end(entry)] if isinstance(header, dict) else []
    )
    held = min(max(spans, default=0), 4096)
    length = len(text) + chance.choice((0, 0, 0, 0, 1, -1, 10**6, 2**40, 2**63))
    return struct.pack("<Q", max(0, length) % 2**64) + text + bytes(max(0, held + chance.choice((0, 0, 0, 1, -1))))


def _has_end(entry: object) -> bool:
    span = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(span, list) and len(span) > 1 and isinstance(span[1], int)


def pickled(chance: random.Random) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", bytes(chance.randrange(256) for _ in range(chance.randint(0, 60))))
        archive.writestr("a/data/0", bytes(16))
    return buffer.getvalue()


def ggml(chance: random.Random) -> bytes:
    tensors = [
        (
            "img_in.weight",
            (chance.choice((0, 4, 256, 2**40)), 64),
            chance.choice((0, 1, 12, 99)),
            chance.choice((0, 32, 2**50)),
        )
    ]
    return gguf(tensors, {"general.architecture": "flux" * chance.choice((1, 100))}, chance.choice((0, 1024, 65536)))


def damaged(chance: random.Random, data: bytes) -> bytes:
    """`data` with bytes changed, cut out or doubled."""
    out = bytearray(data)
    for _ in range(chance.choice((0, 0, 1, 3, 20))):
        if out:
            out[chance.randrange(len(out))] = chance.randrange(256)
    if chance.random() < 0.15:
        out = out[: chance.randint(0, len(out))]
    if chance.random() < 0.05:
        out += out[: chance.randint(0, len(out))]
    return bytes(out)


def answer(path: Path) -> str:
    """What the readers say; anything but a header or a Trouble is raised."""
    try:
        header = read_header(path)
        size = path.stat().st_size
        assert all(0 <= at.start <= at.end <= size for at in header.tensors.values())
    except Trouble as trouble:
        assert trouble.message and len(trouble.message) < 700
        return trouble.kind
    try:
        identify_lora(path, FAMILIES)
    except Trouble as trouble:
        return f"header; {trouble.kind}"
    return "a LoRA"


def run(seconds: float, seed: int) -> int:
    chance, process, counts = random.Random(seed), psutil.Process(), Counter()
    kinds = (safetensors, safetensors, safetensors, pickled, ggml)
    end, settled, slowest, number = time.monotonic() + seconds, None, 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        while (left := end - time.monotonic()) > 0:
            path = Path(folder) / chance.choice(("f.safetensors", "f.pt"))
            path.write_bytes(damaged(chance, chance.choice(kinds)(chance)))
            began = time.process_time()
            try:
                counts[answer(path)] += 1
            except BaseException:
                Path("crash.bin").write_bytes(path.read_bytes())
                print(f"file {number} of seed {seed} is kept as crash.bin", file=sys.stderr)
                raise
            slowest, number = max(slowest, time.process_time() - began), number + 1
            path.unlink()
            if settled is None and left < seconds * 0.9:
                settled = process.memory_info().rss
    grown = process.memory_info().rss - (settled or process.memory_info().rss)
    print(f"{number} files in {seconds:.0f} s: {dict(counts.most_common())}")
    print(
        f"slowest {slowest * 1000:.0f} ms of processor time; memory grew by {grown / 2**20:.1f} MiB after the first tenth"
    )
    return int(slowest > SLOWEST_SECONDS or grown > MOST_GROWTH)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(run(arguments.seconds, arguments.seed))
