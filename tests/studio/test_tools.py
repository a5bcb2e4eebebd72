"""LoRA tools on the page: fields become the command's arguments, and the command does what the page says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from backend.host import tool
from backend.schema.messages import Trouble
from studio import tools
from tests.studio.test_library import MADE_HERE, lora_tensors, write_safetensors

OUT = Path("/loras")


def test_fields_become_arguments():
    values = {"file": "/a.safetensors", "layout": "kohya", "rank": 8, "energy": None}
    words, out = tools.arguments("Convert to another layout", "b", False, values, OUT)
    assert (
        words == ["convert", "/a.safetensors", "/loras/b.safetensors", "--layout", "kohya"]
        and out == OUT / "b.safetensors"
    )
    words, _ = tools.arguments("Make smaller", "b.safetensors", True, values, OUT)
    assert words[:2] == ["resize", "--overwrite"] and words[-4:] == ["--rank", "8", "--layout", "kohya"]
    values = {"files": ["/a", "/b"], "strengths": "1, -0.5", "layout": "comfyui"}
    words, _ = tools.arguments("Merge several", "c", False, values, OUT)
    assert words[1:3] == ["/a:1", "/b:-0.5"]
    words, _ = tools.arguments("Edit the metadata", "d", False, {"file": "/a", "changes": "author=me\n-title"}, OUT)
    assert words[-4:] == ["--set", "author=me", "--remove", "title"]
    words, _ = tools.arguments("Edit the metadata", "d", False, {"file": "/a", "strip": True}, OUT)
    assert words[-1] == "--strip"
    words, _ = tools.arguments("Convert to another layout", "d", False, {"file": "/a", "family": "flux"}, OUT)
    assert words[-2:] == ["--family", "flux"]


@pytest.mark.parametrize(
    ("title", "name", "values"),
    [
        ("Convert to another layout", "b", {"file": ""}),
        ("Convert to another layout", "../b", {"file": "/a"}),
        ("Convert to another layout", "", {"file": "/a"}),
        ("Merge several", "b", {"files": ["/a", "/b"], "strengths": "1"}),
        ("Edit the metadata", "b", {"file": "/a", "changes": "nonsense"}),
        ("Edit the metadata", "b", {"file": "/a"}),
    ],
)
def test_a_field_that_cannot_be_is_a_sentence(title, name, values):
    with pytest.raises(Trouble):
        tools.arguments(title, name, False, values, OUT)


@pytest.mark.torch
def test_a_tool_runs_as_a_process_and_its_end_is_told(data):
    source = write_safetensors(data.loras / "a.safetensors", lora_tensors(), MADE_HERE)
    tensors = {name.replace("to_q", "add_q_proj"): value for name, value in lora_tensors().items()}
    write_safetensors(source, tensors | lora_tensors(), MADE_HERE)
    values = {"file": str(source), "layout": "kohya"}
    words, out = tools.arguments("Convert to another layout", "b", False, values, data.loras)
    tool.start(words, out=out, places=data)
    end = time.monotonic() + 120
    while tool.read(data).live:
        assert time.monotonic() < end
        time.sleep(0.1)
    now = tool.read(data)
    assert now.done and out.is_file(), now
    assert "modules written and read back" in now.said
    tool.start(words, out=out, places=data)
    while tool.read(data).live:
        time.sleep(0.1)
    assert "b.safetensors" in tool.read(data).said
