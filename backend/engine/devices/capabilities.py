"""Device capabilities: torch.compile and FP8 matmul. Each function returns None, or the reason why not as a
sentence."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

import torch

FP8_CAPABILITY = (8, 9)  # the first NVIDIA generation that multiplies 8-bit floats
_CPP = {"linux": ("g++", "clang++", "c++"), "darwin": ("clang++", "g++"), "win32": ("cl", "clang-cl", "icx-cl")}
_C = ("gcc", "clang", "cc")


def why_no_compiler(device: torch.device) -> str | None:
    """None where torch.compile works on `device`, else what is missing. Does not import torch's compiler."""
    if device.type == "cpu":
        wanted = (os.environ.get("CXX", ""), *_CPP.get(sys.platform, _CPP["linux"]))
        if any(name and shutil.which(name) for name in wanted):
            return None
        return f"compiling for the CPU needs a C++ compiler, and none of {', '.join(filter(None, wanted))} is there"
    if device.type == "mps":
        return None  # Metal brings its own
    if device.type not in ("cuda", "xpu"):
        return f"torch does not compile for {device.type} devices"
    if importlib.util.find_spec("triton") is None:
        return "compiling for a card needs the package triton, which is not installed"
    wanted = (os.environ.get("CC", ""), *_C)
    if sys.platform == "linux" and not any(name and shutil.which(name) for name in wanted):
        return f"triton needs a C compiler, and none of {', '.join(filter(None, wanted))} is there"
    return None


def why_no_fp8_products(device: torch.device) -> str | None:
    """None where `device` has an FP8 matmul (`torch._scaled_mm`), else the reason. A CPU has a slow one, for tests."""
    if device.type == "cpu":
        return None if hasattr(torch, "_scaled_mm") else "this build of torch has no FP8 product"
    if device.type != "cuda" or torch.version.hip is not None:
        return "FP8 products are computed on NVIDIA cards only"
    found = torch.cuda.get_device_capability(device)
    if found >= FP8_CAPABILITY:
        return None
    name, wanted = torch.cuda.get_device_name(device), ".".join(map(str, FP8_CAPABILITY))
    return (
        f"{name} has compute capability {found[0]}.{found[1]}, and FP8 products need {wanted} "
        "(GeForce 40 series or later)"
    )
