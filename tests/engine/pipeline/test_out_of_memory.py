"""Memory that truly runs out while a picture is made: the phase is done again on the next rung, and the picture's receipt says so."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from backend.catalog.models.identify import identify_model
from backend.engine.devices import device_memory
from backend.engine.pipeline.pipeline import Pipeline
from backend.families import FAMILIES
from backend.schema.paths import ASSETS
from backend.schema.request import GenerationRequest

pytestmark = [pytest.mark.torch, pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")]
REQUEST = GenerationRequest(prompt="a red apple", width=640, height=640, num_inference_steps=1, guidance=1.0)
MOST_BYTES = (
    95 * 2**20
)  # beside what the process has, with 45 MiB of parts that leave less than decoding the picture whole (155 MiB), more than a tile


def test_a_decode_that_does_not_fit_is_done_in_tiles(tmp_path: Path):
    said = tmp_path / "said.json"
    child = os.fork()
    if not child:
        status = 1
        try:
            status = limited(said)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    answer = json.loads(said.read_text())
    assert len(answer["notes"]) == 2, answer
    away, tiled = answer["notes"]
    assert answer["size"] == [640, 640] and away.startswith(
        "Out of memory while the picture was decoded, so parts that are not at work now leave"
    )
    assert tiled.startswith("Out of memory while the picture was decoded, so it was done again in tiles. ")


def limited(said: Path) -> int:
    """Draws with little memory, in a process of its own."""
    import ctypes
    import resource

    torch.set_num_threads(1)
    with contextlib.suppress(
        OSError, AttributeError
    ):  # glibc: large pieces come from the system, not from what other tests have freed
        ctypes.CDLL("libc.so.6").mallopt(-3, 2**16)
    pipeline = Pipeline(identify_model(ASSETS / "starter", FAMILIES), dtype=torch.float32, device="cpu")
    pipeline.generate(GenerationRequest(prompt="a red apple", width=64, height=64, num_inference_steps=1, guidance=1.0))
    device_memory.empty_cache("cpu")
    lines = Path("/proc/self/status").read_text().splitlines()
    own = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (own + MOST_BYTES,) * 2)
    picture = pipeline.generate(REQUEST)[0]
    said.write_text(json.dumps({"size": picture.size, "notes": pipeline.notes}))
    return 0
