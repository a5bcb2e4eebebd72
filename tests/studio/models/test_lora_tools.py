"""LoRA tools on the page: fields become the settings of a command, and the command does what the page says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from backend.host import lora_tool_process
from backend.schema.messages import Trouble
from studio.models import lora_tools
from tests.studio.models.test_cards import MADE_HERE, lora_tensors, write_safetensors

OUT = Path("/loras")


def test_fields_become_settings():
    values = {"file": "/a.safetensors", "layout": "kohya", "rank": 8, "energy": None}
    wanted, out = lora_tools.request("Convert to another layout", "b", False, values, OUT)
    assert out == OUT / "b.safetensors"
    assert wanted == {
        "tool": "convert", "path": "/a.safetensors", "out": str(out), "layout": "kohya", "overwrite": False
    }  # fmt: skip
    wanted, _ = lora_tools.request("Make smaller", "b.safetensors", True, values, OUT)
    assert wanted["overwrite"] is True and (wanted["rank"], wanted["layout"]) == (8, "kohya")
    values = {"files": ["/a", "/b"], "strengths": "1, -0.5", "layout": "comfyui"}
    wanted, _ = lora_tools.request("Merge several", "c", False, values, OUT)
    assert (wanted["paths"], wanted["strengths"]) == (["/a", "/b"], [1.0, -0.5])
    wanted, _ = lora_tools.request("Edit the metadata", "d", False, {"file": "/a", "changes": "author=me\n-title"}, OUT)
    assert (wanted["set"], wanted["remove"], wanted["strip"]) == ({"author": "me"}, ["title"], False)
    wanted, _ = lora_tools.request("Edit the metadata", "d", False, {"file": "/a", "strip": True}, OUT)
    assert wanted["strip"] is True
    wanted, _ = lora_tools.request("Convert to another layout", "d", False, {"file": "/a", "family": "flux"}, OUT)
    assert wanted["family"] == "flux"
    wanted, _ = lora_tools.request("Bake into a model", "d", False, {"base": "--help", "files": ["--out=/x"]}, OUT)
    assert (wanted["base"], wanted["paths"], wanted["strengths"]) == ("--help", ["--out=/x"], [1.0])


@pytest.mark.parametrize(
    ("title", "name", "values"),
    [
        ("Convert to another layout", "b", {"file": ""}),
        ("Convert to another layout", "../b", {"file": "/a"}),
        ("Convert to another layout", "", {"file": "/a"}),
        ("Convert to another layout", "n" * 300, {"file": "/a"}),
        ("Merge several", "b", {"files": ["/a"], "strengths": "strong"}),
        ("No such tool", "b", {"file": "/a"}),
        ("Merge several", "b", {"files": ["/a", "/b"], "strengths": "1"}),
        ("Edit the metadata", "b", {"file": "/a", "changes": "nonsense"}),
        ("Edit the metadata", "b", {"file": "/a"}),
    ],
)
def test_a_field_that_cannot_be_is_a_sentence(title, name, values):
    with pytest.raises(Trouble):
        lora_tools.request(title, name, False, values, OUT)


@pytest.mark.torch
def test_a_tool_runs_as_a_process_and_its_end_is_told(data):
    source = write_safetensors(data.loras / "a.safetensors", lora_tensors(), MADE_HERE)
    tensors = {name.replace("to_q", "add_q_proj"): value for name, value in lora_tensors().items()}
    write_safetensors(source, tensors | lora_tensors(), MADE_HERE)
    values = {"file": str(source), "layout": "kohya"}
    wanted, out = lora_tools.request("Convert to another layout", "b", False, values, data.loras)
    lora_tool_process.start(wanted, out=out, places=data)
    end = time.monotonic() + 120
    while lora_tool_process.read(data).live:
        assert time.monotonic() < end
        time.sleep(0.1)
    now = lora_tool_process.read(data)
    assert now.done and out.is_file(), now
    assert "modules written and read back" in now.said
    lora_tool_process.start(wanted, out=out, places=data)
    while lora_tool_process.read(data).live:
        time.sleep(0.1)
    assert "b.safetensors" in lora_tool_process.read(data).said
