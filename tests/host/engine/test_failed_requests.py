"""Requests that failed stay until somebody has read why, also over a restart."""

from __future__ import annotations

from backend.host.engine import failed_requests
from backend.host.engine.client import Engine
from backend.host.engine.snapshot import Answer
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, LoraUse

REQUEST = GenerationRequest(prompt="Käse", loras=(LoraUse("my.safetensors", 0.5),))


def test_what_failed_is_still_told_by_the_next_studio_until_it_is_dismissed(data):
    answers = [
        Answer(f"{number:02d}", REQUEST, trouble=Trouble("bad_value", f"No {number}.", hint="Try."), ended_at=1.5)
        for number in range(failed_requests.KEPT + 1)
    ]
    for answer in answers:
        failed_requests.save(answer, data.user / "failed")
    (data.user / "failed" / "03.json").write_text("{")
    first = Engine(data)
    told = [(item.id, item.request, str(item.trouble), item.ended_at) for item in first.snapshot().failed]
    assert told == [(item.id, REQUEST, str(item.trouble), 1.5) for item in answers if item.id != "03"]
    first.dismiss("05")
    assert [item.id for item in Engine(data).snapshot().failed] == [
        item.id for item in answers if item.id not in ("03", "05")
    ]
    first.dismiss()
    assert Engine(data).snapshot().failed == () and not list((data.user / "failed").iterdir())
