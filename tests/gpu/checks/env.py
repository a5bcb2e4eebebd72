"""What is there: libraries, the card, its allocator."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

import torch

from backend.engine.devices import capabilities, device_memory
from tests.gpu.runner import Outcome


def environment(device: torch.device, tiny: bool) -> Outcome:
    card = device_memory.probe(device)
    found = {
        "device": card.name,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "dtypes": list(card.dtypes),
        "free GiB": card.free_bytes / 2**30,
        "total GiB": card.total_bytes / 2**30,
        "RAM GiB": card.ram_total_bytes / 2**30,
        "compiler": shutil.which("gcc") or shutil.which("cc") or "none",
        "triton": importlib.util.find_spec("triton") is not None,
        "no compiled blocks": capabilities.why_no_compiler(device),
        "no FP8 products": capabilities.why_no_fp8_products(device),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
    }
    if device.type != "cuda":
        return Outcome(None, found)
    found |= {
        "capability": list(torch.cuda.get_device_capability(device)),
        "CUDA": torch.version.cuda,
        "driver": _driver(),
    }
    found["segments grow"] = _segments_grow(device)
    grows = found["segments grow"] or sys.platform != "linux"
    return Outcome(grows and "bfloat16" in card.dtypes, found)


def _driver() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def _segments_grow(device: torch.device) -> bool:
    """Whether the allocator's segments are expandable ones, as it says itself."""
    kept = torch.empty(4 << 20, dtype=torch.uint8, device=device)
    segments = torch.cuda.memory._snapshot(device)["segments"]
    del kept
    return bool(segments) and all(one.get("is_expandable") for one in segments)
